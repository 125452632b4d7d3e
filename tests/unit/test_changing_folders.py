"""Steps are evicted in the middle of a look at them, between any two calls that the look makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import zerostall
from images import HandMade, make_layout, manifest_of
from zerostall import native
from zerostall.cli.app import app
from zerostall.errors import SnapshotNotFoundError
from zerostall.flow import inspection
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.step_files import StepFiles

LAYOUT = make_layout(5000, 11)
CALLS = ("steps", "manifest", "open", "missing", "image")


def made(where: Path) -> DiskTier:
    """A run of three steps."""
    disk = DiskTier(where, native.Pool("test", 1))
    for step in (1, 2, 3):
        image = HandMade(LAYOUT, step)
        disk.put(image.image)
        disk.commit(manifest_of(image.record))
    return disk


class Evictions:
    """Evicts a step before the nth call that somebody makes of the folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: Path, step: int, nth: int) -> None:
        self.happened = False
        self._disk, self._step, self._left = DiskTier(where, native.Pool("test", 1)), step, nth
        for name in CALLS:
            monkeypatch.setattr(StepFiles, name, self._wrapped(getattr(StepFiles, name)))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **more: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self.happened = True
                self._disk.evict(self._step)
            return call(*given, **more)

        return wrapped


def listed(where: Path) -> object:
    return [(one.step, one.clean) for one in zerostall.snapshots(where)]


def verified(where: Path) -> object:
    return [(one.step, one.clean) for one in zerostall.verify(where)]


def newest(where: Path) -> object:
    return inspection.inspect(where).manifest.step


def exported(where: Path) -> object:
    zerostall.export(where, None, where.parent / "out.safetensors")
    return (where.parent / "out.safetensors").stat().st_size > 5000


@pytest.mark.parametrize(
    ("look", "with_it", "without"),
    [
        (listed, [(1, True), (2, True), (3, True)], [(1, True), (2, True)]),
        (verified, [(1, True), (2, True), (3, True)], [(1, True), (2, True)]),
        (newest, 3, 2),
        (exported, True, True),
    ],
)
def test_a_step_that_goes_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object], with_it: object, without: object
) -> None:
    nth = 0
    while True:
        nth += 1
        where = tmp_path / f"run-{nth}" / "run"
        made(where)
        with monkeypatch.context() as patch:
            evictions = Evictions(patch, where, 3, nth)
            try:
                seen = look(where)
            except SnapshotNotFoundError as error:
                assert look is exported and "was evicted while it was read" in str(error)  # its bytes were being read
                seen = without
        assert seen in (with_it, without), f"evicted before call {nth}"
        if not evictions.happened:
            assert nth > 4
            return


LOOKS: list[Callable[[Path], object]] = [
    lambda where: zerostall.verify(where, 3),
    lambda where: zerostall.diff(where, 1, 3),
    lambda where: zerostall.diff(where, 3, 1),
    lambda where: zerostall.pin(where, 3),
    lambda where: inspection.inspect(where, 3),
    lambda where: zerostall.export(where, 3, where.parent / "out.safetensors"),
]


@pytest.mark.parametrize("number", range(len(LOOKS)))
def test_a_step_that_was_asked_for_and_goes_is_said_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    nth, gone = 0, 0
    while True:
        nth += 1
        where = tmp_path / f"run-{nth}" / "run"
        made(where)
        with monkeypatch.context() as patch:
            evictions = Evictions(patch, where, 3, nth)
            try:
                LOOKS[number](where)
            except SnapshotNotFoundError as error:
                gone += 1
                assert "step 3" in str(error)
        if not evictions.happened:
            assert gone
            return


@pytest.mark.parametrize("words", [("ls",), ("show",), ("verify",)])
def test_commands_do_not_fail_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.setenv("ZEROSTALL_RUNTIME_DIR", str(tmp_path / "no agent"))
    for nth in range(1, 12):
        where = tmp_path / f"run-{nth}" / "run"
        made(where)
        with monkeypatch.context() as patch:
            Evictions(patch, where, 3, nth)
            done = CliRunner().invoke(app, [*words, str(where)])
        assert done.exit_code == 0, done.output
        assert "damaged" not in done.output
