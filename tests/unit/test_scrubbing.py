"""Which image is looked at next, and when."""

from __future__ import annotations

import pytest

from zerostall.core.bandwidth import Traffic
from zerostall.core.scrubbing import BETWEEN, FRESH, SHORTEST_PAUSE, Resident, after, longest_unseen, pause

OLD, NEW = Resident(1.0, "old"), Resident(2.0, "new")


def test_the_image_whose_check_is_the_longest_ago_comes_next() -> None:
    assert longest_unseen([], {}, 11.0) is None
    assert longest_unseen([NEW, OLD], {}, 11.0) == OLD
    assert longest_unseen([NEW, OLD], {"old": 10.0}, 11.0) == NEW
    assert longest_unseen([NEW, OLD], {"old": 10.0, "new": 11.0}, 20.0) == OLD


def test_however_few_and_small_images_are_they_are_not_looked_at_without_end() -> None:
    seen = {"old": 10.0, "new": 11.0}
    assert longest_unseen([NEW, OLD], seen, 10.0 + BETWEEN - 0.1) is None
    assert longest_unseen([NEW, OLD], seen, 10.0 + BETWEEN) == OLD


def test_what_may_rest_is_left_alone_until_its_time_has_come() -> None:
    filed = Resident(1.0, "filed", rest=60.0)
    assert longest_unseen([filed, NEW], {"filed": 10.0, "new": 11.0}, 69.0) == NEW
    assert longest_unseen([filed], {"filed": 10.0}, 69.0) is None
    assert longest_unseen([filed, NEW], {"filed": 10.0, "new": 11.0}, 70.0) == filed
    assert longest_unseen([filed], {}, 0.5) == filed


def test_a_fresh_image_is_left_alone_for_it_was_checked_while_it_was_copied() -> None:
    fresh = Resident(3.0, "fresh", met=10.0)
    assert longest_unseen([fresh], {}, 10.0 + FRESH / 2) is None
    assert longest_unseen([fresh, OLD], {"old": 5.0}, 10.0 + FRESH / 2) == OLD
    assert longest_unseen([fresh, OLD], {"old": 5.0}, 10.0 + FRESH) == fresh


@pytest.mark.parametrize(
    "traffic", [Traffic(restores=1), Traffic(promised=1), Traffic(drains=1)], ids=["restore", "write", "drain"]
)
def test_nothing_is_looked_at_while_the_node_is_busy(traffic: Traffic) -> None:
    assert pause(traffic, 1 << 20).seconds > 0
    assert pause(traffic, 1 << 20).reason


def test_a_rate_of_zero_is_off_and_any_other_is_kept() -> None:
    assert pause(Traffic(), 0).seconds > 0
    assert pause(Traffic(), 1 << 20).seconds == 0
    assert after(16 << 20, 64 << 20) == 0.25
    assert after(1, 64 << 20) == SHORTEST_PAUSE
