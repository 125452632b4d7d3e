"""Bringing one image over from another agent: checked chunk by chunk, gone on with after a break."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from zerostall import native
from zerostall.agent.transport import PlainTcp
from zerostall.core import backoff
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.errors import CorruptError, SnapshotNotFoundError
from zerostall.telemetry import log
from zerostall.wire import peers as p

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.agent.transport import Inlet, Transport
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record

TRIES = 5
_CHECKED_AT_ONCE = 1 << 20


@dataclass(slots=True)
class Pulled:
    """How far an image has come."""

    layout: Layout
    record: Record
    attempt: str
    chunks: int = 0


def pull(
    address: str,
    node: str,
    secret: str,
    request: p.Pull,
    room: Callable[[Layout, Record], Callable[[int, int], memoryview]],
    *,
    transport: Transport | None = None,
    tries: int = TRIES,
    received: Callable[[int], None] = lambda _: None,
    stopping: Callable[[float], bool] = lambda seconds: bool(time.sleep(seconds)),
) -> Pulled:
    """Fetch an image into the memory that `room` gives (a view for an offset and a length); whole when this returns.

    Of a request that names a `start` or a `count`, those chunks are.

    Raises:
        SnapshotNotFoundError: the other side does not have it, or no longer, or found that its copy is damaged.
        CorruptError: a chunk failed its checksum each time.
        PeerError: the other side could not be reached for `tries` tries in a row, or `stopping` said so.
    """
    transport = transport or PlainTcp()
    so_far: Pulled | None = None
    view: Callable[[int, int], memoryview] | None = None
    failures, doubted = 0, False
    while True:
        came = so_far.chunks if so_far else request.start
        try:
            channel = p.connect(address, node, secret)
            try:
                asked = transport.asks(address)
                left = request.count and request.start + request.count - came
                channel.send(msgspec.structs.replace(request, start=came, count=left, transport=asked, doubted=doubted))
                answer = channel.receive()
                if isinstance(answer, p.Absent):
                    raise SnapshotNotFoundError(f"{address}: {answer.reason}")
                if not isinstance(answer, p.Coming):
                    raise p.PeerError(f"{address} answered {type(answer).__name__}")
                coming = _checked(answer, request, address)
                if so_far is None or view is None:
                    so_far, view = coming, room(coming.layout, coming.record)
                elif coming.record != so_far.record:
                    raise SnapshotNotFoundError(f"{address} has another image of step {request.step} by now")
                way = transport if answer.ground else PlainTcp()
                with way.inlet(channel, address, answer.ground) as inlet:
                    _receive(inlet, so_far, view, received, _end(request, so_far.record))
                return so_far
            finally:
                channel.close()
        except (p.PeerError, CorruptError) as error:
            doubted = isinstance(error, CorruptError)
            failures = 1 if so_far and so_far.chunks > came else failures + 1
            if failures >= tries:
                raise
            log.info("%s; trying again from chunk %d", error.args[0], so_far.chunks if so_far else request.start)
            if stopping(backoff.pause(failures, 0.5)):
                raise


def _checked(answer: p.Coming, request: p.Pull, address: str) -> Pulled:
    record = manifests.decode_record(answer.record, source=f"the record from {address}")
    layout = layouts.decode(answer.layout, record.begins)
    asked = (request.run, request.rank, request.step)
    if (record.run, record.rank, record.step) != asked or (record.layout, record.nbytes) != (
        layout.digest,
        layout.nbytes,
    ):
        raise CorruptError(f"{address} sent another image than was asked for")
    return Pulled(layout, record, answer.attempt, request.start)


def _end(request: p.Pull, record: Record) -> int:
    chunks = len(record.checksums)
    return min(chunks, request.start + request.count) if request.count else chunks


def _receive(
    inlet: Inlet,
    pulled: Pulled,
    view: Callable[[int, int], memoryview],
    received: Callable[[int], None],
    end: int,
) -> None:
    record = pulled.record
    while pulled.chunks < end:
        start = pulled.chunks * record.chunk_bytes
        chunk = view(start, min(record.chunk_bytes, record.nbytes - start))
        found = 0
        # In pieces, so that what is checked is still in the cache.
        for offset in range(0, len(chunk), _CHECKED_AT_ONCE):
            piece = chunk[offset : offset + _CHECKED_AT_ONCE]
            inlet.receive_into(piece)
            found = native.crc32c(piece, found)
        if found != record.checksums[pulled.chunks]:
            raise CorruptError(f"step {record.step}, rank {record.rank}: chunk {pulled.chunks} came damaged")
        received(len(chunk))
        pulled.chunks += 1
