"""SIGKILL for trainer, agent or both, at random moments: what comes back is a step that was really reached.

The trainer checks every bit of what it restores (crash.states); here it is checked *which* step that is. Nothing that
was announced as durable is ever lost, and nothing in the agent's memory while the agent lives.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from crash.nursery import Child, Nursery
from crash.script import leftovers
from hand import wait_until
from zerostall import native
from zerostall.errors import ZerostallError
from zerostall.tiers.disk import DiskTier
from zerostall.wire import messages as m
from zerostall.wire import rendezvous

VICTIMS = ("trainer", "agent", "both", "both, agent first")


class Ring:
    """A run under attack, and all that was ever said about it."""

    def __init__(self, trainers: Nursery, environment: dict[str, str], where: Path, runtime: Path) -> None:
        self._trainers = trainers
        self._environment = environment
        self._where = where
        self._runtime = runtime
        self._lives = 0
        self._read = 0
        self.trainer: Child | None = None
        self.saved: set[int] = set()
        self.durable = 0
        self.sealed = 0
        self.since_start = 0
        self.restored: list[tuple[int, str]] = []

    def start(self, *words: str) -> None:
        """A new trainer; returns when it has restored, and what it restored was allowed."""
        self._lives += 1
        self._read = self.since_start = 0
        output = self._where.parent / f"life-{self._lives}"
        self.trainer = self._trainers.start(self._where, *words, environment=self._environment, output=output)
        known, least = len(self.restored), max(self.durable, self.sealed)
        wait_until(lambda: self.listen() or len(self.restored) > known or self._gone())
        assert len(self.restored) > known, self.said()
        step, tier = self.restored[-1]
        assert step in self.saved | {0}, f"step {step} from {tier} was never saved\n{self.said()}"
        assert step >= least, f"step {step} came back from {tier}, but {least} had been announced\n{self.said()}"

    def listen(self) -> None:
        """Hear what the trainer has printed since."""
        if self.trainer is None:
            return
        data = self.trainer.output.read_bytes() if self.trainer.output.exists() else b""
        lines, self._read = data[self._read :].decode(), data.rfind(b"\n") + 1
        for line in lines[: lines.rfind("\n") + 1].splitlines():
            match line.split():
                case ["saving", step]:
                    self.saved.add(int(step))
                    self.since_start += 1
                case ["reached", step, "disk"]:
                    self.durable = max(self.durable, int(step))
                case ["reached", step, "host"]:
                    self.sealed = max(self.sealed, int(step))
                case ["restored", step, tier]:
                    self.restored.append((int(step), tier))
                case ["WRONG", *_]:
                    raise AssertionError(self.said())

    def advance(self, steps: int) -> None:
        """Wait until the trainer has finished that many more steps."""
        target = self.since_start + steps
        wait_until(lambda: self.listen() or self.since_start >= target or self._gone())
        assert self.since_start >= target, self.said()

    def kill_trainer(self) -> None:
        assert self.trainer is not None
        self.trainer.kill()
        self.listen()
        self.trainer = None

    def kill_agent(self) -> None:
        pid = agent_pid(self._runtime)
        if pid is None:
            return
        self.listen()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        self.listen()
        self.sealed = 0

    def finish(self) -> None:
        assert self.trainer is not None
        code = self.trainer.wait()
        self.listen()
        assert code == 0, self.said()

    def said(self) -> str:
        log = self._runtime / "agent.log"
        agent = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        trainer = self._where.parent / f"life-{self._lives}"
        code = self.trainer.code if self.trainer else None
        return f"exit code {code}\n{trainer.read_text()[-3000:]}\n--- the agent's log:\n{agent}"

    def _gone(self) -> bool:
        return self.trainer is None or self.trainer.ended()


def agent_pid(runtime: Path) -> int | None:
    """The agent that serves there, if one listens and answers."""
    try:
        channel = rendezvous.connect(runtime)
        if channel is None:
            return None
        channel.socket.settimeout(10)
        channel.send(m.Status(id=1))
        ((report, _), *_) = channel.receive()
        channel.close()
    except (OSError, ZerostallError):
        return None
    assert isinstance(report, m.Report)
    return report.pid


def attack(ring: Ring, rng: random.Random, rounds: int) -> None:
    ring.start()
    victims = list(VICTIMS) * (rounds // len(VICTIMS))
    rng.shuffle(victims)
    for victim in victims:
        ring.advance(rng.randint(1, 15))
        time.sleep(rng.random() * 0.01)
        if "agent first" in victim or victim == "agent":
            ring.kill_agent()
        if victim != "agent":
            ring.kill_trainer()
        if victim == "both":
            ring.kill_agent()
        if ring.trainer is None:
            ring.start()


@pytest.mark.parametrize(("kills", "options"), [(28, ("--keep=2",)), (12, ("--when-busy=wait", "--scale=400"))])
def test_kills_at_random_moments(
    trainers: Nursery, agent_environment: dict[str, str], folder: Path, where: Path, kills: int, options: tuple
) -> None:
    spread(Ring(trainers, agent_environment, where, folder), where, kills, options)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kills", "options"), [(400, ("--keep=2",)), (100, ("--when-busy=wait", "--scale=400"))])
def test_many_kills_at_random_moments(
    trainers: Nursery, agent_environment: dict[str, str], folder: Path, where: Path, kills: int, options: tuple
) -> None:
    spread(Ring(trainers, agent_environment, where, folder), where, kills, options)


def spread(ring: Ring, where: Path, kills: int, options: tuple[str, ...]) -> None:
    seed = int(os.environ.get("CRASH_SEED", random.randrange(1 << 32)))
    print(f"CRASH_SEED={seed}")
    start = ring.start
    ring.start = lambda *words: start(*options, *words)  # type: ignore[method-assign]
    attack(ring, random.Random(seed), kills)
    ring.kill_trainer()
    last = max(ring.saved) + 10
    ring.start(f"--steps={last}")
    ring.finish()
    wait_until(lambda: leftovers(where) == [])
    assert DiskTier(where, native.Pool("test", 1)).steps()[-1] == last
    assert {tier for _, tier in ring.restored} >= {"host", "disk"}
