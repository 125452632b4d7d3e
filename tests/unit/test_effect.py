"""What uploads cost training is measured in its steps, and they go as fast as that allows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerostall.core import effect as effects
from zerostall.core.effect import LEAST_SPEED, Effect, Stretch
from zerostall.flow.governor import Gate, Governor
from zerostall.flow.step_times import StepTimes


def trained(effect: Effect, cost: float, saves: int, *, noise: float = 0.0, seed: int = 1) -> Effect:
    """Uploads every other time, and full speed costs so much of a step."""
    chance = random.Random(seed)
    for save in range(saves):
        share = float(save % 2)
        seconds = 0.2 * (1 + cost * effect.speed * share) * (1 + noise * chance.gauss(0, 1))
        effect = effects.heed(effect, Stretch(seconds, share))
    return effect


def test_what_costs_nothing_goes_at_full_speed() -> None:
    effect = trained(Effect(), 0.0, 100)
    assert effect.speed == 1 and effect.reason == "training's steps take 0.0% longer while a step is uploaded"


@pytest.mark.parametrize(("cost", "speed"), [(0.03, 1 / 2), (0.07, 1 / 4), (0.3, LEAST_SPEED), (9.0, LEAST_SPEED)])
def test_what_costs_much_goes_slower_until_it_does_not(cost: float, speed: float) -> None:
    effect = trained(Effect(), cost, 200)
    assert effect.speed == speed and "of their speed" in trained(Effect(), cost, 6).reason
    assert trained(effect, 0.0, 100).speed == 1  # and when it costs nothing any more


def test_before_it_is_sure_nothing_changes() -> None:
    assert trained(Effect(), 0.5, 5).speed == 1  # too few
    alone = effects.heed(Effect(), Stretch(1.0, 1.0))
    for _ in range(50):
        alone = effects.heed(alone, Stretch(9.0, 1.0))  # nothing to compare with
    assert alone.speed == 1


@given(st.integers(0, 10_000))
def test_steps_that_differ_by_more_than_it_are_no_proof(seed: int) -> None:
    assert trained(Effect(), 0.0, 40, noise=0.003, seed=seed).speed == 1


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(0, 1)), max_size=60))
def test_the_speed_stays_within_bounds(seen: list[tuple[float, float]]) -> None:
    effect = Effect()
    for seconds, share in seen:
        effect = effects.heed(effect, Stretch(seconds, share))
        assert LEAST_SPEED <= effect.speed <= 1 and effect.reason
        assert 0 <= effects.rest(seconds, effect.speed) <= 10


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_stretches_from_save_to_save() -> None:
    clock = Clock()
    times = StepTimes(clock)
    assert times.saved(10, 1000.0) is None
    clock.now += 4
    with times.under_way():
        clock.now += 4
        assert times.saved(14, 1008.0) == Stretch(2.0, 0.5)
        clock.now += 8
    assert times.saved(18, 1016.0) == Stretch(2.0, 1.0)
    clock.now += 8
    assert times.saved(22, 1010.0) is None  # the trainer's clock was set back
    clock.now += 8
    assert times.saved(26, 1018.0) == Stretch(2.0, 0.0)
    times.interrupted()
    assert times.saved(30, 1026.0) is None


def test_a_gate_rests_after_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(Governor())
    rested: list[tuple[float, str]] = []
    monkeypatch.setattr(gate, "_wait", lambda seconds, reason: rested.append((seconds, reason)))
    gate(1)
    assert not any(seconds for seconds, _ in rested)
    said = [gate.heed(Stretch(1.0 + 0.5 * (save % 2), float(save % 2))) for save in range(6)]
    assert said[:-1] == [""] * 5 and "50.0% longer" in said[-1] and "at 50% of their speed" in said[-1]
    rested.clear()
    gate(1)
    assert rested[-1][0] > 0 and rested[-1][1] == said[-1]
