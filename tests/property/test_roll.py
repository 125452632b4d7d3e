"""Ranks that run short of slots at random: what is called clean is whole, and saves do get through."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerostall.core.roll import News, Roll, Save


class Rank:
    """Saves every step. Hears what it is told some steps late; a slot is busy until what is in it is decided."""

    def __init__(self, number: int, slots: int) -> None:
        self.number = number
        self.free = slots
        self.hold = 0
        self.step = 0
        self.told: deque[tuple[int, object]] = deque()
        self.sealed: set[Save] = set()

    def hear(self) -> None:
        while self.told and self.told[0][0] <= self.step:
            match self.told.popleft()[1]:
                case int(hold):
                    self.hold = max(self.hold, hold)
                case Save() as save if save in self.sealed:
                    self.sealed.discard(save)
                    self.free += 1


@pytest.mark.parametrize(("holds", "through"), [(True, True), (False, False)])
@pytest.mark.parametrize("late", [2, 3, 5, 9])
def test_ranks_that_skip_in_turns_are_brought_together(holds: bool, through: bool, late: int) -> None:
    """One slot each, and news takes `late` steps. One has its slot half of that time after the other."""
    roll = Roll(2)
    ranks = [Rank(0, 1), Rank(1, 0)]
    ranks[1].told.append((1 + late // 2, Save(1, 0)))
    ranks[1].sealed.add(Save(1, 0))
    clean: list[Save] = []
    for step in range(1, 300):
        for rank in ranks:
            rank.step = step
            rank.hear()
            save = Save(1, step)
            if rank.step < rank.hold or rank.free == 0:
                news = roll.passed(rank.number, save, "busy", skipped=True)
            else:
                rank.free -= 1
                rank.sealed.add(save)
                news = roll.sealed(rank.number, save, 0.0)
            clean.extend(news.clean)
            for hears in ranks:
                hears.told.extend((step + late, one) for one in [*news.clean, *(one.save for one in news.spoiled)])
                if news.hold and holds:
                    hears.told.append((step + late, news.hold))
    assert bool(clean) is through
    assert not through or len(clean) > 200 // (3 * late)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    world=st.integers(2, 5),
    slots=st.integers(1, 3),
    delay=st.integers(0, 6),
    apart=st.integers(0, 3),
)
def test_saves_get_through_however_late_ranks_hear_of_them(
    seed: int, world: int, slots: int, delay: int, apart: int
) -> None:
    chance = random.Random(seed)
    roll = Roll(world)
    ranks = [Rank(number, slots) for number in range(world)]
    clean: list[Save] = []
    sealed: dict[Save, set[int]] = {}

    def tell(news: News) -> None:
        for save in news.clean:
            assert sealed[save] == set(range(world))
            clean.append(save)
        for rank in ranks:
            for save in [*news.clean, *(one.save for one in news.spoiled)]:
                rank.told.append((rank.step + chance.randint(0, delay), save))
            if news.hold:
                rank.told.append((rank.step + chance.randint(0, delay), news.hold))
            rank.told = deque(sorted(rank.told, key=lambda told: told[0]))

    for _ in range(400 * world):
        slowest = min(rank.step for rank in ranks)
        rank = chance.choice([rank for rank in ranks if rank.step <= slowest + apart])
        rank.step += 1
        rank.hear()
        save = Save(1, rank.step)
        if rank.step < rank.hold or rank.free == 0:
            tell(roll.passed(rank.number, save, "busy", skipped=True))
        else:
            rank.free -= 1
            rank.sealed.add(save)
            sealed.setdefault(save, set()).add(rank.number)
            tell(roll.sealed(rank.number, save, 0.0))
    assert len(clean) >= 3, (len(clean), roll)
    assert not {one for one in clean if one in roll.pending()}
