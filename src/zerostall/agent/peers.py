"""Other agents' way in: a port on which images are given and offers are heard."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zerostall import native
from zerostall.agent.pace import Pace
from zerostall.agent.transport import PlainTcp
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.placement import ImageId
from zerostall.errors import CapabilityError, SnapshotNotFoundError, ZerostallError
from zerostall.telemetry import log
from zerostall.wire import peers as p
from zerostall.wire.messages import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from zerostall.agent.transport import Transport
    from zerostall.core.candidates import Past
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record

MOST_CONNECTIONS = 64
PIECE = 4 << 20
"""Bytes whose turn comes at once."""

_ACCEPT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Entrance:
    """For agents that come to stay (`wire.nodes`).

    Attributes:
        answer: what they are told of the run. PeerError sends them away.
        enter: given their connection.
    """

    answer: Callable[[], p.Entered]
    enter: Callable[[socket.socket], None]


@dataclass(frozen=True, slots=True)
class Given:
    """An image that stays where it is while it is given."""

    layout: Layout
    record: Record
    attempt: str
    view: Callable[[int, int], memoryview]


class Source(Protocol):
    """Where the images are that are given here."""

    def given(
        self, image: ImageId, step: int, created: float, chunks: Sequence[int] | None = None
    ) -> AbstractContextManager[Given]:
        """The image, or these chunks of it, held for as long as the block lasts.

        Raises:
            SnapshotNotFoundError: it is not here.
        """
        ...

    def damaged(self, image: ImageId, record: Record, chunk: int) -> None:
        """A copy that was given is not what its record says."""


class PeerDoor:
    """Listens; each connection has a thread of its own, at most `MOST_CONNECTIONS` of them.

    Attributes:
        gave: how many bytes of each rank's images have left.

    Args:
        images: what is given to who asks for it; None gives nothing.
        heard: called with offers; says what is here of that rank.
        transport: how images get out.
        entrance: for agents that come to stay; they are no longer counted, and have no thread here.

    Raises (on construction): CapabilityError when it cannot listen there.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        images: Source | None = None,
        pace: Pace | None = None,
        heard: Callable[[p.Offer], tuple[Past, ...]] = lambda offer: (),
        entrance: Entrance | None = None,
        transport: Transport | None = None,
    ) -> None:
        host, port = p.split(address if address.rpartition(":")[2].isdecimal() else f"{address}:0")
        try:
            self._listener = socket.create_server((host, port), family=_family(host), backlog=64)
        except OSError as error:
            raise CapabilityError(
                f"cannot listen on {address} for other agents: {error}",
                hint="set ZEROSTALL_PEER to this node's address",
            ) from error
        self._listener.settimeout(_ACCEPT_SECONDS)
        bound = self._listener.getsockname()
        name = socket.gethostname() if bound[0] in ("0.0.0.0", "::") else host
        self.address = f"[{name}]:{bound[1]}" if ":" in name else f"{name}:{bound[1]}"
        self._secret = secret
        self._images = images
        self._pace = pace or Pace(None)
        self._heard = heard
        self._entrance = entrance
        self._transport = transport or PlainTcp()
        self.gave: Counter[ImageId] = Counter()
        self._open: set[p.PeerChannel] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="peer door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._listener.close()
        for channel in list(self._open):
            channel.shut()
        self._thread.join(2 * _ACCEPT_SECONDS)

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, origin = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closing:
                    log.warning("a connection of another agent was not accepted: %s", error)
                    time.sleep(_ACCEPT_SECONDS)
                continue
            if len(self._open) >= MOST_CONNECTIONS:
                log.warning("more than %d connections of other agents: one is refused", MOST_CONNECTIONS)
                sock.close()
                continue
            channel = p.PeerChannel(sock)
            self._open.add(channel)
            threading.Thread(target=self._serve, args=(channel, origin[0]), name="peer", daemon=True).start()

    def _serve(self, channel: p.PeerChannel, origin: str) -> None:
        stays = False
        try:
            node = p.welcome(channel, self._secret)
            log.debug("node %s is connected", node)
            while not self._closing:
                message = channel.receive()
                if isinstance(message, p.Enter) and self._entrance is not None:
                    channel.send(self._entrance.answer())
                    stays = True
                    self._entrance.enter(channel.detach())
                    return
                self._answer(channel, message)
        except p.PeerError as error:
            log.debug("%s: %s", origin, error.args[0])
        except Exception:  # noqa: BLE001 - one connection's trouble must not end the others
            log.exception("%s could not be served", origin)
        finally:
            self._open.discard(channel)
            if not stays:
                channel.close()

    def _answer(self, channel: p.PeerChannel, message: p.AnyMessage) -> None:
        match message:
            case p.Pull():
                self._give(channel, message)
            case p.Offer():
                channel.send(p.Noted(self._heard(message)))
            case _:
                raise p.PeerError(f"{type(message).__name__} was not expected")

    def _give(self, channel: p.PeerChannel, request: p.Pull) -> None:
        with contextlib.ExitStack() as stack:
            try:
                if self._images is None:
                    raise SnapshotNotFoundError("no images are given here")
                image = ImageId(request.run, request.rank)
                given = stack.enter_context(self._images.given(image, request.step, request.created, request.chunks))
                chunks = _asked(given, request)
                if request.doubted and chunks and (chunk := _damaged(given, chunks[0])) is not None:
                    self._images.damaged(image, given.record, chunk)
                    raise SnapshotNotFoundError(f"chunk {chunk} of its copy is damaged")
            except (ZerostallError, OSError) as error:
                channel.send(p.Absent(plain(str(error.args[0] if error.args else error))))
                return
            record = given.record
            outlet = stack.enter_context(self._transport.outlet(channel, request.transport))
            layout = b"" if given.layout.digest in request.knows else layouts.encode(given.layout)
            encoded, some = manifests.encode_record(record), request.chunks is not None
            stack.enter_context(self._pace.giving())
            channel.send(p.Coming(layout, encoded, given.attempt, outlet.ground, some))
            for chunk in chunks:
                start, nbytes = record.extent(chunk)
                for offset in range(start, start + nbytes, PIECE):
                    piece = given.view(offset, min(PIECE, start + nbytes - offset))
                    self._pace.pass_by(len(piece))
                    outlet.send_bytes(piece)
                    self.gave[image] += len(piece)
            outlet.finish()


def _asked(given: Given, request: p.Pull) -> Sequence[int]:
    """The chunks that are to be sent. SnapshotNotFoundError where the image has no such."""
    count = len(given.record.checksums)
    if request.chunks is None:
        return range(max(0, request.start), count)
    if not all(0 <= chunk < count for chunk in request.chunks):
        raise SnapshotNotFoundError(f"its copy has {count} chunks")
    return request.chunks[max(0, request.start) :]


def _damaged(given: Given, chunk: int) -> int | None:
    """The chunk, where it is not what the record says."""
    record = given.record
    found = native.crc32c(given.view(*record.extent(chunk)))
    return chunk if found != record.checksums[chunk] else None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
