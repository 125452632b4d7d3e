"""What the places of a locker are for."""

from __future__ import annotations

import pytest

from zerostall.core.candidates import Past
from zerostall.core.places import Places

RUNS = ((0, 10),)


def kept(places: Places, step: int) -> int:
    index = places.reserve()
    assert index is not None
    places.drain(index)
    places.keep(index, Past(step, float(step)), RUNS)
    return index


def test_the_newest_image_stays_while_the_next_is_captured_and_drained() -> None:
    places = Places(2)
    first = kept(places, 1)
    granted = places.reserve()
    assert granted not in (first, None)
    assert places.kept() == [Past(1, 1.0)]
    places.drain(granted)  # type: ignore[arg-type]
    assert places.reserve() == first  # rather than let a save go past the vault
    assert places.kept() == []
    places.keep(granted, Past(2, 2.0), RUNS)  # type: ignore[arg-type]
    assert places.kept() == [Past(2, 2.0)]


def test_the_one_that_came_first_goes_first_and_free_ones_before_it() -> None:
    places = Places(3)
    assert [kept(places, 1), kept(places, 2)] == [0, 1]
    assert [places.reserve(), places.reserve(), places.reserve(), places.reserve()] == [2, 0, 1, None]


def test_what_is_read_stays() -> None:
    places = Places(2)
    kept(places, 1)
    kept(places, 2)
    read = places.hold(Past(1, 1.0))
    assert read is not None and (read.index, read.runs) == (0, RUNS)
    assert places.hold(Past(1, 1.5)) is None  # another one of its number
    assert [places.reserve(), places.reserve()] == [1, None]
    places.release(0)
    assert places.reserve() == 0


def test_what_is_worth_nothing_is_forgotten() -> None:
    places = Places(1)
    kept(places, 1)
    places.forget(Past(2, 2.0))
    assert places.kept() == [Past(1, 1.0)]
    places.forget(Past(1, 1.0))
    assert places.kept() == [] and places.reserve() == 0
    places.free(0)
    with pytest.raises(ValueError, match="place 0 is free"):
        places.drain(0)
    assert len(places) == 1
