"""Images that several ranks need of a disk are read at the same time, each chunk once on a node."""

from __future__ import annotations

import os
import queue
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from images import HandMade, make_layout, manifest_of
from zerostall import native
from zerostall.agent.client import Client
from zerostall.agent.fetches import Fetches
from zerostall.agent.node_reads import READERS
from zerostall.core.retention import Keep
from zerostall.flow.governor import Governor
from zerostall.flow.persist import prune
from zerostall.tiers.disk import DiskTier
from zerostall.wire import messages as m

LAYOUT = make_layout(17 << 20)  # two chunks
WORLD = 3


class Trainer(Client):
    """Keeps what it is sent: the bytes that it would map."""

    def __init__(self) -> None:
        super().__init__(cast("Any", None))
        self.said: list[m.Message] = []
        self.bytes: list[bytes] = []

    def send(self, message: m.Message, *fds: int) -> None:
        self.said.append(message)
        if isinstance(message, m.Opened):
            self.bytes.append(os.pread(fds[0], LAYOUT.nbytes, 0))
        elif fds:
            assert isinstance(message, m.Fetched)
            segment = native.Segment.attach(fds[0], message.memory.nbytes)
            self.bytes.append(bytes(segment.view(0, LAYOUT.nbytes)))
            segment.close()

    def let_go(self) -> None:
        self.release_fetched()


def test_ranks_read_at_once_and_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskTier(tmp_path / "run", native.Pool("test", 1))
    made = [HandMade(LAYOUT, 7, rank=rank, world=WORLD) for rank in range(WORLD)]
    for one in made:
        disk.put(one.image)
    disk.commit(manifest_of(*(one.record for one in made)))
    inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    fetches = Fetches(disk, inbox.put, Governor())
    meet = threading.Barrier(min(WORLD, READERS))  # nobody gets on until all are reading
    get, read = disk.get, []

    def counted(step: int, rank: int, address: int, *, chunks: Any = None) -> Any:
        if rank not in {other for other, _ in read}:
            read.append((rank, tuple(chunks)))
            meet.wait(60)
        else:
            read.append((rank, tuple(chunks)))
        return get(step, rank, address, chunks=chunks)

    monkeypatch.setattr(disk, "get", counted)
    clients = [Trainer() for _ in range(WORLD + 1)]
    for number, client in enumerate(clients):  # the last one wants another chunk of the first one's image
        chunks = (1,) if number == WORLD else (0,)
        request = m.Fetch(id=number, step=7, tier="disk", rank=number % WORLD, chunks=chunks)
        fetches.fetch(cast("Any", client), {}, 0, request)
    for _ in clients:
        inbox.get(timeout=60)()
    assert sorted(read) == [(0, (0,)), (0, (1,)), (1, (0,)), (2, (0,))]
    chunk = made[0].record.chunk_bytes
    assert all(clients[rank].bytes[0][:chunk] == made[rank].bytes[:chunk] for rank in range(WORLD))
    assert clients[WORLD].bytes[0][chunk:] == made[0].bytes[chunk:]
    assert fetches.busy()
    for client in clients:
        client.let_go()
    assert not fetches.busy()
    fetches.close()


def test_a_step_stays_on_disk_until_whoever_reads_it_has_let_go(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "run", native.Pool("test", 1))
    for step in (7, 8):
        made = HandMade(LAYOUT, step)
        disk.put(made.image)
        disk.commit(manifest_of(made.record))
    inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    fetches, client = Fetches(disk, inbox.put, Governor()), Trainer()
    fetches.fetch(cast("Any", client), {}, 0, m.Fetch(id=1, step=7, tier="disk", rank=0, chunks=(0,)))
    assert prune(disk, Keep(last=1), fetches.steps()) == ()
    inbox.get(timeout=60)()
    assert prune(disk, Keep(last=1), fetches.steps()) == ()
    client.let_go()
    assert prune(disk, Keep(last=1), fetches.steps()) == (7,)
    assert disk.steps() == [8]
    fetches.close()


@pytest.mark.parametrize("tier", ["disk", "remote", "replica"])
def test_whatever_tier_it_comes_from_each_chunk_is_read_once_on_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    disk = DiskTier(tmp_path / "run", native.Pool("test", 1))
    place = disk if tier == "disk" else DiskTier(tmp_path / "elsewhere", native.Pool("test", 1))
    made = HandMade(LAYOUT, 7)
    place.put(made.image)
    place.commit(manifest_of(made.record))
    read: list[int] = []
    get = place.get

    def counted(step: int, rank: int, address: int, *, chunks: Any = None) -> Any:
        read.extend(chunks)
        return get(step, rank, address, chunks=chunks)

    monkeypatch.setattr(place, "get", counted)
    inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    fetches = Fetches(disk, inbox.put, Governor())
    if tier == "remote":
        fetches.remote = cast("Any", place)
    if tier == "replica":
        others = {"afar": place, "lend": lambda request, rank: None, "source": lambda step, rank: ""}
        fetches.elsewhere = cast("Any", types.SimpleNamespace(**others))
    wants = [(0,), (0, 1), (1,), (1, 0), (0,)]
    clients = [Trainer() for _ in wants]
    for client, chunks in zip(clients, wants, strict=True):
        fetches.fetch(cast("Any", client), {}, 0, m.Fetch(id=1, step=7, tier=tier, rank=0, chunks=chunks))
    for _ in clients:
        inbox.get(timeout=60)()
    assert sorted(read) == [0, 1]
    size = made.record.chunk_bytes
    for client, chunks in zip(clients, wants, strict=True):
        for chunk in chunks:
            part = slice(chunk * size, (chunk + 1) * size)
            assert client.bytes[0][part] == made.bytes[part]
        client.let_go()
    assert not fetches.busy()
    fetches.close()


class Node:
    """An agent's fetches from a disk with one image, and the chunks that were read of it so far."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = DiskTier(folder, native.Pool("test", 1))
        self.image = HandMade(LAYOUT, 7)
        disk.put(self.image.image)
        disk.commit(manifest_of(self.image.record))
        self.path = folder / "step-000000000007" / "rank-00000.safetensors"
        self.read: list[tuple[int, ...]] = []
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.fetches = Fetches(disk, self._inbox.put, Governor())
        get = disk.get

        def counted(step: int, rank: int, address: int, *, chunks: Any = None) -> Any:
            if chunks:
                self.read.append(tuple(chunks))
            return get(step, rank, address, chunks=chunks)

        monkeypatch.setattr(disk, "get", counted)

    def fetch(self, client: Trainer, *chunks: int, as_file: bool = True) -> m.Message:
        request = m.Fetch(id=1, step=7, tier="disk", rank=0, chunks=chunks, as_file=as_file)
        self.fetches.fetch(cast("Any", client), {}, 0, request)
        self._inbox.get(timeout=60)()
        return client.said[-1]

    def common(self, client: Trainer) -> tuple[int, ...]:
        self.fetches.common(cast("Any", client), m.Common(id=2, step=7, tier="disk", rank=0))
        answer = client.said[-1]
        assert isinstance(answer, m.InCommon)
        return answer.chunks


def test_of_files_that_ranks_read_themselves_the_agent_reads_what_several_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, one, two, three = Node(tmp_path / "run", monkeypatch), Trainer(), Trainer(), Trainer()
    data, chunk = node.image.bytes, node.image.record.chunk_bytes
    opened = node.fetch(one, 0, 1)
    assert isinstance(opened, m.Opened) and not opened.record and one.bytes == [data]
    assert node.common(one) == node.common(two) == ()
    node.fetch(two, 1)
    for client in (one, two):
        assert node.common(client) == (1,)
        node.fetch(client, 1, as_file=False)
        assert client.bytes[-1][chunk:] == data[chunk:]
    assert node.read == [(1,)]
    node.fetch(three, 0, as_file=False)  # into memory: whoever asks later finds it there
    assert node.common(one) == (0, 1) and node.common(two) == (1,)
    node.fetch(one, 0, 1, as_file=False)
    assert one.bytes[-1] == data and node.read == [(1,), (0,)]
    two.let_go()
    three.let_go()
    assert node.fetches.busy()
    one.let_go()
    assert not node.fetches.busy() and not node.fetches._node._shared
    node.fetches.close()


def test_what_is_damaged_or_not_there_is_refused_and_nothing_stays_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, one, two = Node(tmp_path / "run", monkeypatch), Trainer(), Trainer()
    node.fetch(one, 1)
    with node.path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"rot")
    refused = node.fetch(one, 1, as_file=False)
    assert isinstance(refused, m.Refused) and "checksum" in refused.message
    node.path.unlink()
    assert isinstance(node.fetch(two, 0), m.Refused)
    one.let_go()
    two.let_go()
    assert not node.fetches.busy() and not node.fetches._node._shared
    node.fetches.close()
