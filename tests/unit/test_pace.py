"""Steps that all ranks agree on ahead of time, by a clock that the test holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from zerostall.core.roll import Save
from zerostall.trainer.every import Every
from zerostall.trainer.pace import Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pace(*, alone: bool, clock: Callable[[], float]) -> Pace:
    made = Pace(alone=alone, clock=clock)
    made.begin(1)
    return made


def test_a_save_has_one_name_on_all_ranks() -> None:
    one = pace(alone=False, clock=Clock())
    assert [one.next(3), one.next(3), one.next(4)] == [Save(1, 3, 0), Save(1, 3, 1), Save(1, 4, 0)]
    one.begin(2)
    assert one.next(3) == Save(2, 3, 0)
    one.hold(2, 10)
    assert one.held(Save(2, 9)) and not one.held(Save(2, 10)) and not one.held(Save(3, 9))
    one.hold(1, 99)
    assert not one.held(Save(2, 10))


def test_one_process_saves_every_minute() -> None:
    clock = Clock()
    one = pace(alone=True, clock=clock)

    def propose() -> None:
        one.agreed(1, one.ahead(), leave=False)

    due = Every(one, propose, lambda step: None, steps=None, seconds=60, decides=True, clock=clock)
    saved = []
    for step in range(1, 601):
        clock.now += 1.0
        saved += [step] if due(step) else []
    assert len(saved) in (9, 10)  # the last one falls due as the loop ends
    assert all(later - earlier >= 60 for earlier, later in itertools.pairwise(saved))


def test_steps_and_seconds() -> None:
    one = pace(alone=True, clock=Clock())
    due = Every(one, lambda: None, lambda step: None, steps=5, seconds=None, decides=True)
    assert [step for step in range(12) if due(step)] == [0, 5, 10]
    for wrong in ({"steps": 0}, {"seconds": -1.0}, {}):
        with pytest.raises(ValueError, match=r"steps|seconds"):
            Every(one, lambda: None, lambda step: None, **{"steps": None, "seconds": None, **wrong}, decides=True)


@pytest.mark.parametrize(("late", "apart"), [(0, 0), (3, 1), (20, 2)])
def test_ranks_save_the_same_steps_though_only_one_looks_at_the_clock(late: int, apart: int) -> None:
    """News takes `late` steps of 0.01 s, and ranks are up to `apart` steps behind the first."""
    clock = Clock()
    paces = [pace(alone=False, clock=clock) for _ in range(4)]
    news: list[tuple[int, int]] = []
    passed: list[int] = []

    def propose() -> None:
        news.append((round(clock.now * 100) + late, paces[0].ahead()))

    dues = [
        Every(one, propose, passed.append, steps=None, seconds=1.0, decides=rank == 0, clock=clock)
        for rank, one in enumerate(paces)
    ]
    saved: list[list[int]] = [[] for _ in paces]
    for tick in range(1, 3000):
        clock.now += 0.01
        for arrival, step in [one for one in news if one[0] <= round(clock.now * 100)]:
            news.remove((arrival, step))
            for one in paces:
                one.agreed(1, step, leave=False)
        for rank, due in enumerate(dues):
            step = tick - rank * apart % (apart + 1)
            if step > 0 and due(step):
                saved[rank].append(step)
    assert len(saved[0]) > 15
    assert all(other == saved[0] for other in saved[1:])
    assert not passed


def test_who_hears_too_late_says_so_and_the_next_step_is_farther_ahead() -> None:
    clock = Clock()
    one = pace(alone=False, clock=clock)
    passed: list[int] = []
    due = Every(one, lambda: None, passed.append, steps=None, seconds=1e9, decides=True, clock=clock)
    for step in range(1, 5):
        clock.now += 1.0
        due(step)
    before = one.ahead() - 4
    one.agreed(1, 3, leave=False)
    assert not due(5) and passed == [5]
    assert one.ahead() - 5 == 2 * before
    one.agreed(7, 100, leave=False)  # of another epoch
    assert not due(100)


def test_all_leave_after_the_step_that_the_first_said() -> None:
    one = pace(alone=False, clock=Clock())
    one.reach(5)
    one.agreed(1, 8, leave=True)
    one.agreed(1, 6, leave=True)
    assert not one.due(7) and not one.left
    one.reach(8)
    assert one.due(8) and one.left
