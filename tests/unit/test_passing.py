"""Whether ranks pass on what they read: what is measured decides. No rank goes away without a word to the others."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerostall.core import passing
from zerostall.errors import CapacityError, CorruptError, SnapshotNotFoundError
from zerostall.trainer.exchange import filling, loading, passing_on
from zerostall.trainer.file_loads import File


@pytest.mark.parametrize(
    ("ranks", "read", "passed", "together"),
    [
        (8, 1.0, 0.1, True),  # NVLink beside a disk
        (8, 1.0, 1.0, True),
        (8, 1.0, 7.9, True),  # slower than the disk, and still faster than reading eight times
        (2, 1.0, 2.5, False),  # a fast disk, and ranks that only reach each other by TCP
        (1, 1.0, 9.0, True),
        (4, 0.0, 1.0, True),
    ],
)
def test_the_choice(ranks: int, read: float, passed: float, together: bool) -> None:
    way = passing.choose(ranks, 1 << 30, read, passed)
    assert way.together is together and way.reason


@given(st.integers(2, 64), st.integers(1, 1 << 40), st.floats(1e-6, 1e4), st.floats(1e-6, 1e4))
def test_it_is_the_one_that_takes_less(ranks: int, nbytes: int, read: float, passed: float) -> None:
    times = {True: max(read, passed), False: ranks * read}
    assert times[passing.choose(ranks, nbytes, read, passed).together] == min(times.values())


def test_a_rank_that_cannot_even_begin_to_read_tells_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for it in a collective."""

    class ToldError(Exception):
        pass

    def agree(problem: str, *_: object) -> None:
        if problem:
            raise ToldError(problem)

    def refuse(*_: object, **__: object) -> None:
        raise CapacityError("the device has no memory")

    monkeypatch.setattr(filling, "dist", SimpleNamespace(get_rank=lambda _: 0, get_world_size=lambda _: 2))
    monkeypatch.setattr(filling, "agree", agree)
    monkeypatch.setattr(filling.file_loads, "begin", refuse)
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDONLY)
    place = filling.Place(0, torch.zeros(8192, dtype=torch.uint8))
    try:
        with pytest.raises(ToldError, match="the device has no memory"):
            filling.fill([(File(fd, path, 8192), [place])], torch.device("cpu"), cast("Any", object()))
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", ["gone", "model.safetensors"], ids=["a run", "files"])
def test_a_rank_that_cannot_open_what_is_loaded_tells_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Rank 0 sees it; here it is not. The others wait in the collective before the first read."""
    told: list[str] = []

    def agree(problem: str, *_: object) -> None:
        told.append(problem)
        if problem:
            raise CorruptError(problem)

    def broadcast(said: list[object], *_: object, **__: object) -> None:
        said[:] = [name != "gone", 5]

    group = SimpleNamespace(
        get_rank=lambda _: 1, get_global_rank=lambda *_: 0, broadcast_object_list=broadcast, ProcessGroup=object
    )
    monkeypatch.setattr(loading, "dist", group)
    monkeypatch.setattr(passing_on, "agree", agree)
    with pytest.raises(SnapshotNotFoundError):
        loading.load(tmp_path / name, process_group=cast("Any", object()))
    (problem,) = told
    assert "SnapshotNotFoundError" in problem


def test_each_rank_says_once_that_it_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(passing_on, "agree", lambda problem, *_: told.append(problem))
    group, device = cast("Any", object()), torch.device("cpu")
    with passing_on.Beginning(device, group) as beginning:
        beginning.over()
    with passing_on.Beginning(device, group):
        pass  # nothing was to be read
    with pytest.raises(OSError), passing_on.Beginning(device, group) as beginning:
        beginning.over()
        raise OSError
    with passing_on.Beginning(device, None) as beginning:
        beginning.over()
    assert told == ["", "", ""]
