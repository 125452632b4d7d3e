"""Chunks of images for all trainers of a node, each read once while somebody holds them.

A trainer reads what it alone needs of an image on disk from the file itself, which is opened here. What several need is
read here, into one segment for all, each chunk at its place in the image; so is what no file of this node has.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from zerostall.agent.refusing import ours
from zerostall.agent.shared_chunks import SharedChunks
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall import native
    from zerostall.agent.client import Client
    from zerostall.flow.governor import Governor
    from zerostall.flow.worker import Worker
    from zerostall.tiers.contract import Readable
    from zerostall.tiers.disk import DiskTier

READERS = 4  # images on several disks are read at once


class NodeReads:
    """Driven by the agent's loop; files are read on threads that come back through `post`.

    Args:
        steps: those that are being read, or held: one entry for each request.
        reader: reads from where only one may, and gives memory back.
    """

    def __init__(
        self,
        disk: DiskTier,
        steps: list[int],
        post: Callable[[Callable[[], None]], None],
        governor: Governor,
        reader: Worker,
    ) -> None:
        self._disk = disk
        self._steps = steps
        self._post = post
        self._governor = governor
        self._reader = reader
        self._readers = ThreadPoolExecutor(READERS, f"fetch {disk.where.name}")
        self._shared: dict[tuple[str, int, int], SharedChunks] = {}

    def close(self) -> None:
        self._readers.shutdown()

    def open(self, client: Client, rank: int, request: m.Fetch) -> None:
        """Answer with the file of an image on disk, of which the client reads those chunks that nobody else wants."""
        assert request.chunks is not None
        shared, let_go = self._part((self._disk.name, request.step, rank))
        shared.wanted[client] = frozenset(request.chunks)
        held = contextlib.ExitStack()
        claim = client.claim()

        def done() -> None:
            shared.wanted.pop(client, None)
            held.close()
            let_go()

        def look() -> None:
            try:
                image = self._disk.bytes_of(request.step, rank, self._disk.open(request.step, rank))
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                self._refuse(client, request.id, error, self._disk, done)
                return
            held.callback(image.close)
            held.enter_context(self._governor.restoring())
            answer = m.Opened(id=request.id, path=os.fsencode(image.path), layout=b"", record=b"")
            self._post(lambda: claim.settle(answer, image.fileno(), done))

        self._readers.submit(look)

    def common(self, client: Client, run: Readable, request: m.Common) -> None:
        """Answer with those chunks of a file that the client has, and is not to read, for others want them, too."""
        shared = self._shared.get((run.name, request.step, request.rank), SharedChunks())
        client.send(m.InCommon(id=request.id, chunks=shared.in_common(client)))

    def lend(
        self,
        client: Client,
        rank: int,
        run: Readable,
        request: m.Fetch,
        source: Callable[[int, int], str] = lambda step, rank: "",
    ) -> None:
        """Answer with chunks of an image in memory; `source` says in the end where they came from."""
        step, chunks = request.step, request.chunks
        assert chunks is not None
        shared, let_go = self._part((run.name, step, rank))
        shared.lent.update(chunks)
        claim = client.claim()

        def answer(segment: native.Segment) -> None:
            memory = m.Lent(0, segment.nbytes)
            fetched = m.Fetched(
                id=request.id,
                memory=memory,
                offset=0,
                passing=True,
                layout=b"",
                record=b"",
                verified=True,
                source=source(step, rank),
            )
            claim.settle(fetched, segment.fileno(), let_go)

        def read() -> None:
            try:
                with self._governor.restoring():
                    segment = shared.read(run, step, rank, chunks)
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                self._refuse(client, request.id, error, run, let_go)
            else:
                self._post(lambda: answer(segment))

        if run is self._disk:
            self._readers.submit(read)
        else:
            self._reader.submit(read)

    def _part(self, key: tuple[str, int, int]) -> tuple[SharedChunks, Callable[[], None]]:
        """What is shared of an image (tier, step, rank), until what comes with it is called; its step stays, too."""
        shared = self._shared.setdefault(key, SharedChunks())
        shared.users += 1
        self._steps.append(key[1])

        def let_go() -> None:
            self._steps.remove(key[1])
            shared.users -= 1
            if shared.users == 0:
                del self._shared[key]
                if shared.segment is not None:
                    self._reader.submit(shared.close)  # giving gigabytes back takes a while

        return shared, let_go

    def _refuse(self, client: Client, id: int, error: Exception, run: Readable, done: Callable[[], None]) -> None:
        refused = m.Refused.of(id, ours(error, run.where))

        def tell() -> None:
            done()
            client.send(refused)

        self._post(tell)
