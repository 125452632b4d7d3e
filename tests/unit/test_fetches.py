"""Images that several ranks need of a disk are read at the same time, each chunk once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from images import HandMade, make_layout, manifest_of
from zerostall import native
from zerostall.agent.fetches import READERS, Fetches
from zerostall.flow.governor import Governor
from zerostall.tiers.disk import DiskTier
from zerostall.wire import messages as m

LAYOUT = make_layout(17 << 20)  # two chunks
WORLD = 3


class Client:
    """Keeps what it is sent: the bytes that it would map."""

    broken = False

    def __init__(self) -> None:
        self.fetched: list[Callable[[], None]] = []
        self.said: list[m.Message] = []
        self.bytes: list[bytes] = []

    def send(self, message: m.Message, fd: int) -> None:
        self.said.append(message)
        assert isinstance(message, m.Fetched)
        segment = native.Segment.attach(fd, message.memory.nbytes)
        self.bytes.append(bytes(segment.view(0, LAYOUT.nbytes)))
        segment.close()


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
    clients = [Client() for _ in range(WORLD + 1)]
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
        for release in client.fetched:
            release()
    assert not fetches.busy()
    fetches.close()
