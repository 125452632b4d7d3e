"""The power goes after any one call: of what was announced as durable nothing is lost, and nothing else does harm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from crash.conftest import StartAgent
from crash.live import Run, restored
from crash.power import Disk
from shim.faults import Call, Shim, Trace

CHANGES = "open,write,truncate,allocate,fsync,fdatasync,mkdir,rename,unlink,rmdir"


@pytest.fixture(autouse=True)
def agent(start_agent: StartAgent) -> None:
    start_agent()


class Watched:
    """A run on a disk of its own, and everything that would have to be known if the power went.

    Attributes:
        announced: number of calls → the step that was announced as durable after so many.
    """

    def __init__(self, shim: Shim, root: Path) -> None:
        root.mkdir()
        self.root = root
        self.where = root / "runs" / "gpt"
        self.announced: dict[int, int] = {}
        self._trace = Trace(shim, op=CHANGES, match=f"{root}*")
        self._disk = Disk(root)
        self._known = 0

    def __enter__(self) -> Watched:
        self._trace.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._trace.__exit__(None, None, None)

    def look(self) -> None:
        """Note the bytes of the files that are there now."""
        calls = self.calls()
        self._disk.live(calls[self._known :])
        self._known = len(calls)
        self._disk.learn()

    def save(self, run: Run, **options) -> None:
        saving = run.save(**options)
        saving.wait(timeout=60)
        self.announced[len(self.calls())] = saving.step
        run.tidy()
        self.look()

    def calls(self) -> list[Call]:
        return self._trace.calls

    def pull_the_plug(self, least: int, first: int, spare: Path) -> int:
        """After each call from `first` on: restore from what is left. Returns how many different disks there were."""
        disk, states = Disk(self.root, self._disk.contents), set()
        for number, call in enumerate(self.calls(), 1):
            disk.live([call])
            if number < first:
                continue
            least = max(least, self.announced.get(number, 0))
            state = disk.left(spare)
            if state not in states:
                states.add(state)
                step = restored(spare / "runs" / "gpt")
                assert step >= least, f"{step} is left, {least} was announced; the last call was {call}"
            shutil.rmtree(spare)
        return len(states)


def test_the_power_may_go_at_any_time(faulty: Shim, tmp_path: Path) -> None:
    with Watched(faulty, tmp_path / "disk") as watched, Run(watched.where) as run:
        watched.look()
        watched.save(run)
        watched.save(run)
    assert watched.pull_the_plug(0, 1, tmp_path / "left") > 5


def test_the_power_may_go_while_a_step_is_replaced(faulty: Shim, tmp_path: Path) -> None:
    with Watched(faulty, tmp_path / "disk") as watched, Run(watched.where) as run:
        watched.look()
        watched.save(run)
        watched.save(run)
        before = len(watched.calls())
        run.ckpt.save(2, if_exists="replace", when_busy="wait").wait(timeout=60)
        watched.look()
    assert watched.pull_the_plug(1, before, tmp_path / "left") > 1


def test_the_power_may_go_while_old_steps_are_removed(faulty: Shim, tmp_path: Path) -> None:
    with Watched(faulty, tmp_path / "disk") as watched, Run(watched.where, keep=1) as run:
        watched.look()
        watched.save(run)
        before = len(watched.calls())
        watched.save(run)
        watched.save(run)
    assert watched.pull_the_plug(1, before, tmp_path / "left") > 2
