"""A trainer whose connection ended: gone at once, waited for, or given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerostall.agent.away import RETURN_SECONDS, Away


class Bench:
    """One rank, of which the process lives until it is said to be dead."""

    def __init__(self) -> None:
        self.berth = SimpleNamespace(client=None)
        self.lives = True
        self.ended: list[tuple[int, str]] = []
        berths: Any = {3: self.berth}
        self.away = Away(berths, lambda rank, reason: self.ended.append((rank, reason)), lambda pid: self.lives)

    def part(self, *, leaving: bool = False) -> None:
        client: Any = SimpleNamespace(pid=77, leaving=leaving)
        self.away.parted(3, client, 100.0)


@pytest.mark.parametrize("leaving", [False, True])
def test_one_that_says_so_or_has_ended_is_gone_at_once(leaving: bool) -> None:
    bench = Bench()
    bench.lives = leaving
    bench.part(leaving=leaving)
    assert bench.ended == [(3, "its trainer, process 77, has ended")] and bench.away.look_in() is None


def test_one_that_comes_back_was_never_gone() -> None:
    bench = Bench()
    bench.part()
    bench.away.look(100.0 + RETURN_SECONDS / 2)
    assert bench.ended == [] and bench.away.look_in()
    bench.berth.client = object()
    bench.away.look(200.0 + RETURN_SECONDS)
    assert bench.ended == [] and bench.away.look_in() is None


def test_one_that_ends_meanwhile_or_stays_away_is_given_up_once() -> None:
    for lives, word, later in ((False, "has ended", 0.1), (True, "did not come back", RETURN_SECONDS)):
        bench = Bench()
        bench.part()
        bench.lives = lives
        for _ in range(2):
            bench.away.look(100.0 + later)
        ((rank, reason),) = bench.ended
        assert rank == 3 and word in reason
