"""Whatever ranks do and in whichever order: the newest clean step is whole in memory until a newer one is."""

from __future__ import annotations

import itertools
import os
import queue
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hand import wait_until
from images import make_layout, record_of
from zerostall import native
from zerostall.agent import trickle
from zerostall.agent.berth import Berth
from zerostall.agent.client import Client
from zerostall.agent.run import Run
from zerostall.agent.wish import Wish
from zerostall.core import backoff
from zerostall.core.candidates import Past
from zerostall.core.layout import Layout
from zerostall.core.manifest import Manifest
from zerostall.core.roll import Save
from zerostall.errors import StorageError
from zerostall.flow.budget import Budget
from zerostall.flow.folder_lock import FolderLock
from zerostall.flow.governor import Governor
from zerostall.flow.persist import Order, Outcome, persist
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.modes import OWN
from zerostall.wire import messages as m

LAYOUTS = [make_layout(4096 * size) for size in (1, 2, 3)]
BYTES = {layout.nbytes: layout.header + bytes(layout.nbytes - len(layout.header)) for layout in LAYOUTS}
_created = itertools.count(1)


class Line:
    """In the place of a connection: keeps what the agent says."""

    def __init__(self) -> None:
        self.said: list[m.Message] = []

    def send(self, message: m.Message, *fds: int) -> None:
        self.said.append(message)


class Rank:
    """One rank's trainer, as the agent knows it. `grown`: the state has another layout from that step on."""

    def __init__(self, number: int, grown: list[int]) -> None:
        self.number = number
        self.grown = grown
        self.client: Client | None = None
        self.line = Line()
        self.step = 0
        self.turn = 0
        self.layout: Layout | None = None

    def layout_at(self, step: int) -> Layout:
        return LAYOUTS[sum(step >= grown for grown in self.grown)]


class Agent:
    """A run and its ranks. Nothing happens but what is called for; what the disk has done is heard in `settle`."""

    def __init__(self, where: Path, world: int, slots: int, grown: list[int], interval: float) -> None:
        self.rules = m.Rules(keep_last=1, disk_interval=interval)
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.pool = native.Pool("test", 1)
        self.run = Run(where, world, Budget(1 << 30), self.pool, self.inbox.put, Governor())
        self.slots = slots
        self.ranks = [Rank(number, grown) for number in range(world)]
        self.epoch = 0

    def start(self, order: list[int]) -> None:
        """All ranks come, in this order, agree on where to go on, and begin."""
        run = self.run
        for rank in (self.ranks[number] for number in order):
            rank.line = Line()
            rank.client = Client(rank.line, pid=os.getpid())  # pyright: ignore[reportArgumentType]
            hello = m.Hello(
                id=1,
                protocol=m.PROTOCOL,
                pid=os.getpid(),
                where=os.fsencode(run.where),
                rank=rank.number,
                world=len(order),
                rules=self.rules,
            )
            run.attach(rank.client, hello)
            run.advance()
            self.check()
        self.epoch += 1
        for rank in (self.ranks[number] for number in order):
            run.begin(run.berths[rank.number], self.epoch)
            run.advance()
            self.check()
        newest = self.clean()
        assert newest == self.clean(outdone=True)
        for rank in self.ranks:
            rank.step, rank.turn, rank.layout = newest, 0, None

    def act(self, rank: Rank, *, discard: bool = False, anew: bool = False) -> None:
        """The rank comes to its next save: with a slot it seals it, or it comes to nothing, without one it skips.

        `anew`: of the number that it has saved last.
        """
        run = self.run
        if anew and rank.step:
            rank.turn += 1
        else:
            rank.step += 1
        layout, berth = rank.layout_at(rank.step), run.berths[rank.number]
        save = Save(self.epoch, rank.step, rank.turn)
        if layout is not rank.layout:
            berth.lease(layout, self.slots)
            berth.take_back_grant()
            berth.moored = True
            rank.layout = layout
            run.advance()
        assert berth.current is not None
        held = [message.step for message in rank.line.said if isinstance(message, m.Hold)]
        granted = berth.current.slots.granted()
        if granted is None or rank.step < max(held, default=0):
            run.passed(berth, save, "busy", skipped=True)
        elif discard:
            berth.discard(granted.index, berth.grant)
            run.passed(berth, save, "torn")
        else:
            made, world = next(_created), len(self.ranks)
            where = granted.index * berth.current.stride
            berth.current.segment.view(where, layout.nbytes)[:] = BYTES[layout.nbytes]
            record = record_of(
                layout,
                BYTES[layout.nbytes],
                rank.step,
                rank=rank.number,
                world=world,
                run=run.folder.facts.run,
                created=float(made),
            )
            run.seal(berth, granted.index, record, Wish(save, replace=anew))
        run.advance()

    def kill(self, rank: Rank) -> None:
        assert rank.client is not None
        client, rank.client = rank.client, None
        self.run.detach(client)

    def settle(self) -> None:
        """What is on its way to disk gets there, and what is due behind it."""

        def settled() -> bool:
            while not self.inbox.empty():
                self.inbox.get()()
            self.run.advance()
            return not self.run.busy() or self.run.retry_in() is not None

        wait_until(settled, 60)

    def told(self) -> int:
        """The newest step that some rank was told is clean."""
        every = [
            message.step
            for rank in self.ranks
            for message in rank.line.said
            if isinstance(message, m.Reached) and message.tier == "host"
        ]
        return max(every, default=0)

    def clean(self, *, outdone: bool = False) -> int:
        """The newest step of which every rank's image is in memory, under one manifest.

        `outdone`: count what a save of the same number has outdone that is not clean itself.
        """
        every = [self._manifests(berth, outdone=outdone) for berth in self.run.berths.values()]
        common = set[Manifest].intersection(*every) if every else set()
        return max((manifest.step for manifest in common), default=0)

    def _manifests(self, berth: Berth, *, outdone: bool) -> set[Manifest]:
        found = {manifest for step in berth.clean_steps() if (manifest := berth.manifest(step))}
        if outdone:
            found |= {one for tier in berth.tiers() for step in berth.sealed_steps() if (one := tier.outdone(step))}
            found |= {tier.manifest(step) for tier in berth.older for step in tier.steps()}
        return found

    def check(self) -> None:
        assert self.clean(outdone=True) >= self.told(), (self.clean(), self.told())

    def close(self) -> None:
        for rank in self.ranks:
            if rank.client is not None:
                self.kill(rank)
        self.run.close()
        self.pool.close()


@settings(max_examples=40)
@given(st.data())
def test_the_newest_clean_step_stays_whole_in_memory(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 3), "world")
    slots = data.draw(st.integers(2, 3), "slots")
    grown = data.draw(st.lists(st.integers(2, 8), max_size=2), "grown")
    interval = data.draw(st.sampled_from([0.0, 3600.0]), "interval")
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(Path(folder, "run"), world, slots, grown, interval)
        numbers = list(range(world))
        try:
            for _ in range(data.draw(st.integers(1, 3), "attempts")):
                agent.start(data.draw(st.permutations(numbers), "order"))
                actions = st.one_of(
                    st.tuples(st.just("save"), st.sampled_from(numbers)),
                    st.tuples(st.just("all save"), st.just(0)),
                    st.tuples(st.just("save anew"), st.sampled_from(numbers)),
                    st.tuples(st.just("all save anew"), st.just(0)),
                    st.tuples(st.just("discard"), st.sampled_from(numbers)),
                    st.tuples(st.just("settle"), st.just(0)),
                )
                for what, number in data.draw(st.lists(actions, max_size=12), "actions"):
                    if what == "settle":
                        agent.settle()
                    elif what.startswith("all"):
                        for rank in sorted(agent.ranks, key=lambda rank: rank.step):
                            agent.act(rank, anew=what.endswith("anew"))
                    else:
                        agent.act(agent.ranks[number], discard=what == "discard", anew=what.endswith("anew"))
                    agent.check()
                for number in data.draw(st.permutations(numbers), "deaths"):
                    agent.kill(agent.ranks[number])
                    agent.check()
                    if data.draw(st.booleans(), "the disk is awaited"):
                        agent.settle()
                        agent.check()
        finally:
            agent.close()


@pytest.mark.parametrize("grown", [[], [2]], ids=["alike", "grown"])
@pytest.mark.parametrize("end", ["death", "torn", "revoked", "clean"])
def test_a_clean_step_that_is_saved_anew_stays_until_that_save_is_clean(end: str, grown: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(Path(folder, "run"), 2, 3, [], 3600.0)
        first, second = agent.ranks
        try:
            agent.start([0, 1])
            for _ in range(2):
                for rank in agent.ranks:
                    agent.act(rank)
            agent.settle()
            before = agent.run.berths[0].manifest(2)
            assert before is not None
            for rank in agent.ranks:
                rank.grown = grown
            agent.act(first, anew=True)
            assert agent.run.berths[0].manifest(2) is None
            assert agent.clean() == 1 and agent.clean(outdone=True) == 2
            if end == "death":
                for rank in agent.ranks:
                    agent.kill(rank)
                agent.start([0, 1])
            elif end == "torn":
                agent.act(second, anew=True, discard=True)
            else:
                agent.act(second, anew=True)
            if end == "revoked":
                berth = agent.run.berths[0]
                agent.run.revoke(berth, Past(2, berth.created(2) or 0.0), "torn")
                assert 2 not in berth.clean_steps()  # the one before had made room
                return
            assert agent.clean() == agent.clean(outdone=True) == 2
            after = agent.run.berths[0].manifest(2)
            assert after is not None
            assert (after == before) == (end != "clean")
            for rank in agent.ranks:
                agent.kill(rank)

            def written() -> bool:
                agent.settle()
                return agent.run.folder.disk.created(2) == after.created

            wait_until(written)
            assert agent.run.folder.disk.manifest(2) == after
            agent.start([0, 1])
            for _ in range(3):
                for rank in agent.ranks:
                    agent.act(rank)
            assert agent.clean() == 5  # no slot is lost
        finally:
            agent.close()


def test_memory_of_another_layout_stays_until_the_step_in_the_new_one_is_clean() -> None:
    """One rank of two has sealed a step of a state that has grown; the other dies: the step before is all there is."""
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(Path(folder, "run"), 2, 2, [3], 3600.0)
        try:
            agent.start([0, 1])
            for _ in range(2):
                for rank in agent.ranks:
                    agent.act(rank, discard=False)
                agent.settle()
            assert agent.told() == agent.clean() == 2
            agent.act(agent.ranks[0], discard=False)
            assert agent.run.berths[0].sealed_steps() == [2, 3]
            agent.kill(agent.ranks[1])
            assert agent.clean() == 2
            agent.kill(agent.ranks[0])
            agent.start([1, 0])
            for rank in agent.ranks:
                agent.act(rank, discard=False)
            assert agent.clean() == 3
            agent.settle()
            assert not any(berth.older for berth in agent.run.berths.values())
        finally:
            agent.close()


def test_a_folder_whose_disk_takes_nothing_is_let_go_of_between_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once nobody trains: it can be unmounted then, and nothing is made in its place."""
    full = [True]

    def write(disk: DiskTier, order: Order, *more: Any) -> Outcome:
        return Outcome(order.step, 0.0, StorageError("full")) if full else persist(disk, order, *more)

    monkeypatch.setattr(trickle, "persist", write)
    monkeypatch.setattr(backoff, "pause", lambda failures, luck: 3600.0)
    where, away = tmp_path / "run", tmp_path / "unmounted"
    agent = Agent(where, 1, 2, [], 0.0)
    run = agent.run
    try:
        agent.start([0])
        agent.act(agent.ranks[0])
        wait_until(lambda: agent.settle() or run.trickle.resting())
        assert run.folder.taken()
        agent.kill(agent.ranks[0])
        assert run.busy() and not run.folder.taken()
        FolderLock(where, OWN).close()
        where.rename(away)
        for _ in range(2):  # an empty folder is no run's, be it only where one was mounted
            run.trickle.hurry(though_failing=True)
            run.advance()
            assert run.trickle.resting() and "not there" in run.trickle.last_error
            where.mkdir(exist_ok=True)
        assert list(where.iterdir()) == []
        where.rmdir()
        away.rename(where)
        full.clear()
        run.trickle.hurry(though_failing=True)
        run.advance()
        wait_until(lambda: agent.settle() or run.folder.disk.steps() == [1])
        wait_until(lambda: agent.settle() or not run.folder.taken())
    finally:
        agent.close()
