"""The agent dies of SIGKILL before each call that changes a file or folder of the run, and in the middle of each write.

Every act of crash.script is first watched, then repeated from the same folder once for each call of it. What must be
true afterwards stands in `script.Expected`; and the folder must be as good as new after the next save.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from crash.conftest import StartAgent
from crash.nursery import Child
from crash.script import LIFE, RULES, Act, Expected, found_on_disk, leftovers, play
from hand import HandTrainer
from shim.faults import Call, Faults, Shim, Trace
from zerostall import native
from zerostall.tiers.disk import DiskTier
from zerostall.wire import messages as m
from zerostall.wire.channel import ClosedError

CHANGES = "mkdir,write,allocate,truncate,fsync,fdatasync,rename,link,unlink,rmdir"


@dataclass
class Ring:
    """An agent that dies and comes back."""

    start_agent: StartAgent
    shim: Shim
    runtime: Path
    agent: Child | None = None

    def alive(self) -> None:
        if self.agent is None or self.agent.ended():
            self.agent = self.start_agent()

    def prepare(self, base: Path, life: tuple[Act, ...]) -> Expected:
        """The folder as it is when these acts are over."""
        expected = Expected()
        self.alive()
        for act in life:
            play(self.runtime, base, expected, act)
            assert on_disk(base) == sorted(expected.there)
        return expected

    def watch(self, where: Path, expected: Expected, act: Act) -> list[Call]:
        """The calls of one act that change something."""
        self.alive()
        with Trace(self.shim, op=CHANGES, match=f"{where}*") as trace:
            play(self.runtime, where, expected, act)
            assert on_disk(where) == sorted(expected.there) and not leftovers(where)
        return trace.calls

    def die(self, where: Path, expected: Expected, act: Act, fault: Faults) -> None:
        """Play the act until the agent is dead."""
        self.alive()
        assert self.agent is not None
        with fault:
            try:
                play(self.runtime, where, expected, act)
            except ClosedError:
                pass
            self.agent.wait()

    def check(self, where: Path, expected: Expected) -> None:
        """A new trainer with a new agent finds what it must, and can go on."""
        self.alive()
        trainer = HandTrainer(self.runtime, where, rules=RULES)
        found = found_on_disk(trainer)
        assert not expected.problem(found)
        step = max(found, default=0) + 1
        trainer.lease()
        made = trainer.seal(step)
        trainer.hear(m.Reached, step=step, tier="disk")
        assert trainer.fetch(step, "disk") == made.bytes
        trainer.ask(m.Tidy(id=9))
        assert not leftovers(where)
        trainer.leave()


def on_disk(where: Path) -> list[int]:
    return DiskTier(where, native.Pool("look", 1)).steps()


@pytest.fixture
def ring(start_agent: StartAgent, faulty: Shim, folder: Path) -> Ring:
    return Ring(start_agent, faulty, folder)


@pytest.mark.parametrize("number", range(len(LIFE)), ids=[act.name for act in LIFE])
def test_a_kill_at_every_call(ring: Ring, tmp_path: Path, number: int) -> None:
    base, act = tmp_path / "base", LIFE[number]
    base.mkdir()
    before = ring.prepare(base, LIFE[:number]) if number else Expected()
    if not number:
        base.rmdir()

    def fresh(name: str) -> tuple[Path, Expected]:
        where = tmp_path / name
        if number:
            shutil.copytree(base, where)
        return where, before.copy()

    calls = ring.watch(*fresh("watched"), act)
    assert len(calls) > 15
    for nth, call in enumerate(calls, 1):
        for kill in (0, call.result // 2) if call.op == "write" else (0,):
            where, expected = fresh(f"{nth}-{kill}")
            ring.die(
                where, expected, act, Faults(ring.shim, op=CHANGES, match=f"{where}*", nth=nth, times=1, kill=kill)
            )
            try:
                ring.check(where, expected)
            except BaseException as error:
                error.add_note(f"killed at {call.op} number {nth} after {kill} bytes: {call.path} {call.second}")
                raise
            shutil.rmtree(where)


@pytest.mark.parametrize(
    ("name", "op", "match"), [("replaced", "rename", "step-*"), ("second", "fsync", "*/manifest.*")]
)
def test_a_kill_while_clearing_up_after_a_kill(ring: Ring, tmp_path: Path, name: str, op: str, match: str) -> None:
    """The agent that comes after a dead one dies, too, at each of the calls with which it puts the folder in order."""
    base = tmp_path / "base"
    base.mkdir()
    number = next(index for index, act in enumerate(LIFE) if act.name == name)
    before = ring.prepare(base, LIFE[:number])
    act = LIFE[number]

    def half_done(name: str) -> tuple[Path, Expected]:
        where, expected = tmp_path / name, before.copy()
        shutil.copytree(base, where)
        nth = 2 if op == "rename" else 1
        ring.die(where, expected, act, Faults(ring.shim, op=op, match=f"{where}/{match}", nth=nth, times=1, kill=0))
        return where, expected

    where, expected = half_done("watched")
    ring.alive()
    with Trace(ring.shim, op=CHANGES, match=f"{where}*") as trace:
        HandTrainer(ring.runtime, where, rules=RULES).leave()
    assert len(trace.calls) > 1
    for nth, call in enumerate(trace.calls, 1):
        where, expected = half_done(str(nth))
        ring.alive()
        assert ring.agent is not None
        with Faults(ring.shim, op=CHANGES, match=f"{where}*", nth=nth, times=1, kill=0):
            with pytest.raises(ClosedError):
                HandTrainer(ring.runtime, where, rules=RULES)
            ring.agent.wait()
        try:
            ring.check(where, expected)
        except BaseException as error:
            error.add_note(f"killed again at {call}")
            raise
