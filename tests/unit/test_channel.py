"""Frames, descriptors and what a broken or hostile peer does to a channel."""

from __future__ import annotations

import os
import socket
import struct
import tracemalloc

import pytest

from zerostall import errors
from zerostall.wire import messages as m
from zerostall.wire.channel import MAX_FRAME, Channel, ClosedError


@pytest.fixture
def ends():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    trainer, agent = Channel(left, m.FromAgent), Channel(right, m.FromTrainer)
    yield trainer, agent
    trainer.close()
    agent.close()


def test_messages_arrive_in_order_with_their_descriptors(ends) -> None:
    trainer, agent = ends
    read, write = os.pipe()
    agent.send(m.Granted(slot=1))
    agent.send(m.Leased(id=7, memory=m.Lent(1, 4096), stride=4096, slots=1), write)
    os.close(write)
    received = []
    while len(received) < 2:
        received += trainer.receive()
    assert received[0] == (m.Granted(slot=1), [])
    leased, fds = received[1]
    assert leased.id == 7 and len(fds) == 1
    assert not os.get_inheritable(fds[0])
    os.write(fds[0], b"hello")
    assert os.read(read, 5) == b"hello"
    os.close(fds[0])
    os.close(read)


def test_a_large_message_goes_through_a_slow_reader(ends) -> None:
    trainer, agent = ends
    trainer.socket.setblocking(False)
    layout = os.urandom(5 << 20)
    trainer.send(m.Lease(id=1, layout=layout, slots=3))
    received = []
    while not received:
        received = agent.receive()
        trainer.flush()
    assert received[0][0].layout == layout
    assert trainer.flush()


@pytest.mark.parametrize(
    "junk",
    [
        struct.pack("!IB", MAX_FRAME + 1, 0),
        struct.pack("!IB", 3, 200),
        struct.pack("!IB", 3, 1) + b"abc",
        struct.pack("!IB", 4, 0) + b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["too long", "too many descriptors", "descriptor missing", "not a message", "http"],
)
def test_what_is_no_message_ends_the_connection(ends, junk: bytes) -> None:
    trainer, agent = ends
    trainer.socket.sendall(junk)
    with pytest.raises(ClosedError):
        agent.receive()


def test_a_closed_peer_is_noticed(ends) -> None:
    trainer, agent = ends
    agent.close()
    with pytest.raises(ClosedError):
        trainer.receive()
    with pytest.raises(ClosedError):
        for _ in range(3):
            trainer.send(m.Find(id=1))


def test_a_closed_channel_keeps_nothing_of_half_a_message(ends) -> None:
    trainer, agent = ends
    tracemalloc.start()
    try:
        trainer.socket.sendall(struct.pack("!IB", 100 << 20, 0))
        for _ in range(64):
            trainer.socket.sendall(bytes(1 << 17))
            assert agent.receive() == []
        assert tracemalloc.get_traced_memory()[0] > 8 << 20
        agent.close()  # and somebody, an exception's traceback say, still knows it
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_errors_cross_the_wire_as_themselves() -> None:
    error = errors.StorageError("disk full", errno=28, hint="free some")
    again = m.Refused.of(3, error).error()
    assert type(again) is errors.StorageError
    assert (again.errno, again.hint, again.args[0]) == (28, "free some", "disk full")


def test_an_unknown_kind_of_error_is_not_looked_up() -> None:
    error = m.Refused(id=1, kind="annotations", message="boom").error()
    assert type(error) is errors.AgentError
