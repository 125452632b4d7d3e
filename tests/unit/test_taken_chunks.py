"""What a trainer takes of chunks that an agent brings from a store: all of them, from that very agent, or an error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from images import CHUNK, HandMade, make_layout
from zerostall import native
from zerostall.core.shards import View
from zerostall.errors import AgentError, CorruptError
from zerostall.trainer import file_loads
from zerostall.trainer.arrivals import Arrivals, Coming
from zerostall.trainer.devices import Devices
from zerostall.trainer.file_loads import File
from zerostall.trainer.mappings import Mappings
from zerostall.trainer.pouring import Loading, through
from zerostall.trainer.state.spread import Loose
from zerostall.wire import messages as m

LAYOUT = make_layout(CHUNK + 1000)  # two chunks
IMAGES = [HandMade(LAYOUT, 7, rank=rank, seed=rank, world=2) for rank in range(2)]


class Agent:
    """Answers what a test says, in that order; what is asked for in between happens before the answer."""

    def __init__(self, *answers: tuple[m.Arrival, ...] | Exception) -> None:
        self.welcome = object()
        self.answers = list(answers)
        self.memory = native.Segment("agent", 2 * CHUNK, populate=False)
        self.taken: list[tuple[int, ...]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def up(self) -> bool:
        return True

    def ask(self, make: Callable[[int], Any]) -> tuple[m.Message, list[int]]:
        request = make(1)
        assert isinstance(request, m.Take)
        self.taken.append(request.taken)
        answer = self.answers.pop(0)
        self.meanwhile()
        if isinstance(answer, Exception):
            raise answer
        return m.Arrived(id=1, chunks=answer), []

    def bring(self, rank: int, chunk: int, place: int) -> m.Arrival:
        image = IMAGES[rank]
        start, nbytes = image.record.extent(chunk)
        self.memory.view(place * CHUNK, nbytes)[:] = image.bytes[start : start + nbytes]
        return m.Arrival(rank, chunk, place)


class Trainer:
    """Has asked for images, and the agent has said that they are coming."""

    def __init__(self, stack: contextlib.ExitStack, agent: Agent) -> None:
        self.arrivals = Arrivals(cast("Any", agent), Mappings(1), stack)
        self.pool = native.Pool("test", 1)
        stack.callback(self.pool.close)

    def told(self, memory: native.Segment, rank: int, *chunks: int) -> Coming:
        answer = m.Coming(id=1, memory=m.Lent(0, memory.nbytes), place_bytes=CHUNK, layout=b"", record=b"")
        return self.arrivals.image(answer, os.dup(memory.fileno()), IMAGES[rank].record, chunks or None)

    def read(self, coming: Coming) -> bytes:
        """A part of it as a run of bytes, the rest as what lies here and there."""
        found = torch.empty(LAYOUT.nbytes, dtype=torch.uint8)
        run = CHUNK - 1000
        plan = native.Plan(nbytes=LAYOUT.nbytes, header=b"", chunk_bytes=CHUNK, offsets=[0], sizes=[run])
        loading = Loading(self.pool, Devices(), plan, [found[:run]], [0], coming.file)
        loose = Loose(CHUNK)
        loose.add(run, View("", "", "uint8", (LAYOUT.nbytes - run,), (1,), 0), found[run:], alone=True)
        coming.fill(self.pool, loading, loose)
        loading.end()
        return found.numpy().tobytes()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_chunks_come_in_any_order_and_one_may_come_twice(stack: contextlib.ExitStack) -> None:
    agent = Agent()
    agent.answers = [(agent.bring(0, 1, 1),), (agent.bring(0, 0, 0), m.Arrival(0, 1, 1)), ()]
    trainer = Trainer(stack, agent)
    assert trainer.read(trainer.told(agent.memory, 0)) == IMAGES[0].bytes
    assert agent.taken == [(), (1,), (0, 1)]


def test_an_agent_that_says_too_early_that_all_has_come_is_asked_again(stack: contextlib.ExitStack) -> None:
    """It may be another one that knows of one image only, or this one after the connection broke."""
    agent = Agent()
    agent.answers = [(agent.bring(0, 0, 0),), ()]
    trainer = Trainer(stack, agent)
    with pytest.raises(AgentError, match=r"chunks that have not, by rank: \{0: 1\}"):
        trainer.read(trainer.told(agent.memory, 0))


def test_images_of_two_agents_are_not_taken_for_one_agents(stack: contextlib.ExitStack) -> None:
    """Where one chunk is of zeros, as the memory of the dead one is, its checksum would not tell."""
    agent, other = Agent(), Agent()
    trainer = Trainer(stack, agent)
    trainer.told(agent.memory, 0, 0)
    trainer.told(agent.memory, 1, 1)
    with pytest.raises(AgentError, match="another one than at first"):
        trainer.told(other.memory, 1, 0)


@pytest.mark.parametrize("anew", [False, True])
def test_what_does_not_fit_its_checksum_is_damaged_unless_the_agent_is_another(
    stack: contextlib.ExitStack, anew: bool
) -> None:
    agent = Agent((m.Arrival(0, 0, 0),))
    if anew:
        agent.meanwhile = lambda: setattr(agent, "welcome", object())
    trainer = Trainer(stack, agent)
    with pytest.raises(AgentError if anew else CorruptError):
        trainer.read(trainer.told(agent.memory, 0))


def test_memory_for_what_is_on_the_way_does_not_grow_with_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(file_loads, "begin", lambda *_, staging, **__: made.append(id(staging)) or Interrupted("begun"))
    plan = native.Plan(nbytes=4, header=b"", chunk_bytes=CHUNK, offsets=[0], sizes=[4])
    pool = native.Pool("test", 1)
    spare: dict[int, list[native.Staging]] = {}
    with contextlib.ExitStack() as stack:
        file = File(os.memfd_create("file"), Path("file"), 4)
        stack.callback(os.close, file.fd)
        for _ in range(5):
            loading = Loading(pool, Devices(), plan, [torch.zeros(1)], [0], file, spare)
            for _ in range(2):
                loading.begin()
            loading.give_up()
    assert len(made) == 10 and len(set(made)) == 2


class Interrupted:
    """A job that Ctrl-C keeps one from waiting for."""

    def __init__(self, *said: str) -> None:
        self.said = list(said)

    def cancel(self) -> None:
        self.said.append("cancel")

    def wait(self, timeout: float | None = None) -> bool:
        self.said.append("wait")
        if len(self.said) == 1:
            raise KeyboardInterrupt
        return True


def test_a_job_whose_waiting_is_interrupted_has_ended_before_its_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error's frames hold the job, so that nobody else would await it before the memory is unmapped."""
    job = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        through(cast("Any", job))
    assert job.said == ["wait", "cancel", "wait"]

    job = Interrupted("begun")
    monkeypatch.setattr(file_loads, "begin", lambda *_, **__: job)
    plan = native.Plan(nbytes=4, header=b"", chunk_bytes=CHUNK, offsets=[0], sizes=[4])
    with contextlib.ExitStack() as stack:
        file = File(os.memfd_create("file"), Path("file"), 4)
        stack.callback(os.close, file.fd)
        loading = Loading(native.Pool("test", 1), Devices(), plan, [torch.zeros(1)], [0], file)
        loading.begin()
        loading.give_up()
        loading.give_up()
    assert job.said[1:3] == ["cancel", "wait"]
