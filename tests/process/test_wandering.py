"""A job whose ranks are killed at random moments, and which goes on each time on another number of ranks."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from hand import wait_until
from ranks.world import Ranks, Start

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

WORLDS = [
    (8, "fsdp"),
    (5, "fsdp"),
    (8, "3d"),
    (3, "zero"),
    (6, "2d"),
    (2, "tp"),
    (8, "hsdp"),
    (1, "ddp"),
    (7, "fsdp1"),
    (4, "mixed"),
]
ENDLESS = 1_000_000  # steps


def newest(ranks: Ranks, word: str) -> list[int]:
    """The last number that each rank said after a word."""
    return [
        max(map(int, re.findall(rf"^{word} (\d+)", ranks.said(rank), re.M)), default=-1) for rank in range(ranks.size)
    ]


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_killed_at_random_moments_go_on_in_worlds_of_other_sizes(start: Start, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    where, expected = tmp_path / "run", tmp_path / "expected"
    expected.mkdir()
    known = 0
    for size, kind in WORLDS:
        ranks = start(size, "wander", where, kind, ENDLESS, expected)
        goal = known + 2

        def has_come(ranks: Ranks = ranks, goal: int = goal) -> bool:
            assert not any(child.ended() for child in ranks.rank), [ranks.said(rank) for rank in range(ranks.size)]
            return min(newest(ranks, "clean")) >= goal

        wait_until(has_come, 300)
        assert min(newest(ranks, "restored")) >= known, [ranks.said(rank) for rank in range(size)]
        time.sleep(chance.uniform(0.0, 0.3))
        known = max(newest(ranks, "clean"))
        ranks.rank[chance.randrange(size)].kill()
        ranks.kill()
        print(size, kind, "restored", newest(ranks, "restored"), "clean", known)
    for said in start(8, "wander", where, "fsdp", known + 3, expected).wait():
        assert int(re.findall(r"^restored (\d+)", said, re.M)[0]) >= known
        assert f"clean {known + 3}" in said
