"""Images from agent to agent: proven, checked chunk by chunk, gone on with after a break."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from hand import wait_until
from images import RUN, HandMade, make_layout
from zerostall import native
from zerostall.agent.nixl import CELL
from zerostall.agent.pace import Pace
from zerostall.agent.peers import Given, PeerDoor
from zerostall.agent.pulling import peek, pull
from zerostall.agent.transport import PlainTcp, Transport
from zerostall.agent.transports import open_transport
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.candidates import Past
from zerostall.core.layout import CHUNK, Layout
from zerostall.core.placement import ImageId
from zerostall.errors import SnapshotNotFoundError
from zerostall.wire import peers as p

SECRET = "a secret of sixteen or more"
LAYOUT = make_layout(2 * CHUNK + 12345)


class OneImage:
    """Stands for `agent.images.Images` with a single image."""

    def __init__(self, made: HandMade) -> None:
        self.made = made
        self.held = 0
        self.found_damaged: list[int] = []
        self.view = made.memory.view

    @contextlib.contextmanager
    def given(self, image: ImageId, step: int, created: float, chunks: object = None) -> Iterator[Given]:
        record = self.made.record
        if (image, step) != (ImageId(RUN, 0), record.step) or created not in (0.0, record.created):
            raise SnapshotNotFoundError(f"no step {step} here")
        self.held += 1
        try:
            yield Given(LAYOUT, record, "attempt", self.view)
        finally:
            self.held -= 1

    def damaged(self, image: ImageId, record: object, chunk: int) -> None:
        self.found_damaged.append(chunk)


@pytest.fixture(scope="module")
def made() -> HandMade:
    return HandMade(LAYOUT, 7)


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def transports(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    """Who gives and who takes."""
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13", reason="NIXL is not installed")
    before = set(os.environ)
    opened = [open_transport(request.param, name, "127.0.0.1") for name in ("n1", "n2")]
    yield opened[0], opened[1]
    for transport in opened:
        transport.close()
    for name in set(os.environ) - before:
        del os.environ[name]


class Home:
    def __init__(self, made: HandMade, transport: Transport | None = None) -> None:
        self.images = OneImage(made)
        self.offers: list[p.Offer] = []
        self.pace = Pace(None)
        self.transport = transport or PlainTcp()
        self.door = PeerDoor(
            "127.0.0.1",
            SECRET,
            self.images,  # pyright: ignore
            self.pace,
            self.hear,
            transport=self.transport,
        )

    def hear(self, offer: p.Offer) -> tuple[Past, ...]:
        self.offers.append(offer)
        return (Past(2, 1.0),)


@pytest.fixture
def home(made: HandMade, transports: tuple[Transport, Transport]) -> Iterator[Home]:
    started = Home(made, transports[0])
    yield started
    started.door.close()


class Target:
    """Memory for an image that comes."""

    def __init__(self) -> None:
        self.segment = native.Segment("target", 3 * CHUNK)
        self.rooms = 0

    def room(self, layout: object, record: object) -> Callable[[int, int], memoryview]:
        self.rooms += 1
        return self.segment.view


def fetch(
    address: str,
    target: Target,
    transport: Transport | None = None,
    *,
    step: int = 7,
    secret: str = SECRET,
    received=lambda _: None,
) -> None:
    request = p.Pull(RUN, 0, step)
    pull(address, "n2", secret, request, target.room, transport=transport, received=received, stopping=lambda _: False)


def test_an_image_comes_whole(home: Home, made: HandMade, transports: tuple[Transport, Transport]) -> None:
    target = Target()
    fetch(home.door.address, target, transports[1])
    assert bytes(target.segment.view(0, LAYOUT.nbytes)) == made.bytes
    assert home.pace.sent == LAYOUT.nbytes
    wait_until(lambda: home.images.held == 0)


def test_what_is_not_there_is_said(home: Home) -> None:
    with pytest.raises(SnapshotNotFoundError, match="no step 8 here"):
        fetch(home.door.address, Target(), step=8)


def test_without_the_token_nobody_gets_anything(home: Home) -> None:
    with pytest.raises(p.PeerError):
        fetch(home.door.address, Target(), secret="another one, also long enough")
    with socket.create_connection(p.split(home.door.address), 30) as stranger:
        stranger.settimeout(30)
        assert len(stranger.recv(p.NONCE)) == p.NONCE
        stranger.sendall(b"\xff\xff\xff\xff")  # a frame of 4 GiB
        assert stranger.recv(1) == b""
    assert home.pace.sent == 0


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            sock, _ = listener.accept()
            channel = p.PeerChannel(sock)
            channel.send_bytes(bytes(p.NONCE))
            channel.receive()
            channel.send(p.Proof(bytes(32)))
            channel.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(p.PeerError, match="does not know this cluster's token"):
            p.connect(f"127.0.0.1:{listener.getsockname()[1]}", "n2", SECRET)
        thread.join(30)


class Cutter:
    """Passes bytes on, and breaks each of the first connections after so many."""

    def __init__(self, target: str, cuts: list[int]) -> None:
        self._target = p.split(target)
        self._cuts = cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, call: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=call, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                front, _ = self._listener.accept()
            except OSError:
                return
            back = socket.create_connection(self._target)
            self._sockets += [front, back]
            self._start(self._pass, front, back, None)
            self._start(self._pass, back, front, self._cuts.pop(0) if self._cuts else None)

    def _pass(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        with contextlib.suppress(OSError):
            while (limit is None or limit > 0) and (data := source.recv(min(1 << 16, limit or 1 << 16))):
                target.sendall(data)
                limit = None if limit is None else limit - len(data)
        for sock in (source, target):
            shut(sock)

    def close(self) -> None:
        for sock in self._sockets:
            shut(sock)
        while self._threads:
            self._threads.pop().join(30)
        for sock in self._sockets:
            sock.close()


def shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def bytes_until(home: Home, made: HandMade, cells: int) -> int:
    """What a giver sends on the connection until it has laid so many cells of an image."""
    with home.transport.outlet(None, "nixl") as outlet:  # pyright: ignore[reportArgumentType]
        coming = p.Coming(layouts.encode(LAYOUT), manifests.encode_record(made.record), "attempt", outlet.ground)
    messages = [p.Proof(bytes(32)), coming, *[p.Laid(CELL)] * cells]
    return p.NONCE + sum(4 + len(msgspec.msgpack.encode(message)) for message in messages)


def test_a_break_is_gone_on_from(home: Home, made: HandMade, transports: tuple[Transport, Transport]) -> None:
    cuts = [CHUNK + CHUNK // 2, CHUNK + 4096]
    if transports[1].name == "nixl":
        cuts = [bytes_until(home, made, CHUNK // CELL + 2), bytes_until(home, made, CHUNK // CELL + 1)]
    cutter = Cutter(home.door.address, cuts)
    target, counts = Target(), []
    fetch(cutter.address, target, transports[1], received=counts.append)
    cutter.close()
    assert bytes(target.segment.view(0, LAYOUT.nbytes)) == made.bytes
    assert target.rooms == 1
    assert sum(counts) == LAYOUT.nbytes  # no chunk that had come whole came again


def test_one_that_breaks_each_time_is_given_up(home: Home, transports: tuple[Transport, Transport]) -> None:
    cutter = Cutter(home.door.address, [512] * 100)
    with pytest.raises(p.PeerError):
        fetch(cutter.address, Target(), transports[1])
    cutter.close()


def test_damage_at_the_source_is_found_and_said_there(transports: tuple[Transport, Transport]) -> None:
    damaged = HandMade(LAYOUT, 7)
    damaged.memory.view(CHUNK + 100, 1)[0] ^= 1
    home = Home(damaged, transports[0])
    try:
        with pytest.raises(SnapshotNotFoundError, match="chunk 1 of its copy is damaged"):
            fetch(home.door.address, Target(), transports[1])
        assert home.images.found_damaged == [1]
    finally:
        home.door.close()


def test_damage_on_the_way_is_made_up_for(home: Home, made: HandMade, transports: tuple[Transport, Transport]) -> None:
    damaged_once: list[int] = []

    def view(offset: int, nbytes: int) -> memoryview:
        if offset != CHUNK or damaged_once:
            return made.memory.view(offset, nbytes)
        damaged_once.append(offset)
        wrong = bytearray(made.memory.view(offset, nbytes))
        wrong[100] ^= 1
        return memoryview(wrong)

    home.images.view = view
    target = Target()
    fetch(home.door.address, target, transports[1])
    assert bytes(target.segment.view(0, LAYOUT.nbytes)) == made.bytes
    assert home.images.found_damaged == [] and target.rooms == 1


def test_what_was_listened_to_opens_nothing(home: Home) -> None:
    """A proof is worth nothing on another connection: the server's nonce is another one."""
    with socket.create_connection(p.split(home.door.address), 30) as listened:
        theirs = listened.recv(p.NONCE, socket.MSG_WAITALL)
        hail = p.Hail("n2", bytes(32), p._proof(SECRET, p._CLIENT, theirs, bytes(32)))
        frame = msgspec.msgpack.encode(hail)
        listened.sendall(len(frame).to_bytes(4, "big") + frame)
        listened.settimeout(30)
        assert listened.recv(1) != b""  # it is let in
        with socket.create_connection(p.split(home.door.address), 30) as again:
            again.settimeout(30)
            assert again.recv(p.NONCE, socket.MSG_WAITALL) != theirs
            again.sendall(len(frame).to_bytes(4, "big") + frame)
            assert again.recv(1) == b""


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", (p.MOST_FRAME + 1).to_bytes(4, "big"), b"\0\0\0\2\xc1\xc1"])
def test_who_is_let_in_and_says_nonsense_is_sent_away(home: Home, made: HandMade, frame: bytes) -> None:
    channel = p.connect(home.door.address, "n2", SECRET)
    channel.send_bytes(frame)
    with pytest.raises(p.PeerError):
        channel.receive()
    channel.close()
    fetch(home.door.address, Target())  # and others are served


@pytest.mark.parametrize("run", ["../../../etc/passwd", "/etc/passwd", "", "\0", RUN + "/.."])
def test_a_name_is_no_path(home: Home, run: str) -> None:
    channel = p.connect(home.door.address, "n2", SECRET)
    channel.send(p.Pull(run, 0, 7))
    assert isinstance(channel.receive(), p.Absent)
    channel.close()
    assert home.pace.sent == 0


@pytest.mark.parametrize(
    ("start", "chunks", "answer"),
    [(-1, None, p.Coming), (1 << 62, None, p.Coming), (0, (-1,), p.Absent), (1 << 62, (0, 1), p.Coming)],
)
def test_chunks_that_there_are_not_are_not_given(
    home: Home, start: int, chunks: tuple[int, ...] | None, answer: type[p.PeerMessage]
) -> None:
    channel = p.connect(home.door.address, "n2", SECRET)
    channel.send(p.Pull(RUN, 0, 7, start=start, chunks=chunks))
    assert isinstance(channel.receive(), answer)
    channel.close()
    wait_until(lambda: home.images.held == 0)
    assert home.pace.sent <= LAYOUT.nbytes
    fetch(home.door.address, Target())  # and others are served


def test_one_that_knows_only_tcp_is_given_to_by_tcp(
    home: Home, made: HandMade, transports: tuple[Transport, Transport]
) -> None:
    """And one that has nothing else gives by it."""
    target, plain = Target(), Home(made)
    fetch(home.door.address, target)
    assert bytes(target.segment.view(0, LAYOUT.nbytes)) == made.bytes
    other = Target()
    fetch(plain.door.address, other, transports[1])
    assert bytes(other.segment.view(0, LAYOUT.nbytes)) == made.bytes
    plain.door.close()


def test_memory_that_cannot_be_read_comes_by_tcp(
    home: Home, made: HandMade, transports: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is behind a firewall that lets only the agents' own port through."""
    if transports[1].name == "tcp":
        pytest.skip("plain TCP reads nobody's memory")
    taker = open_transport("nixl", "n3", "127.0.0.1")
    monkeypatch.setattr(taker, "state", lambda handle: "ERR")
    target = Target()
    fetch(home.door.address, target, taker)
    assert bytes(target.segment.view(0, LAYOUT.nbytes)) == made.bytes
    assert taker.asks(home.door.address) == "" and taker.asks("127.0.0.1:1") == "nixl"
    taker.close()


def test_offers_are_heard(home: Home) -> None:
    channel = p.connect(home.door.address, "n2", SECRET)
    offer = p.Offer(RUN, 0, 1, "127.0.0.1:1", (Past(3, 4.0),))
    channel.send(offer)
    assert channel.receive() == p.Noted((Past(2, 1.0),))
    channel.close()
    assert home.offers == [offer]


def test_the_rate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import zerostall.agent.pace as module

    waits: list[float] = []
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(module.time, "sleep", waits.append)
    pace = Pace(1000)
    for _ in range(4):
        pace.pass_by(500)
    assert waits == [0.0, 0.5, 1.0, 1.5] and pace.sent == 2000


def test_only_the_chunks_that_are_asked_for_come(
    made: HandMade, home: Home, transports: tuple[Transport, Transport]
) -> None:
    target = Target()
    counts: list[int] = []
    request = p.Pull(RUN, 0, 7, chunks=(2, 0))
    pull(home.door.address, "n", SECRET, request, target.room, transport=transports[1], received=counts.append)
    assert counts == [LAYOUT.nbytes - 2 * CHUNK, CHUNK]
    assert bytes(target.segment.view(0, CHUNK)) == made.bytes[:CHUNK]
    assert bytes(target.segment.view(2 * CHUNK, LAYOUT.nbytes - 2 * CHUNK)) == made.bytes[2 * CHUNK :]
    assert not any(target.segment.view(CHUNK, CHUNK))
    with pytest.raises(SnapshotNotFoundError, match="its copy has 3 chunks"):
        pull(home.door.address, "n", SECRET, p.Pull(RUN, 0, 7, chunks=(3,)), target.room)


def test_what_an_image_is_comes_without_its_bytes_and_a_layout_once(made: HandMade, home: Home) -> None:
    known: dict[str, Layout] = {}
    sent = home.pace.sent
    found = list(peek(home.door.address, "n", SECRET, [p.Pull(RUN, 0, 7), p.Pull(RUN, 0, 7)], known))
    assert [one.record for one in found] == [made.record, made.record]
    assert [one.layout.digest for one in found] == [LAYOUT.digest, LAYOUT.digest] == [*known, *known]
    assert home.pace.sent == sent
    with pytest.raises(SnapshotNotFoundError, match="no step 8 here"):
        list(peek(home.door.address, "n", SECRET, [p.Pull(RUN, 0, 8)], known))
