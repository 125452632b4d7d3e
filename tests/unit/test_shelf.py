"""The slot that is this trainer's: granted, taken, answered for, whoever looks in between."""

from __future__ import annotations

import threading

import pytest

from zerostall.core import layout as layouts
from zerostall.native import Segment
from zerostall.trainer.memory import Memory, Shelf
from zerostall.wire import messages as m


@pytest.fixture
def shelf() -> Shelf:
    shelf = Shelf(threading.Condition())
    layout = layouts.build([layouts.Shard("w", "float32", (4,), (4,), (0,))])
    shelf.leased()
    shelf.install(Memory(layout, b"", Segment("test", 3 << 16), stride=1 << 16, slots=3))
    return shelf


def busy_slot(shelf: Shelf) -> int | None:
    adoption = shelf.adoption()
    assert adoption is not None
    return adoption[0].busy_slot


def ready(shelf: Shelf) -> bool:
    with shelf._condition:
        return shelf.ready()


def test_a_slot_is_taken_once_for_each_grant(shelf: Shelf) -> None:
    assert shelf.take() is None and not ready(shelf) and busy_slot(shelf) is None
    shelf.grant(m.Granted(slot=2, number=1))
    assert ready(shelf) and busy_slot(shelf) == 2
    assert shelf.take() == 2
    assert shelf.take() is None and not ready(shelf)
    assert busy_slot(shelf) == 2  # an agent that takes over leaves it alone


def test_what_is_answered_for_is_no_longer_this_trainers(shelf: Shelf) -> None:
    shelf.grant(m.Granted(slot=0, number=7))
    assert shelf.discarded(0) == 0  # nothing was captured there
    assert shelf.take() == 0
    assert shelf.discarded(1) == 0
    assert shelf.discarded(0) == 7
    assert shelf.discarded(0) == 0
    assert shelf.take() is None and busy_slot(shelf) is None
    shelf.grant(m.Granted(slot=0, number=8))
    assert shelf.take() == 0 and shelf.discarded(0) == 8


def test_a_slot_that_was_not_used_can_be_taken_again(shelf: Shelf) -> None:
    shelf.take_back()
    assert shelf.take() is None
    shelf.grant(m.Granted(slot=1, number=1))
    assert shelf.take() == 1
    shelf.put_back(1)
    assert shelf.take() == 1
    shelf.take_back()  # Ctrl-C came before anybody had heard of it
    assert shelf.take() == 1
    assert shelf.discarded(1) == 1
    shelf.take_back()
    assert shelf.take() is None


def test_grants_that_come_while_slots_are_asked_for_are_taken_once_each(shelf: Shelf) -> None:
    answered = threading.Semaphore()

    def grant() -> None:
        for number in range(1, 101):
            assert answered.acquire(timeout=60)
            shelf.grant(m.Granted(slot=number % 3, number=number))

    granting = threading.Thread(target=grant)
    granting.start()
    taken = []
    while len(taken) < 100 and (granting.is_alive() or ready(shelf)):
        if (slot := shelf.take()) is not None:
            taken.append((slot, shelf.discarded(slot)))
            answered.release()
    granting.join(60)
    assert taken == [(number % 3, number) for number in range(1, 101)]
