"""One connection to the agent: a trainer, a tool that asks for the status, or the agent of another node."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerostall.telemetry import log
from zerostall.wire.channel import Channel, ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.wire import messages as m

_numbers = itertools.count(1)


@dataclass(slots=True, eq=False)
class Client:
    """A connection and what must be undone when it ends.

    Attributes:
        broken: it has ended, or is to end, and is closed at the end of the round.
        leaving: the trainer has said that it goes; else a connection that ends may just have broken.
        looks_at: the images that it has fetched and not let go of, by rank, step and tier.
    """

    channel: Channel[Any]
    name: str = ""
    pid: int = 0
    broken: bool = False
    leaving: bool = False
    fetched: list[Callable[[], None]] = field(default_factory=list)
    looks_at: set[tuple[int, int, str]] = field(default_factory=set)
    _releases: int = 0

    def __post_init__(self) -> None:
        self.name = f"client {next(_numbers)}"

    def send(self, message: m.Message, *fds: int) -> None:
        """Send, or mark the connection broken; the service closes it at the end of the round."""
        if self.broken:
            return
        try:
            self.channel.send(message, *fds)
        except ClosedError as error:
            self.broken = True
            log.info("%s is gone: %s", self.name, error)

    def claim(self) -> Claim:
        """What the client asks for now, to be given when it is there."""
        return Claim(self, self._releases)

    def release_fetched(self) -> None:
        """Let go of everything that was held for this client to read, and of what it has asked for."""
        self._releases += 1
        self.looks_at.clear()
        while self.fetched:
            self.fetched.pop()()


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that a client has asked for. It stands until the client is gone, or lets go of all that it asked for.

    One that is interrupted (Ctrl-C) lets go while it is being looked for: whoever comes with it then is not waited for,
    and what it holds would stay until the client happens to let go again.
    """

    client: Client
    releases: int

    def stands(self) -> bool:
        return not self.client.broken and self.client._releases == self.releases

    def settle(self, answer: m.Message, fd: int, done: Callable[[], None]) -> None:
        """Give it to the client, which has it until it lets go; then `done` is called, at once if it has."""
        if not self.stands():
            done()
            return
        self.client.fetched.append(done)
        self.client.send(answer, fd)


@dataclass(slots=True, eq=False, kw_only=True)
class NodeClient(Client):
    """The agent of another node, with which this one has ranks of a run in common.

    Attributes:
        heard: called with each message; an error in there ends the connection.
        parted: called once, when it has ended.
    """

    heard: Callable[[Any], None]
    parted: Callable[[], None]
