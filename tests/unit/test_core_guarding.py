"""Which policy "auto" chooses, by what was measured."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from zerostall.core.guarding import LEAST, Facts, choose

# An H200 with 8.5 GB of state, and a step that is too short to read it.
LATE = Facts(nbytes=8_520_000_000, drain_seconds=0.157, free_seconds=0.1, spare_bytes=8 << 30, flips=True)


def test_nothing_is_moved_before_something_is_measured() -> None:
    for missing in ({"drain_seconds": None}, {"free_seconds": None}):
        choice = choose(dataclasses.replace(LATE, **missing))
        assert choice.policy == "overlap" and "nothing has been measured" in choice.reason and choice.nbytes == 0


def test_what_fits_is_left_alone() -> None:
    choice = choose(dataclasses.replace(LATE, free_seconds=0.25))
    assert choice.policy == "overlap"
    assert choice.reason == "reading takes 0.157 s and the optimizer comes after 0.25 s: nothing is left"
    assert choose(dataclasses.replace(LATE, free_seconds=0.16)).policy == "flip", "it fits by too little"


def test_moments_flip_where_they_can() -> None:
    choice = choose(LATE)
    assert choice.policy == "flip" and choice.nbytes == LATE.spare_bytes
    assert choice.reason == (
        "about 3.59 GB of 8.52 GB are not read yet when the optimizer comes; moments stay where they are"
    )


def test_other_optimizers_freeze_as_far_as_there_is_memory() -> None:
    other = dataclasses.replace(LATE, flips=False)
    assert choose(other).policy == "freeze" and "there is memory to put them aside" in choose(other).reason
    tight = choose(dataclasses.replace(other, spare_bytes=1 << 30))
    assert (tight.policy, tight.nbytes) == ("freeze", 1 << 30) and "1.07 GB of them can be put aside" in tight.reason
    none = choose(dataclasses.replace(other, spare_bytes=LEAST - 1))
    assert (none.policy, none.nbytes) == ("overlap", 0) and "no memory" in none.reason


@given(
    st.builds(
        Facts,
        nbytes=st.integers(0, 1 << 45),
        drain_seconds=st.none() | st.floats(0, 1e6),
        free_seconds=st.none() | st.floats(0, 1e6),
        spare_bytes=st.integers(0, 1 << 45),
        flips=st.booleans(),
    )
)
def test_every_choice_has_a_reason_and_takes_no_more_than_there_is(facts: Facts) -> None:
    choice = choose(facts)
    assert choice.reason and 0 <= choice.nbytes <= facts.spare_bytes
    assert (choice.policy == "overlap") == (choice.nbytes == 0)
    assert facts.flips or choice.policy != "flip"
