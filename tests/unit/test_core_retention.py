"""Retention and candidates: what goes, what stays, what is tried first."""

from __future__ import annotations

import math

import pytest

from zerostall.core import candidates, retention
from zerostall.core.candidates import Copy
from zerostall.core.retention import Keep, StepFacts


def facts(*steps: int) -> list[StepFacts]:
    return [StepFacts(step) for step in steps]


@pytest.mark.parametrize(
    ("steps", "keep", "evict"),
    [
        ((), Keep(), ()),
        ((5,), Keep(last=1), ()),
        ((8, 9, 10, 99, 100, 9900, 10000), Keep(last=3), (8, 9, 10, 99)),
        ((9900, 10000), Keep(last=1), (9900,)),
        ((10000, 9900), Keep(last=1), (9900,)),
        ((0, 10, 20, 25), Keep(last=1, every=20), (10,)),
        ((1, 2, 3), Keep(last=7), ()),
    ],
)
def test_the_newest_stay(steps: tuple[int, ...], keep: Keep, evict: tuple[int, ...]):
    decision = retention.decide(facts(*steps), keep)
    assert decision.evict == evict
    assert set(decision.reasons) == set(steps)


def test_every_step_has_a_reason():
    steps = [
        StepFacts(0),
        StepFacts(10, 0.5),
        StepFacts(15, 0.1, pinned=True),
        StepFacts(17),
        StepFacts(25),
        StepFacts(30),
    ]
    decision = retention.decide(steps, Keep(last=2, every=10, best=1), frozenset({17}))
    assert decision.evict == ()
    assert decision.reasons == {
        0: "a multiple of 10",
        10: "a multiple of 10",
        15: "pinned",
        17: "in use",
        25: "among the last 2",
        30: "the newest",
    }
    assert "last=1" in retention.decide(facts(1, 2), Keep(last=1)).reasons[1]


@pytest.mark.parametrize(("mode", "stays"), [("min", {3, 4, 5}), ("max", {1, 5})])
def test_the_best_stay(mode: str, stays: set[int]):
    steps = [
        StepFacts(1, 9.0),
        StepFacts(2, math.nan),
        StepFacts(3, 1.0),
        StepFacts(4, 1.0),
        StepFacts(5, 5.0),
    ]
    keep = Keep(last=1, best=2 if mode == "min" else 1, mode=mode)  # type: ignore[arg-type]
    decision = retention.decide(steps, keep)
    assert set(decision.evict) == {1, 2, 3, 4, 5} - stays


def test_of_equals_the_newer_is_better():
    steps = [StepFacts(1, 1.0), StepFacts(2, 1.0), StepFacts(3)]
    assert retention.decide(steps, Keep(last=1, best=1)).evict == (1,)


def test_infinite_metrics_have_their_place():
    steps = [StepFacts(1, math.inf), StepFacts(2, -math.inf), StepFacts(3)]
    assert retention.decide(steps, Keep(last=1, best=1)).evict == (1,)
    assert retention.decide(steps, Keep(last=1, best=1, mode="max")).evict == (2,)


def test_how_long_counts_from_the_newest_step():
    steps = [StepFacts(step, created=1e9 + hour * 3600.0) for step, hour in ((1, 0), (2, 30), (3, 41.9), (4, 54))]
    assert retention.decide(steps, Keep(last=1, within="1d")).evict == (1,)
    assert retention.decide(steps, Keep(last=1, within="12h")).evict == (1, 2, 3)
    assert retention.decide(steps, Keep(last=1, within=24.1 * 3600)).evict == (1,)
    assert retention.decide(steps, Keep(last=3, within=0.0)).evict == (1,)
    kept = retention.decide(steps, Keep(last=1, within="1d"))
    assert kept.reasons[2] == "saved within 1d of the newest" and "within=1d" in kept.reasons[1]
    for seconds, text in ((86400.0, "1d"), (7200, "2h"), (90.0, "90s"), (120, "2m"), ("36h", "36h"), (0.5, "0.5s")):
        assert f"within={text}" in Keep(within=seconds).words()
    unknown = [StepFacts(1), StepFacts(2, created=1e9)]
    assert retention.decide(unknown, Keep(last=1, within="1d")).evict == (1,)
    for odd in ("a while", -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="within"):
            Keep(within=odd)


@pytest.mark.parametrize("odd", [0, -1, True, 1.5, "3", None])
def test_what_keeps_nothing_is_refused(odd: int):
    with pytest.raises(ValueError, match="last"):
        Keep(last=odd)
    if odd is not None:
        with pytest.raises(ValueError, match="every"):
            Keep(every=odd)
        with pytest.raises(ValueError, match="best"):
            Keep(best=odd)
    with pytest.raises(ValueError, match="mode"):
        Keep(mode="most")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="twice"):
        retention.decide(facts(1, 1), Keep())


@pytest.mark.parametrize(
    ("steps", "rewound", "forget"),
    [
        ((400,), (5000,), ()),
        ((400, 500), (4000, 5000), (4000,)),
        ((400, 500, 600), (4000, 5000), (4000, 5000)),
        ((), (1, 2, 3, 4), (1,)),
        ((400, 500, 600), (500,), (500,)),
    ],
)
def test_steps_set_aside_go_first(steps: tuple[int, ...], rewound: tuple[int, ...], forget: tuple[int, ...]):
    decision = retention.decide(facts(*steps), Keep(last=3), rewound=facts(*rewound))
    assert decision.evict == ()
    assert decision.forget == forget
    assert set(decision.forget_reasons) == set(rewound)


def test_steps_set_aside_stay_while_pinned_or_in_use():
    aside = [StepFacts(7, pinned=True), StepFacts(8), StepFacts(9)]
    decision = retention.decide(facts(1, 2), Keep(last=1), frozenset({9}), rewound=aside)
    assert decision.evict == (1,) and decision.forget == (8,)


def test_candidates_are_the_newest_and_nearest_first():
    copies = [
        Copy(5, "disk"),
        Copy(7, "remote"),
        Copy(7, "host"),
        Copy(7, "disk", clean=False, reason="rank 3 is missing"),
        Copy(6, "disk"),
    ]
    order = candidates.order(copies)
    assert [(copy.step, copy.tier) for copy in order.ordered] == [
        (7, "host"),
        (7, "remote"),
        (6, "disk"),
        (5, "disk"),
    ]
    assert order.left_out == (("step 7 in disk", "rank 3 is missing"),)


def test_a_step_that_is_asked_for_is_the_only_one():
    copies = [Copy(5, "disk"), Copy(7, "host"), Copy(6, "disk", clean=False), Copy(0, "disk")]
    assert candidates.order(copies, 5).ordered == (Copy(5, "disk"),)
    assert candidates.order(copies, 0).ordered == (Copy(0, "disk"),)
    assert candidates.order(copies, 6) == candidates.Order((), (("step 6 in disk", "not clean"),))
    assert candidates.order(copies, 8) == candidates.Order((), ())


def test_an_unknown_tier_is_refused():
    with pytest.raises(ValueError, match="tape"):
        candidates.order([Copy(1, "tape")])


def test_all_ranks_restore_the_newest_step_that_each_of_them_can_get():
    def copy(step: int, tier: str, created: float = 0.0, **more) -> Copy:
        return Copy(step, tier, created=created or float(step), **more)

    everybody = [copy(3, "disk"), copy(4, "disk"), copy(5, "host")]
    ranks = [
        [*everybody, copy(6, "host")],
        everybody,
        [copy(3, "disk"), copy(4, "host"), copy(5, "host", clean=False, reason="torn"), copy(5, "disk", 4.5)],
    ]
    common = candidates.common(ranks)
    assert [past.step for past in common.ordered] == [4, 3]
    assert common.left_out == (
        ("step 5 in host of rank 2", "torn"),
        ("step 6", "2 ranks, rank 1 the first, cannot get it"),
        ("step 5", "rank 2 cannot get it"),
        ("step 5", "2 ranks, rank 0 the first, cannot get it"),
    )
    assert [(past.step, past.created) for past in common.seen] == [(3, 3.0), (4, 4.0), (5, 4.5), (5, 5.0), (6, 6.0)]
    assert candidates.common(ranks, 3).ordered == (candidates.Past(3, 3.0),)
    assert candidates.common([[], everybody]).ordered == ()
    assert candidates.common([everybody]).ordered[0].step == 5
    assert candidates.common([[copy(5, "disk", 4.5), copy(5, "host")]]).ordered[0].created == 5.0
