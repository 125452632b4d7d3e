"""How many threads copy tensors, by the cores that training leaves alone."""

from __future__ import annotations

import pytest

from zerostall import config
from zerostall.core import copiers


@pytest.mark.parametrize(
    ("cores", "training", "threads"),
    [
        (1, 1, 1),
        (1, None, 1),
        (2, 2, 2),
        (2, None, 2),
        (2, 1, 1),
        (2, 64, 2),
        (4, 3, 1),
        (8, 8, 2),
        (8, 4, 2),
        (64, 1, 2),
    ],
)
def test_no_core_is_taken_that_need_not_be(cores: int, training: int | None, threads: int) -> None:
    chosen = copiers.choose(cores, training)
    assert chosen.threads == threads
    assert "core" in chosen.reason


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 2), (16, 8), (128, 8)])
def test_half_of_the_cores_check_what_devices_send(cores: int, threads: int) -> None:
    assert copiers.choose_checking(cores).threads == threads


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSTALL_COPY_THREADS", "5")
    assert copiers.choose(2, 1, config.copy_threads()).threads == 5
    assert copiers.choose_checking(2, config.copy_threads()).threads == 5
    monkeypatch.delenv("ZEROSTALL_COPY_THREADS")
    assert config.copy_threads() is None
    monkeypatch.setenv("ZEROSTALL_COPY_THREADS", "none")
    with pytest.raises(ValueError, match="ZEROSTALL_COPY_THREADS='none'"):
        config.copy_threads()
