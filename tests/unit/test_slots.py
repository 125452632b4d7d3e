"""The slot table: what may be captured into, and what must stay."""

from __future__ import annotations

import pytest

from zerostall.core.slots import Phase, Slots
from zerostall.errors import CapacityError


def seal_next(slots: Slots, step: int) -> int:
    index = slots.grant().index
    assert index is not None
    slots.seal(index, step)
    return index


def test_one_slot_is_refused_since_the_newest_image_would_be_overwritten() -> None:
    with pytest.raises(CapacityError, match="slots=1"):
        Slots(1)


def test_free_slots_come_first_then_the_oldest_image() -> None:
    slots = Slots(3)
    assert [seal_next(slots, step) for step in (10, 9, 100)] == [0, 1, 2]
    grant = slots.grant()
    assert (grant.index, grant.reason) == (1, "replaces step 9")


def test_only_one_slot_is_granted_at_a_time() -> None:
    slots = Slots(3)
    assert slots.grant().index == 0
    assert slots.grant().index is None


def test_the_newest_image_is_never_granted_away() -> None:
    slots = Slots(2)
    seal_next(slots, 1)
    seal_next(slots, 2)
    assert slots.grant().index == 0
    slots.seal(0, 3)
    assert slots.grant().index == 1


@pytest.mark.parametrize("keep", ["hold", "promise", "clean"])
def test_an_image_that_somebody_needs_stays(keep: str) -> None:
    slots = Slots(2)
    old = seal_next(slots, 1)
    seal_next(slots, 2)
    kept = frozenset({1}) if keep == "clean" else frozenset()
    if keep == "hold":
        slots.hold(old)
    elif keep == "promise":
        slots.promise(old)
    assert slots.grant(kept).index is None
    if keep == "hold":
        slots.release(old)
    elif keep == "promise":
        slots.promise(old, False)
    assert slots.grant().index == old


def test_a_discarded_slot_is_granted_again() -> None:
    slots = Slots(2)
    index = slots.grant().index
    assert index is not None
    slots.discard(index)
    assert slots.grant().index == index


def test_the_same_step_again_takes_the_place_of_the_first() -> None:
    slots = Slots(3)
    seal_next(slots, 5)
    second = seal_next(slots, 5)
    assert [slot.index for slot in slots.sealed()] == [second]
    assert slots.table[0].phase is Phase.free


def test_a_claimed_slot_can_be_sealed_and_no_other() -> None:
    slots = Slots(3)
    slots.claim(2)
    slots.seal(2, 7)
    with pytest.raises(ValueError, match="cannot be claimed"):
        slots.claim(2)
    with pytest.raises(ValueError, match="not granted"):
        slots.seal(0, 8)


def test_a_forgotten_image_that_is_being_read_loses_its_name_and_then_its_slot() -> None:
    slots = Slots(3)
    old = seal_next(slots, 5)
    slots.hold(old)
    new = seal_next(slots, 5)  # the same step again, while the first is being written to disk
    found = slots.at_step(5)
    assert found is not None and found.index == new
    assert [slot.index for slot in slots.sealed()] == [new]
    assert slots.table[old].phase is Phase.sealed
    slots.release(old)
    assert slots.table[old].phase is Phase.free


def outdone(count: int = 3) -> Slots:
    """Step 5 was clean, and is saved anew."""
    slots = Slots(count)
    seal_next(slots, 5)
    slots.seal(slots.grant().index or 0, 5, outdo=True)
    return slots


def test_an_outdone_image_is_not_found_and_not_granted() -> None:
    slots = outdone()
    found = slots.at_step(5)
    assert found is not None and found.index == 1 and [slot.index for slot in slots.sealed()] == [1]
    assert seal_next(slots, 6) == 2
    assert slots.grant().index is None  # else nobody could say what became of the one before


@pytest.mark.parametrize("step", [5, 6])
def test_it_makes_room_for_what_is_clean(step: int) -> None:
    slots = outdone(2)
    slots.settle(4)
    assert slots.grant().index is None
    slots.settle(step)
    assert slots.outdone(5) is None and slots.grant().index == 0


def test_it_counts_again_where_the_newer_one_comes_to_nothing() -> None:
    slots = outdone(2)
    restored = slots.restore(5)
    assert restored is not None and restored.index == 0 and slots.at_step(5) is restored
    assert slots.grant().index == 1
    assert slots.restore(6) is None


def test_who_reads_it_reads_on() -> None:
    slots = outdone(2)
    slots.hold(1)
    slots.table[0].readers = 1  # since before
    slots.settle(5)
    assert slots.grant().index is None
    slots.release(0)
    assert slots.grant().index == 0
