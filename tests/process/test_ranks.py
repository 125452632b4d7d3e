"""Several ranks on one node: one step, one manifest, one restore."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zerostall
from crash.nursery import Nursery
from ranks.world import Ranks

Start = Callable[..., Ranks]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("rank", os.environ)
    yield nursery
    nursery.close()


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path, agent_environment: dict[str, str]) -> Iterator[Start]:
    """Starts the ranks of one attempt after another, on one node."""
    started: list[Ranks] = []

    def start(size: int, scenario: str, *words: object, environment: dict[str, str] | None = None, **options) -> Ranks:
        everybody = {**agent_environment, **(environment or {})}
        started.append(Ranks(nursery, tmp_path, everybody, size, scenario, *words, **options))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "run"


def steps(where: Path) -> list[int]:
    return [snapshot.step for snapshot in zerostall.snapshots(where)]


def test_ranks_save_one_step_and_the_next_attempt_goes_on(start: Start, where: Path) -> None:
    assert all("restored 0 nothing" in said for said in start(3, "train", where, 3).wait())
    assert steps(where)[-1] == 3
    assert all("restored 3 host" in said and "saved 5" in said for said in start(3, "train", where, 2).wait())
    assert [verdict.problems for verdict in zerostall.verify(where, 5)] == [()]


def test_what_one_rank_has_otherwise_every_rank_is_told(start: Start, where: Path) -> None:
    for said in start(3, "differ", where).wait():
        assert "refused RankError the ranks' checkpointers differ: rank 1 has slots=4, rank 0 has slots=3" in said
        assert "refused StateError" in said and "bad" in said
    assert "rank-00002.safetensors" in said
