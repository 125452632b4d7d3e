"""Decisions: what holds whatever the steps, copies and names are."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hypothesis import given
from hypothesis import strategies as st

from zerostall.core import candidates, matching, retention
from zerostall.core.candidates import TIERS, Copy
from zerostall.core.retention import Keep, StepFacts

STEPS = st.lists(
    st.builds(StepFacts, st.integers(0, 60), st.none() | st.floats(), st.booleans(), st.integers(0, 99).map(float)),
    unique_by=lambda fact: fact.step,
    max_size=15,
)
COUNTS = st.integers(1, 6)
WITHIN = st.none() | st.integers(0, 99).map(float)
KEEPS = st.builds(Keep, COUNTS, st.none() | COUNTS, st.none() | COUNTS, st.sampled_from(["min", "max"]), WITHIN)
PROTECTED = st.frozensets(st.integers(0, 60), max_size=4)


@given(STEPS, KEEPS, PROTECTED, STEPS)
def test_retention_never_takes_what_it_must_not(
    steps: list[StepFacts], keep: Keep, protected: frozenset[int], rewound: list[StepFacts]
):
    decision = retention.decide(steps, keep, protected, rewound=rewound)
    numbers = sorted(fact.step for fact in steps)
    stays = set(numbers) - set(decision.evict)
    assert stays >= set(numbers[-keep.last :])
    assert stays >= {fact.step for fact in steps if fact.pinned}
    assert stays >= protected.intersection(numbers)
    assert keep.every is None or stays >= {step for step in numbers if step % keep.every == 0}
    if keep.seconds is not None and steps:
        newest = max(steps, key=lambda fact: fact.step)
        young = {fact.step for fact in steps if newest.created - fact.created <= keep.seconds}
        assert stays >= young
        if keep.every is None and keep.best is None:  # nothing stays for longer without a reason of its own
            pinned = {fact.step for fact in steps if fact.pinned}
            assert stays == young | set(numbers[-keep.last :]) | pinned | protected.intersection(numbers)
    assert list(decision.evict) == sorted(decision.evict)
    assert set(decision.reasons) == set(numbers)
    kept_aside = {fact.step for fact in rewound} - set(decision.forget)
    assert kept_aside >= {fact.step for fact in rewound if fact.pinned or fact.step in protected}
    if len(steps) >= keep.last:
        assert kept_aside == {fact.step for fact in rewound if fact.pinned or fact.step in protected}
    assert set(decision.forget_reasons) == {fact.step for fact in rewound}


@given(STEPS, KEEPS, PROTECTED)
def test_retention_is_done_after_one_round(steps: list[StepFacts], keep: Keep, protected: frozenset[int]):
    decision = retention.decide(steps, keep, protected)
    assert retention.decide(reversed(steps), keep, protected) == decision
    left = [fact for fact in steps if fact.step not in decision.evict]
    assert retention.decide(left, keep, protected).evict == ()


COPIES = st.lists(st.builds(Copy, st.integers(0, 5), st.sampled_from(TIERS), st.booleans()), max_size=12)


@given(COPIES, st.none() | st.integers(0, 5))
def test_candidates_are_in_order_and_complete(copies: list[Copy], step: int | None):
    order = candidates.order(copies, step)
    keys = [(-copy.step, TIERS.index(copy.tier)) for copy in order.ordered]
    assert keys == sorted(keys)
    eligible = [copy for copy in copies if step is None or copy.step == step]
    assert len(order.ordered) + len(order.left_out) == len(eligible)
    assert all(copy.clean and copy in eligible for copy in order.ordered)


NAMES = st.text("ab.", min_size=1, max_size=5)
SIDES = st.dictionaries(NAMES, st.tuples(st.sampled_from(["int8", "int16"]), st.tuples(st.integers(0, 1))), max_size=8)


@given(SIDES, SIDES)
def test_matching_leaves_nothing_unsaid(stored: dict[str, matching.Facts], wanted: dict[str, matching.Facts]):
    found = matching.match(stored, wanted, strict=False)
    assert {name for _, name in found.pairs} | set(found.missing) == set(wanted)
    assert {name for name, _ in found.pairs} | set(found.unexpected) == set(stored)
    assert set(found.different) == {name for name in wanted if name in stored and stored[name] != wanted[name]}


@given(st.text("ab.*?", max_size=8), NAMES)
def test_globs_are_those_of_the_shell_with_all_below(glob: str, name: str):
    above = [name[:end] for end, character in enumerate(name) if character == "."]
    assert matching.select(glob).takes(name) == any(fnmatchcase(one, glob) for one in (name, *above))
