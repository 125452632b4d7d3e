"""Whatever ranks do and in whichever order: the newest clean step is whole in memory until a newer one is."""

from __future__ import annotations

import itertools
import os
import queue
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hand import wait_until
from images import make_layout, record_of
from zerostall import native
from zerostall.agent.client import Client
from zerostall.agent.run import Run
from zerostall.agent.wish import Wish
from zerostall.core.layout import Layout
from zerostall.core.roll import Save
from zerostall.flow.budget import Budget
from zerostall.flow.governor import Governor
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
        newest = self.clean()
        for rank in (self.ranks[number] for number in order):
            rank.step, rank.layout = newest, None
            run.begin(run.berths[rank.number], self.epoch)
            run.advance()
            self.check()

    def act(self, rank: Rank, *, discard: bool) -> None:
        """The rank comes to its next save: with a slot it seals it, or it comes to nothing, without one it skips."""
        run = self.run
        rank.step += 1
        layout, berth = rank.layout_at(rank.step), run.berths[rank.number]
        save = Save(self.epoch, rank.step)
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
            run.seal(berth, granted.index, record, Wish(save))
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

    def clean(self) -> int:
        """The newest step of which every rank's image is in memory, under one manifest."""
        every = [berth.clean_steps() for _, berth in sorted(self.run.berths.items())]
        common = set.intersection(*map(set, every)) if every else set()
        alike = [step for step in common if len({berth.manifest(step) for berth in self.run.berths.values()}) == 1]
        return max(alike, default=0)

    def check(self) -> None:
        assert self.clean() >= self.told(), (self.clean(), self.told())

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
                    st.tuples(st.just("discard"), st.sampled_from(numbers)),
                    st.tuples(st.just("settle"), st.just(0)),
                )
                for what, number in data.draw(st.lists(actions, max_size=12), "actions"):
                    if what == "settle":
                        agent.settle()
                    elif what == "all save":
                        for rank in sorted(agent.ranks, key=lambda rank: rank.step):
                            agent.act(rank, discard=False)
                    else:
                        agent.act(agent.ranks[number], discard=what == "discard")
                    agent.check()
                for number in data.draw(st.permutations(numbers), "deaths"):
                    agent.kill(agent.ranks[number])
                    agent.check()
                    if data.draw(st.booleans(), "the disk is awaited"):
                        agent.settle()
                        agent.check()
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
