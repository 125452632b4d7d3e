"""Agents among themselves: framed messages and the bytes of images over TCP.

Both sides prove that they know the cluster's token without showing it (HMAC-SHA-256 over fresh nonces). What follows
is not encrypted; every chunk is checked against its checksum in the record by whoever receives it.

    → Hail   ← Proof                                        once a connection, on a nonce that the server sends first
    → Pull   ← Coming, then the chunks from `start` on      or Absent
    → Pull   ← Coming, then Laid for each part that lies ready, → Taken when it was fetched: by a transport
    → Offer  ← Noted                                        what a rank's home has: the other side fetches what it
    lacks
    → Enter  ← Entered                                      an agent of the same run; they go on as `wire.nodes` says
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import struct

import msgspec

from zerostall.core.candidates import Past
from zerostall.core.ground import Ground
from zerostall.errors import AgentError

MOST_FRAME = 256 << 20
NONCE = 32
SILENCE_SECONDS = 20.0
"""A connection on which nothing comes for so long is given up."""

_LENGTH = struct.Struct("!I")
_CLIENT, _SERVER = b"zerostall peer: client", b"zerostall peer: server"


class PeerMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One message; its tag is its class name."""


class Hail(PeerMessage, frozen=True):
    node: str
    nonce: bytes
    proof: bytes


class Proof(PeerMessage, frozen=True):
    proof: bytes


class Pull(PeerMessage, frozen=True):
    """Send the image of a rank, from chunk `start` on; `created` 0.0 takes whichever of that step is there.

    `transport` names the one by which the bytes may come, where it is not this connection. `doubted`: the chunk at
    `start` came damaged; it is to be looked at before anything is given.

    With `chunks` only these are sent, in that order, and `start` counts among them. The layout is left out where its
    digest is among those that the other side `knows`.
    """

    run: str
    rank: int
    step: int
    created: float = 0.0
    start: int = 0
    transport: str = ""
    doubted: bool = False
    chunks: tuple[int, ...] | None = None
    knows: tuple[str, ...] = ()


class Coming(PeerMessage, frozen=True):
    """The chunks follow, each as long as the record says: on the connection, or where `ground` says.

    `some`: only those that were asked for.
    """

    layout: bytes
    record: bytes
    attempt: str
    ground: bytes = b""
    some: bool = False


class Laid(PeerMessage, frozen=True):
    """The next bytes lie ready on the ground."""

    nbytes: int


class Taken(PeerMessage, frozen=True):
    """What was laid first of what is not taken yet may be replaced."""


class Absent(PeerMessage, frozen=True):
    reason: str


class Settled(msgspec.Struct, frozen=True):
    """An image of a clean step; `began`: when rank 0 saved that."""

    step: int
    created: float
    began: float


class Offer(PeerMessage, frozen=True):
    """What the home of a rank has sealed.

    Attributes:
        address: where it can be fetched.
        gone: what it had sealed and is worth nothing after all.
        settled: what of it is of clean steps.
        every: seconds from one step that goes to disk there to the next; None where the run has no disk.
        where, name: the run's folder there, and what its user calls it.
        wanted: those of the images that the other side should have, the first to fetch in front; None: the newest.
        kept: what the other side should keep, if it has it, until it hears of another.
    """

    run: str
    rank: int
    world: int
    address: str
    images: tuple[Past, ...]
    gone: tuple[Past, ...] = ()
    settled: tuple[Settled, ...] = ()
    every: float | None = None
    where: str = ""
    name: str = ""
    wanted: tuple[Past, ...] | None = None
    kept: tuple[Past, ...] = ()


class Noted(PeerMessage, frozen=True):
    """The offer was heard; `here` are the images of that rank that this node has in memory."""

    here: tuple[Past, ...] = ()


class Enter(PeerMessage, frozen=True):
    """This node has ranks of the run whose agent listens here."""


class Entered(PeerMessage, frozen=True):
    """What follows on the connection is of `wire.nodes`.

    Attributes:
        facts: of the run, as `run.json` has them.
        ground: what this node sees at the run's path.
        member: this node belongs to a cluster.
    """

    facts: bytes
    ground: Ground
    member: bool


AnyMessage = Hail | Proof | Pull | Coming | Laid | Taken | Absent | Offer | Noted | Enter | Entered


class PeerError(AgentError):
    """Another agent cannot be reached, has gone, or says what it should not."""


class PeerChannel:
    """One end of a connection. For one thread; every wait is bounded by `SILENCE_SECONDS`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SILENCE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(AnyMessage)

    def send(self, message: AnyMessage) -> None:
        body = msgspec.msgpack.encode(message)
        self.send_bytes(_LENGTH.pack(len(body)) + body)

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Raises PeerError when the connection breaks."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise PeerError(f"the connection to another agent broke: {error}") from error

    def receive(self, most: int = MOST_FRAME) -> AnyMessage:
        """The next message.

        Raises:
            PeerError: the connection broke, or what came is no message or longer than `most` bytes.
        """
        head = bytearray(_LENGTH.size)
        self.receive_into(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > most:
            raise PeerError(f"a frame of {length} bytes is no message of ours")
        body = bytearray(length)
        self.receive_into(memoryview(body))
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise PeerError(f"not a message: {error}") from error

    def receive_into(self, view: memoryview) -> None:
        """Fill the view. Raises PeerError when the connection breaks before."""
        done = 0
        try:
            while done < len(view):
                got = self._socket.recv_into(view[done:])
                if got == 0:
                    raise PeerError("the other agent has closed the connection")
                done += got
        except OSError as error:
            if isinstance(error, PeerError):
                raise
            raise PeerError(f"the connection to another agent broke: {error}") from error

    def readable(self, seconds: float) -> bool:
        """Whether something has come, or the other side has gone; waits for it so long."""
        return bool(select.select([self._socket], [], [], seconds)[0])

    def gone(self) -> bool:
        """Whether the other side has closed, even where not everything has been received that it sent."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def shut(self) -> None:
        """End the conversation; whoever waits for the other side wakes up. Any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def detach(self) -> socket.socket:
        """The connection for another conversation; this one is over. Nothing of what comes next was read."""
        return self._socket

    def close(self) -> None:
        self._socket.close()


def connect(address: str, node: str, secret: str) -> PeerChannel:
    """A connection to the agent at `address`, both sides proven.

    Raises:
        PeerError: it cannot be reached, or one of the two does not know the token.
    """
    host, port = split(address)
    try:
        channel = PeerChannel(socket.create_connection((host, port), SILENCE_SECONDS))
    except OSError as error:
        raise PeerError(f"the agent at {address} cannot be reached: {error}") from error
    try:
        theirs = bytearray(NONCE)
        channel.receive_into(memoryview(theirs))
        mine = secrets.token_bytes(NONCE)
        channel.send(Hail(node, mine, _proof(secret, _CLIENT, bytes(theirs), mine)))
        answer = channel.receive(1 << 12)
        if not isinstance(answer, Proof) or not hmac.compare_digest(
            answer.proof, _proof(secret, _SERVER, bytes(theirs), mine)
        ):
            raise PeerError(f"the agent at {address} does not know this cluster's token")
    except BaseException:
        channel.close()
        raise
    return channel


def welcome(channel: PeerChannel, secret: str) -> str:
    """The server's side of `connect`: the node on the other side.

    Raises:
        PeerError: it does not know the token, and is told nothing.
    """
    mine = secrets.token_bytes(NONCE)
    channel.send_bytes(mine)
    hail = channel.receive(1 << 12)
    if not isinstance(hail, Hail) or not hmac.compare_digest(hail.proof, _proof(secret, _CLIENT, mine, hail.nonce)):
        raise PeerError("somebody without this cluster's token")
    channel.send(Proof(_proof(secret, _SERVER, mine, hail.nonce)))
    return hail.node


def split(address: str) -> tuple[str, int]:
    """Host and port; ValueError for what is no address."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(f"{address!r} is no address such as 10.0.0.7:7400")
    return host.strip("[]"), int(port)


def _proof(secret: str, side: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.new(secret.encode(), side + server + client, hashlib.sha256).digest()
