"""Several ranks on one node: one step, one manifest, one restore."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

import zerostall
from conftest import stop_agent
from hand import wait_until
from ranks.world import Start


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "run"


def numbers(said: str, word: str) -> list[int]:
    """The numbers said after a word at the beginning of a line."""
    return [int(number) for number in re.findall(rf"^{word} (\d+)\b", said, re.MULTILINE)]


def steps(where: Path) -> list[int]:
    return [snapshot.step for snapshot in zerostall.snapshots(where)]


def test_ranks_save_one_step_and_the_next_attempt_goes_on(start: Start, where: Path) -> None:
    assert all("restored 0 nothing" in said for said in start(3, "train", where, 3).wait())
    assert steps(where)[-1] == 3
    assert all("restored 3 host" in said and "saved 5" in said for said in start(3, "train", where, 2).wait())
    assert [verdict.problems for verdict in zerostall.verify(where, 5)] == [()]


def test_whichever_rank_dies_all_go_on_from_one_step(start: Start, where: Path) -> None:
    reached = 0
    for attempt, victim in enumerate((1, 2, 0)):
        ranks = start(3, "loop", where, 1_000_000)
        goal = reached + 5
        wait_until(lambda: max(numbers(ranks.said(victim), "reached"), default=0) >= goal, 60)
        ranks.rank[victim].kill()
        ranks.kill()
        restored = [numbers(ranks.said(rank), "restored") for rank in range(3)]
        assert restored[0] == restored[1] == restored[2] and restored[0][0] >= reached
        reached = max(max(numbers(ranks.said(rank), "reached")) for rank in range(3))
    last = start(3, "loop", where, reached + 20).wait()
    for said in last:
        assert numbers(said, "restored")[0] >= reached and "FAILED" not in said
    assert steps(where)[-1] == reached + 20


def test_damage_on_one_rank_moves_all_to_the_step_before(
    start: Start, where: Path, agent_environment: dict[str, str]
) -> None:
    start(2, "train", where, 1).wait()
    start(2, "train", where, 1).wait()
    assert steps(where) == [1, 2]
    stop_agent(Path(agent_environment["ZEROSTALL_RUNTIME_DIR"]))  # what is in memory goes with it
    image = where / "step-000000000002" / "rank-00001.safetensors"
    data = bytearray(image.read_bytes())
    data[-5] ^= 1
    image.write_bytes(data)
    for said in start(2, "train", where, 1).wait():
        assert "restored 1 disk" in said and "saved 2" in said
        assert "step 2 in disk of rank 1 is skipped" in said or "step 2 in disk is skipped" in said
        assert re.search("fails? (its|their) checksum", said), said
    assert [verdict.problems for verdict in zerostall.verify(where, 2)] == [()]


def test_training_that_dies_twice_ends_bit_for_bit_as_if_it_had_not(start: Start, where: Path) -> None:
    """The whole loop: weights, moments, schedule, each rank's place in its data and its random numbers."""
    for attempt, victim in ((0, 1), (1, 0)):  # see ranks/elastic.py
        ranks = start(2, "resume", where, environment={"TORCHELASTIC_RESTART_COUNT": str(attempt)})
        assert ranks.rank[victim].wait() == -signal.SIGKILL, ranks.said(victim)
        ranks.kill()
    went_on = set()
    for said in start(2, "resume", where, environment={"TORCHELASTIC_RESTART_COUNT": "2"}).wait():
        assert "ended bit for bit" in said
        went_on |= set(re.findall(r"goes on from (\d+) (\w*)", said))
    ((step, tier),) = went_on
    assert int(step) >= 11 and tier == "host"  # the step before the one in flight is whole


def test_a_signal_to_one_rank_makes_all_save_one_last_step_and_leave(start: Start, where: Path) -> None:
    ranks = start(3, "preempted", where, 0.005)
    wait_until(lambda: numbers(ranks.said(1), "trained"), 60)
    ranks.rank[1].signal(signal.SIGTERM)
    left = [numbers(said, "left") for said in ranks.wait()]
    assert left[0] == left[1] == left[2]
    assert steps(where) == left[0]
    assert all(f"restored {left[0][0]} host" in said for said in start(3, "train", where, 1).wait())


def test_all_save_by_the_clock_of_one(start: Start, where: Path) -> None:
    said = start(2, "minutely", where).wait()
    saved = [line for one in said for line in one.splitlines() if line.startswith("saved ")]
    assert len(saved) == 2 and saved[0] == saved[1]


def test_what_one_rank_has_otherwise_every_rank_is_told(start: Start, where: Path) -> None:
    for said in start(3, "differ", where).wait():
        assert "refused RankError the ranks' checkpointers differ: rank 1 has slots=4, rank 0 has slots=3" in said
        assert "refused StateError" in said and "bad" in said
    assert "rank-00002.safetensors" in said
