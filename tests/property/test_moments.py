"""A clock that is set forward and back: moments rise, and between saves so much passes as did."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerostall.core.moments import moment
from zerostall.core.retention import Keep, StepFacts, decide

YEAR = 365 * 86400.0
clocks = st.floats(-YEAR, YEAR)


@given(st.lists(st.tuples(clocks, st.floats(0, 1e5)), min_size=1, max_size=20))
def test_moments_rise_whatever_the_clock_does(jumps: list[tuple[float, float]]) -> None:
    latest, real = 1.8e9, 1.8e9
    for ahead, passed in jumps:
        real += passed
        now = moment(real + ahead, latest, passed)
        assert now > latest
        assert now == real + ahead or now - latest <= passed + 1e-6
        latest = now


def test_one_save_by_a_clock_far_ahead_does_not_keep_all_that_come_after_it() -> None:
    hour, latest, facts = 3600.0, 0.0, list[StepFacts]()
    for step in range(1, 30):
        ahead = YEAR if step == 10 else 0.0
        latest = moment(1.8e9 + step * hour + ahead, latest, hour)
        facts.append(StepFacts(step, created=latest))
    gone = decide(facts, Keep(last=1, within="5h")).evict
    assert gone == tuple(range(1, 24))


def test_the_clock_is_believed_again_once_it_is_past_what_was_said() -> None:
    assert moment(100.0, 50.0, 1.0) == 100.0
    assert moment(50.0, 100.0, 1.0) == 101.0
    assert moment(50.0, 100.0, 0.0) > 100.0
    assert moment(101.5, 101.0, 9.0) == 101.5
