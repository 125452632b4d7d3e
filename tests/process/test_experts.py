"""Experts that are themselves dealt out over some of the ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import zerostall
from ranks.world import Start

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("fsdp1", marks=pytest.mark.long)])
def test_experts_dealt_out_over_their_own_ranks_are_killed_and_resumed_bit_equal(
    start: Start, tmp_path: Path, kind: str
) -> None:
    where, expected = tmp_path / "run", tmp_path / "expected"
    first = start(4, "mixture", where, expected, kind)
    deadline = time.monotonic() + 120
    while not all("trained" in first.said(rank) for rank in range(4)):
        said = [first.said(rank) for rank in range(4)]
        assert time.monotonic() < deadline and not any(rank.ended() for rank in first.rank), said
        time.sleep(0.01)
    first.kill()
    for said in start(4, "mixture", where, expected, kind).wait():
        assert "restored 2" in said and "equal" in said
    assert zerostall.load(where, 5)["model"]["expert.1.weight"].shape == (131, 7)


def test_an_expert_that_has_a_name_goes_to_whoever_has_that_name_in_any_world(start: Start, tmp_path: Path) -> None:
    expected = tmp_path / "expected"
    expected.mkdir()
    for step, size in enumerate([4, 2, 1]):
        for said in start(size, "mixture_hop", tmp_path / "run", expected).wait():
            assert f"restored {step}" in said
            assert ("the other expert is missed" in said) == (size == 1)
