"""How the bytes of an image get from one agent to another.

What is agreed on goes over the agents' own connection (`wire.peers`) in any case, and so do the bytes where nothing
better is to be had. A transport is asked only for a stream: bytes put into an outlet come out of the inlet on the
other side, in order, and nobody needs to know how.

    verb      on                  does
    asks      who wants images    the transport's name for a request to that address, "" for plain TCP
    outlet    who gives           a stream out, for somebody who asked by that name; plain where there is no room
    inlet     who wants           the stream that belongs to the ground that an outlet named; PeerError: it broke
    close     both                lets go of everything; no stream is open any more

Checksums, rates, and going on after a break are not a transport's business: they are the same for all.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from zerostall.wire.peers import PeerChannel


class Outlet(Protocol):
    """A stream out, of one thread.

    Attributes:
        ground: what the inlet has to know; empty where the bytes come on the connection itself.
    """

    ground: bytes

    def send_bytes(self, data: memoryview) -> None:
        """Raises PeerError when the stream breaks. The data may be changed once this returns."""

    def finish(self) -> None:
        """Wait until everything has been taken. Raises PeerError when the stream breaks before."""


class Inlet(Protocol):
    """A stream in, of one thread."""

    def receive_into(self, view: memoryview) -> None:
        """Fill the view. Raises PeerError when the stream breaks before."""


class Transport(Protocol):
    """Any thread. Only streams of one transport fit together, whichever agent made them."""

    name: str

    def asks(self, address: str) -> str: ...

    def outlet(self, channel: PeerChannel, asked: str) -> AbstractContextManager[Outlet]: ...

    def inlet(self, channel: PeerChannel, address: str, ground: bytes) -> AbstractContextManager[Inlet]: ...

    def close(self) -> None: ...


class _OnTheChannel:
    ground = b""

    def __init__(self, channel: PeerChannel) -> None:
        self._channel = channel

    def send_bytes(self, data: memoryview) -> None:
        self._channel.send_bytes(data)

    def finish(self) -> None:
        pass  # the connection keeps what was sent


class PlainTcp:
    """The connection itself."""

    name = "tcp"

    def asks(self, address: str) -> str:
        return ""

    @contextlib.contextmanager
    def outlet(self, channel: PeerChannel, asked: str) -> Iterator[Outlet]:
        yield _OnTheChannel(channel)

    @contextlib.contextmanager
    def inlet(self, channel: PeerChannel, address: str, ground: bytes) -> Iterator[Inlet]:
        yield channel

    def close(self) -> None:
        pass
