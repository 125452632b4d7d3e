"""One run on several nodes: each has an agent and some of the ranks, and all share a folder."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerostall
from conftest import stop_agent
from hand import kill_agent, wait_until
from ranks.world import Ranks, Start


class Nodes:
    """Two nodes on one machine: an agent each, and what launchers tell their ranks."""

    def __init__(self, start: Start, folders: list[Path], where: Path) -> None:
        self.node_of = (0, 0, 1)  # by rank
        self._start = start
        self.folders = folders
        self.where = where

    def start(self, *words: object, **options: object) -> Ranks:
        of_rank = {
            rank: {
                "ZEROSTALL_RUNTIME_DIR": str(self.folders[node]),
                "GROUP_RANK": str(node),
                "LOCAL_WORLD_SIZE": str(self.node_of.count(node)),
                "MASTER_ADDR": "127.0.0.1",
            }
            for rank, node in enumerate(self.node_of)
        }
        scenario, *more = words
        return self._start(len(self.node_of), scenario, self.where, *more, of_rank=of_rank, **options)

    def kill(self, ranks: Ranks, node: int) -> None:
        """A node goes: its trainers and its agent, and with it what is in its memory. Then the job's other ranks."""
        for rank, of in enumerate(self.node_of):
            if of == node:
                ranks.rank[rank].signal(signal.SIGKILL)
        kill_agent(self.folders[node])
        ranks.kill()


@pytest.fixture
def nodes(start: Start, tmp_path: Path) -> Iterator[Nodes]:
    folders = [tmp_path / "node0", tmp_path / "node1"]
    yield Nodes(start, folders, tmp_path / "run")
    for folder in folders:
        stop_agent(folder)


def numbers(said: str, word: str) -> list[int]:
    return [int(number) for number in re.findall(rf"^{word} (\d+)\b", said, re.MULTILINE)]


def test_ranks_on_two_nodes_save_one_step_and_the_next_attempt_goes_on(nodes: Nodes) -> None:
    assert all("restored 0 nothing" in said for said in nodes.start("train", 3).wait())
    assert all("restored 3 host" in said and "saved 5" in said for said in nodes.start("train", 2).wait())
    assert [snapshot.step for snapshot in zerostall.snapshots(nodes.where)][-1] == 5
    assert [verdict.problems for verdict in zerostall.verify(nodes.where, 5)] == [()]


def test_whichever_node_goes_all_go_on_from_one_step(nodes: Nodes) -> None:
    reached = 0
    for node in (1, 0):
        ranks = nodes.start("durable", 1_000_000)
        goal = reached + 3
        wait_until(lambda: max(numbers(ranks.said(2), "durable"), default=0) >= goal, 60)
        nodes.kill(ranks, node)
        restored = [numbers(ranks.said(rank), "restored") for rank in range(3)]
        assert restored[0] == restored[1] == restored[2] and restored[0][0] >= reached
        reached = max(max(numbers(ranks.said(rank), "durable")) for rank in range(3))
    for said in nodes.start("durable", reached + 20).wait():
        assert numbers(said, "restored")[0] >= reached and "FAILED" not in said


def test_training_that_loses_a_node_twice_ends_bit_for_bit(nodes: Nodes) -> None:
    """DistributedDataParallel over nodes: what is alike on all is stored once, and put together from all folders."""
    nodes.node_of = (0, 1)  # the sum of three gradients depends on their order, which torch changes after a step
    for attempt, victim in ((0, 1), (1, 0)):  # see ranks/elastic.py
        ranks = nodes.start("resume", environment={"TORCHELASTIC_RESTART_COUNT": str(attempt), "DURABLE": "1"})
        assert ranks.rank[victim].wait() == -signal.SIGKILL, ranks.said(victim)
        nodes.kill(ranks, victim)
    for said in nodes.start("resume", environment={"TORCHELASTIC_RESTART_COUNT": "2"}).wait():
        assert "ended bit for bit" in said
