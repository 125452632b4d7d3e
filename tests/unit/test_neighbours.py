"""Ratios of neighbours: a disk that swings moves both, and the interval is the sign test's."""

from __future__ import annotations

import random

import pytest

from zerostall.core.neighbours import share


def test_what_slows_both_of_a_pair_does_not_move_the_share() -> None:
    pace = [1.0, 1.0, 3.0, 1.0, 5.0, 2.0, 1.0]
    found = share([0.9 * slow for slow in pace], pace)
    assert (found.median, found.low, found.high) == pytest.approx((0.9, 0.9, 0.9))
    assert str(found) == "90 % (90 to 90)"


@pytest.mark.parametrize(("count", "aside"), [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (15, 3), (25, 7)])
def test_the_interval_is_that_of_the_sign_test(count: int, aside: int) -> None:
    """From tables: the smallest sample of six holds the median with 97 %, of 15 the fourth to the twelfth with 96 %."""
    ratios = list(range(1, count + 1))
    found = share(ratios, [1.0] * count)
    assert (found.low, found.high) == (aside + 1, count - aside)


def test_it_holds_the_median_as_often_as_it_says() -> None:
    chance = random.Random(4)
    held = sum(
        found.low <= 1.0 <= found.high
        for found in (share([chance.lognormvariate(0, 0.3) for _ in range(21)], [1.0] * 21) for _ in range(600))
    )
    assert 0.94 * 600 < held < 600
