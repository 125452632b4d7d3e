"""Two GPUs and NCCL: a rank is killed at some moment, all go on from memory, and the end is the same bit for bit.

`ZEROSTALL_TEST_PARAMETERS` is the size of the net (1.3 billion; 300 million where there are twenty kills). The long
form, of twenty kills, is also for machines without CUDA: with gloo. The ranks of the next attempt are ready before
those of one are killed, as a launcher's spare workers are: what is tried begins when they meet.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hand import wait_until

JOB = Path(__file__).parent / "ranks_job.py"
WORLD = 2
ENDLESS = 1_000_000  # steps
MORE = 20  # steps, after the last kill


class Attempt:
    """The ranks of one attempt."""

    def __init__(self, way: str, folder: Path, number: int, steps: int, parameters: int) -> None:
        meeting = folder / f"meeting-{number}"
        self.outputs = [folder / f"said-{number}-{rank}" for rank in range(WORLD)]
        self.ranks = []
        for rank, output in enumerate(self.outputs):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
            environment |= {"PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1"}
            # An agent that has left has what it had on disk alone: it must not, however slowly ranks start here.
            environment["ZEROSTALL_AGENT_IDLE"] = "300"
            if not torch.cuda.is_available():
                environment["GLOO_SOCKET_IFNAME"] = "lo"
            words = [sys.executable, "-W", "ignore", JOB, way, folder / "run", meeting, steps, parameters]
            with output.open("w") as file:
                process = subprocess.Popen(
                    list(map(str, words)), env=environment, stdin=subprocess.PIPE, stdout=file, stderr=file
                )
            self.ranks.append(process)

    def begin(self) -> None:
        """All ranks are ready, and meet."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.close()

    def said(self, rank: int) -> str:
        return self.outputs[rank].read_text(errors="replace")

    def newest(self, rank: int, word: str) -> int:
        """The last number said after a word; an error where the rank has ended before it said one."""
        code = self.ranks[rank].poll()
        assert code in (None, 0), f"rank {rank} ended with {code}:\n{self.said(rank)}"
        return max(map(int, re.findall(rf"^{word} (\d+)", self.said(rank), re.MULTILINE)), default=-1)

    def kill(self, rank: int) -> None:
        """That rank, then the others, as a launcher does."""
        for process in [self.ranks[rank], *self.ranks]:
            process.send_signal(signal.SIGKILL)
            process.wait()


def kill_and_go_on(way: str, folder: Path, kills: int, seed: int, parameters: int) -> None:
    chance = random.Random(seed)
    known = 0  # clean in memory before the last kill, as far as was said
    attempt = Attempt(way, folder, 0, ENDLESS, parameters)
    attempt.begin()
    spare = attempt
    try:
        for number in range(1, kills + 1):
            spare = Attempt(way, folder, number, ENDLESS if number < kills else MORE, parameters)
            goal = known + 3
            wait_until(lambda: min(attempt.newest(rank, "clean") for rank in range(WORLD)) >= goal, 120)
            time.sleep(chance.uniform(0.0, 0.3))
            known = max(attempt.newest(rank, "clean") for rank in range(WORLD))
            attempt.kill(chance.randrange(WORLD))
            attempt = spare
            attempt.begin()
        for rank, process in enumerate(attempt.ranks):
            assert process.wait(240) == 0, attempt.said(rank)
            said = attempt.said(rank)
            assert "ended bit for bit" in said, said
            assert attempt.newest(rank, "restored") >= known > 0
            assert re.search(r"^restored \d+ host", said, re.MULTILINE), said
            print(rank, *re.findall(r"^(?:restored|ended|closed).*", said, re.MULTILINE), sep="\n  ")
    finally:
        for one in {attempt, spare}:
            one.kill(0)


two_gpus = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < WORLD, reason="needs two GPUs"
)


@pytest.mark.gpu
@two_gpus
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("way", "kills"), [("ddp", 1), ("fsdp2", 2)])
def test_a_killed_rank_and_all_go_on_bit_for_bit(way: str, kills: int, tmp_path: Path) -> None:
    parameters = int(os.environ.get("ZEROSTALL_TEST_PARAMETERS", 1_300_000_000))
    kill_and_go_on(way, tmp_path, kills, seed=kills, parameters=parameters)


@pytest.mark.gpu
@pytest.mark.long
@two_gpus
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_twenty_kills(way: str, tmp_path: Path) -> None:
    parameters = int(os.environ.get("ZEROSTALL_TEST_PARAMETERS", 300_000_000))
    kill_and_go_on(way, tmp_path, 10, seed=20, parameters=parameters)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_twenty_kills_on_the_cpu(way: str, tmp_path: Path) -> None:
    """The same with gloo, which also tells a machine without GPUs that the test itself is right."""
    if torch.cuda.is_available():
        pytest.skip("there are GPUs to do it on")
    kill_and_go_on(way, tmp_path, 10, seed=20, parameters=20_000)
