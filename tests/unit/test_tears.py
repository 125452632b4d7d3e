"""Tears: what counts as one, and from when on nothing does. Time and the places of threads are made up."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from zerostall.core.tears import UNKNOWN, Moment, Place, settled
from zerostall.trainer.tears import Tears, place_of

HERE: Place = ((1, 10), (2, 20))
FARTHER: Place = ((1, 12), (2, 20))


@pytest.mark.parametrize(
    ("now", "final", "why"),
    [
        (Moment(0.5, FARTHER), False, "other thread"),
        (Moment(1.0, HERE), False, "same operation"),
        (Moment(1e6, HERE), False, "same operation"),  # one that lasts, or a process that was stopped meanwhile
        (Moment(1.0, FARTHER), True, "has ended"),
        (Moment(1.0, ((2, 20),)), True, "has ended"),
        (Moment(1.0, None), True, "has ended"),  # and so has the thread
        (Moment(1e6, UNKNOWN), False, "not known"),
    ],
)
def test_when_all_that_was_under_way_has_ended(now: Moment, final: bool, why: str) -> None:
    ruling = settled(Moment(0.0, HERE), now, grace=1.0)
    assert ruling.final == final
    assert why in ruling.reason


class World:
    """What changes, and when."""

    def __init__(self) -> None:
        self.time = 100.0
        self.place: Place | None = HERE
        self.written: list[str] = []
        self.exchanged: list[str] = []
        self.looks = 0
        self.tears = Tears(self.changed, 7, place=lambda thread: self.place, clock=lambda: self.time)

    def changed(self, *, exchanged: bool) -> list[str]:
        self.looks += 1
        return self.written + (self.exchanged if exchanged else [])

    def go_on(self) -> None:
        self.time += 10
        self.place = FARTHER


def test_an_operation_that_was_under_way_is_seen_by_the_second_look() -> None:
    world = World()
    assert world.tears.found() == []
    world.time += 1000
    assert not world.tears.look_again()  # it takes its time
    world.written = ["w"]
    world.go_on()
    assert world.tears.look_again()
    assert world.tears.late == world.tears.late == ["w"]  # until it is told
    assert world.tears.look() == ["w"]
    world.tears.told()
    assert world.tears.late == world.tears.look() == []
    assert world.tears.found() == []  # what was sealed was sealed


def test_what_comes_after_the_second_look_is_no_tear() -> None:
    world = World()
    assert world.tears.found() == []
    world.go_on()
    assert world.tears.look_again()
    world.written = ["w"]
    world.tears.look()
    assert world.tears.look_again()
    assert world.tears.late == []
    assert world.looks == 2


def test_training_that_comes_by_looks_for_the_last_time() -> None:
    world = World()
    assert world.tears.found() == []
    world.written = ["w"]
    assert world.tears.look() == ["w"]
    assert world.tears.final
    world.written = ["w", "v"]
    assert world.tears.look_again()
    assert world.tears.look() == ["w"]  # it has not been told
    world.tears.told()
    assert world.tears.look() == [] == world.tears.late


def test_training_that_is_first_decides_for_the_seal() -> None:
    world = World()
    world.written, world.exchanged = ["w"], ["v"]
    world.tears.look()
    world.written = []
    assert world.tears.found() == ["w", "v"]
    assert world.tears.late == []


def test_memory_that_is_exchanged_after_it_was_read_is_no_tear() -> None:
    world = World()
    assert world.tears.found() == []
    world.exchanged = ["w"]
    world.tears.look()
    assert world.tears.late == []


def test_nothing_is_final_before_everything_has_been_read() -> None:
    world = World()
    world.go_on()
    assert not world.tears.look_again()
    assert world.looks == 0


def test_where_the_place_was_not_known_a_later_one_counts() -> None:
    world = World()
    world.place = UNKNOWN
    assert world.tears.found() == []
    world.time += 10
    assert not world.tears.look_again()
    world.place = HERE
    assert not world.tears.look_again()
    world.time += 10
    assert not world.tears.look_again()  # it may be in the operation that was under way at first
    world.written = ["w"]
    world.go_on()
    assert world.tears.look_again()
    assert world.tears.late == ["w"]


def test_what_is_no_frame_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 once gave a function for a frame's caller."""
    frame = SimpleNamespace(f_code=place_of.__code__, f_lasti=0, f_back=place_of)
    monkeypatch.setattr(sys, "_current_frames", lambda: {7: frame})
    assert place_of(7) == UNKNOWN


def test_a_place_is_that_of_every_frame() -> None:
    me = threading.get_ident()

    def within(depth: int) -> Iterator[Place | None]:
        if depth:
            yield from within(depth - 1)
        else:
            yield place_of(me)

    places = [next(within(depth)) for depth in range(3)]
    assert [len(place or ()) - len(places[0] or ()) for place in places] == [0, 1, 2]


def test_the_place_of_a_thread_stays_while_it_waits_and_changes_when_it_goes_on() -> None:
    first, second = threading.Event(), threading.Event()
    reached = [threading.Event(), threading.Event()]

    def walk() -> None:
        reached[0].set()
        first.wait(60)
        reached[1].set()
        second.wait(60)

    thread = threading.Thread(target=walk)
    thread.start()
    assert thread.ident is not None
    assert reached[0].wait(60)
    within = {place_of(thread.ident) for _ in range(100)}
    while len(within) > 1:  # it was still on its way to where it waits
        within = {place_of(thread.ident) for _ in range(100)}
    first.set()
    assert reached[1].wait(60)
    assert place_of(thread.ident) not in within
    second.set()
    thread.join(60)
    assert place_of(thread.ident) is None
