"""Chunks of images on their way from a store: each is read once for all trainers of a node, through a few places."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import msgspec
import pytest

from images import HandMade, make_layout
from zerostall import native
from zerostall.agent import arrivals
from zerostall.agent.arrivals import Arrivals
from zerostall.agent.client import Client
from zerostall.errors import AgentError, CorruptError, FormatError, SnapshotNotFoundError, StorageError
from zerostall.flow.governor import Governor
from zerostall.flow.worker import Worker
from zerostall.tiers.contract import Stored
from zerostall.tiers.remote_images import RemoteImage
from zerostall.wire import messages as m

CHUNKS, SMALL = 5, 4096
LAYOUT = make_layout((CHUNKS - 2) * SMALL + 1000)  # the header is a page
STEP = 7


class Store:
    """Gives chunks when a test lets it; one image a rank."""

    where = "s3://bucket/run"

    def __init__(self, world: int) -> None:
        made = [HandMade(LAYOUT, STEP, seed=rank) for rank in range(world)]
        self.bytes = [one.bytes for one in made]
        self.records = [
            msgspec.structs.replace(
                one.record,
                chunk_bytes=SMALL,
                checksums=[native.crc32c(one.bytes[at : at + SMALL]) for at in range(0, LAYOUT.nbytes, SMALL)],
            )
            for one in made
        ]
        self.asked: list[tuple[int, int]] = []
        self.flying: list[tuple[int, int, memoryview, Future[None]]] = []
        self.closed = False

    def image(self, step: int, rank: int) -> RemoteImage:
        if step != STEP:
            raise SnapshotNotFoundError(f"no step {step}")

        def begin(chunk: int, view: memoryview) -> Future[None]:
            if self.closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self.asked.append((rank, chunk))
            future: Future[None] = Future()
            self.flying.append((rank, chunk, view, future))
            return future

        return RemoteImage(Stored(LAYOUT, self.records[rank]), begin)

    def give(self, at: int, error: Exception | None = None) -> None:
        """The chunk that was begun as the `at`-th of those that are on their way comes, or does not."""
        rank, chunk, view, future = self.flying.pop(at)
        if error is not None:
            future.set_exception(error)
            return
        view[:] = self.bytes[rank][chunk * SMALL : chunk * SMALL + len(view)]
        future.set_result(None)


class Node:
    """The agent's loop, turned by hand."""

    def __init__(self, world: int = 1) -> None:
        self.store = Store(world)
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.reader = Worker("test")
        self.steps: list[int] = []
        self.otherwise: list[int] = []
        self.arrivals = Arrivals(self.steps, self.inbox.put, Governor(), self.reader)

    def turn(self) -> None:
        """Do what has come from other threads."""
        while not self.inbox.empty():
            self.inbox.get()()

    def give(self, at: int = 0, error: Exception | None = None) -> None:
        self.store.give(at, error)
        self.turn()


class Trainer(Client):
    """Takes chunks as it is told of them, and keeps their bytes."""

    def __init__(self, node: Node) -> None:
        super().__init__(cast("Any", None))
        self.node = node
        self.said: list[m.Message] = []
        self.chunks: dict[tuple[int, int], bytes] = {}
        self.segment: native.Segment | None = None
        self.unread: tuple[m.Arrival, ...] = ()
        self.asking = False

    def send(self, message: m.Message, *fds: int) -> None:
        self.said.append(message)
        if isinstance(message, m.Coming) and self.segment is None:
            self.segment = native.Segment.attach(fds[0], message.memory.nbytes)

    def fetch(self, rank: int, chunks: Sequence[int] | None = None, step: int = STEP) -> m.Message:
        """What it is answered."""
        request = self.ask(rank, chunks, step)
        while not self.said and not self.node.otherwise:
            self.node.inbox.get(timeout=60)()
        return self.said[-1] if self.said else request

    def ask(self, rank: int, chunks: Sequence[int] | None = None, step: int = STEP) -> m.Fetch:
        request = m.Fetch(id=1, step=step, tier="remote", chunks=None if chunks is None else tuple(chunks))
        otherwise = self.node.otherwise
        self.said.clear()
        self.node.arrivals.open(self, rank, self._remote(), request, lambda: otherwise.append(rank))
        return request

    def take(self) -> None:
        """Say that what it was told of is taken, and ask for more."""
        assert self.segment is not None
        for one in self.unread:
            nbytes = self.node.store.records[one.rank].extent(one.chunk)[1]
            self.chunks[one.rank, one.chunk] = bytes(self.segment.view(one.place * arrivals.CHUNK, nbytes))
        taken = tuple(one.place for one in self.unread)
        self.unread = ()
        self.said.clear()
        self.asking = True
        self.node.arrivals.take(self, m.Take(id=2, taken=taken))
        self.node.turn()

    def hear(self) -> m.Message | None:
        """What it is answered, if it is."""
        answer = self.said.pop() if self.said else None
        self.asking = answer is None
        if isinstance(answer, m.Arrived):
            self.unread = answer.chunks
        return answer

    def leave(self) -> None:
        self.release_fetched()
        self.node.turn()

    def right(self, *images: tuple[int, Sequence[int]]) -> bool:
        data = self.node.store.bytes
        wanted = {
            (rank, chunk): data[rank][chunk * SMALL : (chunk + 1) * SMALL]
            for rank, chunks in images
            for chunk in chunks
        }
        return self.chunks == wanted

    def _remote(self) -> Any:
        return self.node.store


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(arrivals, "PLACES", 2)
    return 2


def run_to_the_end(node: Node, trainers: Sequence[Trainer], chance: random.Random) -> None:
    """Whatever may happen next does, in any order, until all have all."""
    left = list(trainers)
    while left:
        for trainer in list(left):
            if trainer.asking and (answer := trainer.hear()) is not None:
                assert isinstance(answer, m.Arrived)
                if not answer.chunks:
                    left.remove(trainer)
        idle = [trainer for trainer in left if not trainer.asking]
        flying = len(node.store.flying)
        if idle and (not flying or chance.random() < 0.5):
            chance.choice(idle).take()
        elif flying:
            node.give(chance.randrange(flying))
        else:
            assert any(trainer.said for trainer in left) or not left, "nothing comes, and all wait"


@pytest.mark.parametrize("seed", range(6))
def test_each_chunk_is_read_once_whatever_the_order(few: int, seed: int) -> None:
    chance = random.Random(seed)
    node = Node(world=2)
    one, two, three = (Trainer(node) for _ in range(3))
    wanted = {one: [(0, range(CHUNKS)), (1, [1, 2])], two: [(1, range(CHUNKS)), (0, [0])], three: [(1, [4, 2])]}
    for trainer, images in wanted.items():
        for rank, chunks in images:
            assert isinstance(trainer.fetch(rank, chunks), m.Coming)
    run_to_the_end(node, list(wanted), chance)
    assert sorted(node.store.asked) == [(rank, chunk) for rank in (0, 1) for chunk in range(CHUNKS)]
    assert all(trainer.right(*images) for trainer, images in wanted.items())
    assert node.steps == [STEP] * 5
    for trainer in wanted:
        trainer.leave()
    assert node.steps == [] and node.arrivals._memory is None


def test_no_more_is_read_than_there_are_places(few: int) -> None:
    node = Node()
    one = Trainer(node)
    told = one.fetch(0)
    assert isinstance(told, m.Coming) and told.layout and told.record
    assert node.store.asked == []  # others may want some of it, too, and have not said so yet
    one.take()
    assert len(node.store.flying) == few
    node.give(1)  # the later one first
    assert cast("m.Arrived", one.hear()).chunks == (m.Arrival(0, 1, one.unread[0].place),)
    node.give()
    assert len(node.store.asked) == few  # neither was taken
    one.take()
    assert len(node.store.asked) == few + 1


def test_who_leaves_holds_nobody_up(few: int) -> None:
    """Neither what it was told of and never took nor what it waits for keeps others from theirs."""
    node = Node()
    one, two = Trainer(node), Trainer(node)
    for trainer in (one, two):
        trainer.fetch(0)
        trainer.take()
    node.give()
    node.give()
    assert isinstance(one.hear(), m.Arrived) and isinstance(two.hear(), m.Arrived)
    two.take()
    assert node.store.flying == []  # the other one has not taken anything
    one.leave()
    run_to_the_end(node, [two], random.Random(1))
    assert two.right((0, range(CHUNKS)))
    assert sorted(set(node.store.asked)) == sorted(node.store.asked)
    two.leave()


def test_all_leave_while_chunks_are_on_their_way(few: int) -> None:
    node = Node()
    one = Trainer(node)
    one.fetch(0)
    one.take()
    one.leave()
    assert node.arrivals._memory is not None  # somebody writes there
    two = Trainer(node)
    two.fetch(0, [4])
    two.take()
    node.give()
    node.give()
    node.give()
    assert isinstance(two.hear(), m.Arrived)
    two.take()
    assert two.right((0, [4]))
    two.leave()
    assert node.arrivals._memory is None


@pytest.mark.parametrize("error", [CorruptError("chunk 1 fails its checksum"), StorageError("the store is away")])
def test_what_fails_fails_for_those_who_want_it(few: int, error: Exception) -> None:
    node = Node()
    one, two = Trainer(node), Trainer(node)
    one.fetch(0)
    two.fetch(0, [0, 3])
    for trainer in (one, two):
        trainer.take()
    node.give(1, error)
    refused = one.hear()
    assert isinstance(refused, m.Refused) and type(refused.error()) is type(error)
    assert two.hear() is None
    node.give()
    assert isinstance(two.hear(), m.Arrived)
    run_to_the_end(node, [two], random.Random(2))
    assert two.right((0, [0, 3]))
    one.take()  # it may ask once more, and hears the same
    assert isinstance(one.hear(), m.Refused)


def test_a_store_that_is_being_let_go_of(few: int) -> None:
    node = Node()
    one = Trainer(node)
    one.fetch(0)
    node.store.closed = True
    one.take()
    refused = one.hear()
    assert isinstance(refused, m.Refused) and isinstance(refused.error(), StorageError)
    one.leave()
    assert node.arrivals._memory is None


def test_what_cannot_come(few: int) -> None:
    node = Node()
    one = Trainer(node)
    missing = one.fetch(0, step=8)
    assert isinstance(missing, m.Refused) and isinstance(missing.error(), SnapshotNotFoundError)
    beyond = one.fetch(0, [CHUNKS])
    assert isinstance(beyond, m.Refused) and isinstance(beyond.error(), FormatError)
    assert node.steps == []


# Chunks of more than a place, as another writer may make them: a place is a quarter of a chunk, one has the rest.
_LARGE = 4


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "CHUNK", SMALL // _LARGE)


@pytest.mark.parametrize("seed", range(4))
def test_larger_chunks_take_places_that_follow_each_other(
    large: None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(arrivals, "PLACES", 2 * _LARGE + 1)
    node = Node(world=2)
    one, two = Trainer(node), Trainer(node)
    one.fetch(0)
    two.fetch(1)
    two.fetch(0, [4, 1])
    run_to_the_end(node, [one, two], random.Random(seed))
    assert sorted(node.store.asked) == [(rank, chunk) for rank in (0, 1) for chunk in range(CHUNKS)]
    assert one.right((0, range(CHUNKS))) and two.right((1, range(CHUNKS)), (0, [4, 1]))
    for trainer in (one, two):
        trainer.leave()
    assert node.arrivals._memory is None


def test_none_is_passed_over_for_a_smaller_one(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where small ones always found a place, a large one might wait for ever."""
    monkeypatch.setattr(arrivals, "PLACES", _LARGE + 1)
    node = Node()
    one = Trainer(node)
    one.fetch(0, [0, 1, CHUNKS - 1])
    one.take()
    assert [chunk for _, chunk, *_ in node.store.flying] == [0]
    node.give()
    one.hear()
    one.take()
    assert [chunk for _, chunk, *_ in node.store.flying] == [1, CHUNKS - 1]
    one.leave()
    node.give()
    node.give()
    assert node.arrivals._memory is None


def test_memory_is_at_least_a_chunk(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "PLACES", 1)
    node = Node()
    one = Trainer(node)
    said = one.fetch(0)
    assert isinstance(said, m.Coming) and said.memory.nbytes == SMALL
    run_to_the_end(node, [one], random.Random(1))
    assert one.right((0, range(CHUNKS)))


def test_what_does_not_fit_what_others_use_comes_otherwise(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "PLACES", 1)
    node = Node(world=2)
    data = node.store.bytes[0]
    sums = [native.crc32c(data[at : at + 2 * SMALL]) for at in range(0, len(data), 2 * SMALL)]
    node.store.records[0] = msgspec.structs.replace(node.store.records[0], chunk_bytes=2 * SMALL, checksums=sums)
    one, two = Trainer(node), Trainer(node)
    one.fetch(1)
    two.fetch(0)
    assert node.otherwise.pop() == 0 and two.said == []
    assert node.steps == [STEP]
    one.leave()
    assert isinstance(two.fetch(0), m.Coming)  # the next time there is memory for it
    two.leave()
    assert node.steps == []


def test_what_was_let_go_of_while_it_was_looked_for_is_of_no_later_restore(few: int) -> None:
    """Ctrl-C between a request and its answer: the trainer says that it lets go, and restores again."""
    node = Node(world=2)
    one = Trainer(node)
    one.ask(0)
    one.leave()
    assert isinstance(one.fetch(0, [3]), m.Coming)  # behind what the first request has found
    one.take()
    run_to_the_end(node, [one], random.Random(3))
    assert one.right((0, [3])) and len(one.fetched) == 1
    one.leave()
    assert node.steps == [] and node.arrivals._memory is None


def test_what_comes_late_ends_no_later_restore(few: int) -> None:
    node = Node(world=2)
    one = Trainer(node)
    one.ask(1)
    late = node.inbox.get(timeout=60)
    one.leave()
    one.fetch(0)
    late()
    one.take()
    run_to_the_end(node, [one], random.Random(4))
    assert one.right((0, range(CHUNKS)))


def test_nobody_takes_what_it_was_not_told_of(few: int) -> None:
    node = Node()
    one = Trainer(node)
    with pytest.raises(AgentError):  # the agent before this one may have been asked
        node.arrivals.take(one, m.Take(id=2))
    one.fetch(0)
    with pytest.raises(FormatError):
        node.arrivals.take(one, m.Take(id=2, taken=(0,)))
    node.arrivals.take(one, m.Take(id=2))
    with pytest.raises(FormatError):  # it has not been answered yet
        node.arrivals.take(one, m.Take(id=3))
