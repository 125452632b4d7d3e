"""What every transport between agents promises (`zerostall.agent.transport`), on real connections of this machine."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from zerostall.agent import nixl, transports
from zerostall.agent.transport import PlainTcp, Transport
from zerostall.wire import peers as p

ADDRESS = "127.0.0.1:7400"
BYTES = random.Random(1).randbytes(2 * nixl.CELLS * nixl.CELL + 4097)
PIECES = [1, nixl.CELL - 1, nixl.CELL + 1, 1 << 20]


@pytest.fixture(scope="module", params=["tcp", "nixl", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    """A giver's and a taker's transport."""
    if request.param != "tcp":
        pytest.importorskip("nixl_cu13", reason="NIXL is not installed")
    before = dict(os.environ)
    opened = [transports.open_transport(request.param, name, ADDRESS) for name in ("giver", "taker")]
    yield opened[0], opened[1]
    for transport in opened:
        transport.close()
    for name in set(os.environ) - set(before):
        del os.environ[name]


class Conversation:
    """A giver, which is a thread, and the channel of somebody who takes."""

    def __init__(self, giver: Transport, asked: str, *, breaks: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.channel = p.PeerChannel(socket.create_connection(listener.getsockname(), 60))
            self._theirs = p.PeerChannel(listener.accept()[0])
        self.error: Exception | None = None
        self._breaks = breaks
        self._thread = threading.Thread(target=self._give, args=(giver, asked), daemon=True)
        self._thread.start()
        coming = self.channel.receive()
        assert isinstance(coming, p.Coming)
        self.ground = coming.ground

    def _give(self, giver: Transport, asked: str) -> None:
        try:
            with giver.outlet(self._theirs, asked) as outlet:
                self._theirs.send(p.Coming(b"", b"", "", outlet.ground))
                start, turn = 0, 0
                while start < len(BYTES):
                    piece = bytearray(BYTES[start : start + PIECES[turn % len(PIECES)]])
                    outlet.send_bytes(memoryview(piece))
                    piece[:] = bytes(len(piece))  # whoever gives may use it again at once
                    start, turn = start + len(piece), turn + 1
                    if self._breaks and turn == 3:
                        self._theirs.shut()
                outlet.finish()
        except Exception as error:
            self.error = error

    def take(self, taker: Transport, piece: int, nbytes: int = len(BYTES)) -> bytes:
        way = taker if self.ground else PlainTcp()
        got = memoryview(bytearray(nbytes))
        with way.inlet(self.channel, ADDRESS, self.ground) as inlet:
            for start in range(0, nbytes, piece):
                inlet.receive_into(got[start : start + piece])
        return bytes(got)

    def end(self) -> None:
        self.channel.close()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._theirs.close()


@pytest.mark.parametrize("piece", [1 << 20, nixl.CELL + 12345])
def test_what_is_given_arrives_in_order(pair: tuple[Transport, Transport], piece: int) -> None:
    giver, taker = pair
    talk = Conversation(giver, taker.name)
    assert bool(talk.ground) == (taker.name != "tcp")
    assert talk.take(taker, piece) == BYTES
    talk.end()
    assert talk.error is None


def test_streams_at_a_time_do_not_meet(pair: tuple[Transport, Transport]) -> None:
    giver, taker = pair
    talks = [Conversation(giver, taker.name) for _ in range(3)]
    got: dict[int, bytes] = {}
    threads = [
        threading.Thread(target=lambda number=number, talk=talk: got.__setitem__(number, talk.take(taker, 1 << 20)))
        for number, talk in enumerate(talks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for talk in talks:
        talk.end()
    assert got == dict.fromkeys(range(3), BYTES)


def test_a_broken_stream_is_an_error_on_both_sides(pair: tuple[Transport, Transport]) -> None:
    giver, taker = pair
    talk = Conversation(giver, taker.asks(ADDRESS), breaks=True)
    with pytest.raises(p.PeerError):
        talk.take(taker, 1 << 20)
    talk.end()
    assert isinstance(talk.error, p.PeerError)


def test_who_goes_away_holds_up_nobody(pair: tuple[Transport, Transport]) -> None:
    """And the next stream finds everything as it was, as often as it happens."""
    giver, taker = pair
    for _ in range(nixl.LANES + 1):
        talk = Conversation(giver, taker.name)
        assert talk.take(taker, 4096, nbytes=8192) == BYTES[:8192]
        talk.end()
    talk = Conversation(giver, taker.name)
    assert talk.take(taker, 1 << 20) == BYTES
    talk.end()


def test_who_asks_for_another_transport_gets_plain_bytes(pair: tuple[Transport, Transport]) -> None:
    talk = Conversation(pair[0], "carrier pigeon")
    assert talk.ground == b""
    assert talk.take(PlainTcp(), 1 << 20) == BYTES
    talk.end()


def test_more_streams_than_there_is_room_for_come_plain(pair: tuple[Transport, Transport]) -> None:
    giver, taker = pair
    talks = [Conversation(giver, taker.name) for _ in range(nixl.LANES + 1)]
    if taker.name != "tcp":
        assert [bool(talk.ground) for talk in talks] == [True] * nixl.LANES + [False]
    assert talks[-1].take(taker, 1 << 20) == BYTES
    for talk in talks:
        talk.end()


def test_no_ground_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came as the other side's ground is not believed."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    transport = nixl.Nixl(pytest.importorskip("nixl_cu13._api", reason="NIXL is not installed"), "node")
    talk = Conversation(PlainTcp(), "")
    for ground in (b"\xc1", nixl.msgspec.msgpack.encode(nixl.Ground("x", b"no metadata", 0))):
        with pytest.raises(p.PeerError), transport.inlet(talk.channel, ADDRESS, ground):
            pass
    with contextlib.suppress(p.PeerError):
        assert transport.asks(ADDRESS) == ""  # shunned for a while
    talk.end()
    transport.close()
