"""Bringing images over from another agent, or some chunks of them: checked one by one, gone on with after a break."""

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
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from zerostall.agent.transport import Inlet, Transport
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record

TRIES = 5
_CHECKED_AT_ONCE = 1 << 20
_KNOWN_TOLD = 16
"""The other side is told of so many layouts that need not come."""


@dataclass(slots=True)
class Pulled:
    """How far an image has come: the first `chunks` of those that were asked for."""

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
    known: Mapping[str, Layout] | None = None,
) -> Pulled:
    """Fetch an image into the memory that `room` gives (a view for an offset and a length); whole when this returns.

    Args:
        request: with `chunks`, only these are fetched.
        known: layouts by their digests, which need not come.

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
        came = so_far.chunks if so_far else 0
        try:
            channel = p.connect(address, node, secret)
            try:
                asked = transport.asks(address)
                again = msgspec.structs.replace(request, start=came, transport=asked, doubted=doubted)
                answer, coming = _asked(channel, again, address, known or {})
                if so_far is None or view is None:
                    so_far, view = coming, room(coming.layout, coming.record)
                elif coming.record != so_far.record:
                    raise SnapshotNotFoundError(f"{address} has another image of step {request.step} by now")
                way = transport if answer.ground else PlainTcp()
                with way.inlet(channel, address, answer.ground) as inlet:
                    _receive(inlet, so_far, view, received, request.chunks)
                return so_far
            finally:
                channel.close()
        except (p.PeerError, CorruptError) as error:
            doubted = isinstance(error, CorruptError)
            failures = 1 if so_far and so_far.chunks > came else failures + 1
            if failures >= tries:
                raise
            log.info("%s; trying again from chunk %d", error.args[0], so_far.chunks if so_far else 0)
            if stopping(backoff.pause(failures, 0.5)):
                raise


def peek(
    address: str, node: str, secret: str, requests: Iterable[p.Pull], known: dict[str, Layout]
) -> Iterator[Pulled]:
    """Layouts and records of images, in order, without their bytes; layouts that come are added to those `known`.

    Raises:
        SnapshotNotFoundError: the other side does not have one of them.
        PeerError: it cannot be reached.
    """
    channel = p.connect(address, node, secret)
    try:
        for request in requests:
            _, came = _asked(channel, msgspec.structs.replace(request, chunks=()), address, known)
            known[came.layout.digest] = came.layout
            yield came
    finally:
        channel.close()


def _asked(
    channel: p.PeerChannel, request: p.Pull, address: str, known: Mapping[str, Layout]
) -> tuple[p.Coming, Pulled]:
    """What the other side answers to a request, checked; the bytes follow."""
    channel.send(msgspec.structs.replace(request, knows=tuple(known)[-_KNOWN_TOLD:]))
    answer = channel.receive()
    if isinstance(answer, p.Absent):
        raise SnapshotNotFoundError(f"{address}: {answer.reason}")
    if not isinstance(answer, p.Coming):
        raise p.PeerError(f"{address} answered {type(answer).__name__}")
    if answer.some != (request.chunks is not None):
        raise p.PeerError(f"the agent at {address} is an older one, which gives whole images alone")
    return answer, _checked(answer, request, address, known)


def _checked(answer: p.Coming, request: p.Pull, address: str, known: Mapping[str, Layout]) -> Pulled:
    record = manifests.decode_record(answer.record, source=f"the record from {address}")
    if not answer.layout and record.layout in known:
        layout = layouts.moved(known[record.layout], record.begins, source=address)
    else:
        layout = layouts.decode(answer.layout, record.begins)
    asked = (request.run, request.rank, request.step)
    if (record.run, record.rank, record.step) != asked or (record.layout, record.nbytes) != (
        layout.digest,
        layout.nbytes,
    ):
        raise CorruptError(f"{address} sent another image than was asked for")
    return Pulled(layout, record, answer.attempt)


def _receive(
    inlet: Inlet,
    pulled: Pulled,
    view: Callable[[int, int], memoryview],
    received: Callable[[int], None],
    chunks: Sequence[int] | None,
) -> None:
    record = pulled.record
    asked = range(len(record.checksums)) if chunks is None else chunks
    while pulled.chunks < len(asked):
        number = asked[pulled.chunks]
        chunk = view(*record.extent(number))
        found = 0
        # In pieces, so that what is checked is still in the cache.
        for offset in range(0, len(chunk), _CHECKED_AT_ONCE):
            piece = chunk[offset : offset + _CHECKED_AT_ONCE]
            inlet.receive_into(piece)
            found = native.crc32c(piece, found)
        if found != record.checksums[number]:
            raise CorruptError(f"step {record.step}, rank {record.rank}: chunk {number} came damaged")
        received(len(chunk))
        pulled.chunks += 1
