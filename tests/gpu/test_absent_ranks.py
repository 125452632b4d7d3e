"""Two ranks of which one is slow, stays away or dies: the other hears so, by number and in bounded time.

NCCL ends a process of which a collective does not end in time (its watchdog, by SIGABRT). No rank that waits for
another in a call of ours may come to that end: exchanges are no collectives. All cases run at once, for most of their
time is waiting; the long form is for machines without CUDA, with gloo, and tells that the test itself is right.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).parent / "absent_job.py"
PATIENCE = {"late": 120}  # seconds without a sign of life; 8 where somebody is to be given up
EXPECTED = {
    "late": {0: "trained on", 1: "trained on"},
    "missing": {0: "bounded WaitTimeoutError", 1: "still alive"},
    "dead": {0: "bounded WaitTimeoutError", 1: None},
    "keeper": {0: None, 1: "bounded AgentError"},
    "saving": {0: "bounded RankError", 1: None},
}
"""What each rank says; None where it dies."""


class Pair:
    """The two ranks of one case."""

    def __init__(self, scenario: str, folder: Path, seconds: int) -> None:
        self.scenario = scenario
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.outputs = [folder / f"said-{rank}" for rank in range(2)]
        self.ranks: list[subprocess.Popen[bytes]] = []
        for rank, output in enumerate(self.outputs):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
            environment |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_ENABLE_MONITORING": "1"}
            environment["ZEROSTALL_RANKS_PATIENCE"] = str(PATIENCE.get(scenario, 8))
            if not torch.cuda.is_available():
                environment["GLOO_SOCKET_IFNAME"] = "lo"
            words = [sys.executable, "-W", "ignore", JOB, scenario, folder / "run", meeting, seconds]
            with output.open("w") as file:
                self.ranks.append(subprocess.Popen(list(map(str, words)), env=environment, stdout=file, stderr=file))

    def check(self) -> None:
        said = [output.read_text(errors="replace") for output in self.outputs]
        for rank, process in enumerate(self.ranks):
            expected = EXPECTED[self.scenario][rank]
            code = process.returncode
            assert code == (0 if expected else -9), f"{self.scenario}, rank {rank} ended with {code}:\n{said[rank]}"
            assert expected is None or (expected in said[rank] and "still alive" in said[rank]), said[rank]
        if self.scenario == "late":
            assert "waiting for rank 1 of 2" in said[0], said[0]
        if self.scenario in ("missing", "dead"):
            assert "nothing has been heard of rank 1 of 2" in said[0], said[0]
        if self.scenario == "saving":
            assert "step 2 is not clean: rank 1" in said[0], said[0]


def absences(folder: Path, seconds: int) -> None:
    pairs = [Pair(scenario, folder / scenario, seconds) for scenario in EXPECTED]
    try:
        for pair in pairs:
            for process in pair.ranks:
                process.wait(240)
        for pair in pairs:
            pair.check()
    finally:
        for process in [process for pair in pairs for process in pair.ranks]:
            process.kill()
            process.wait()


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_is_slow_absent_or_dead_is_told_by_number_and_nobody_is_ended_by_nccl(tmp_path: Path) -> None:
    absences(tmp_path, seconds=20)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_same_with_gloo(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs to do it on")
    absences(tmp_path, seconds=20)
