"""torchrun as it is: workers that die are started again, find the agent, and end as if nothing had happened."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "ranks" / "elastic.py"

# By default torchrun keeps one store for all attempts, and gloo looks addresses up in it under the same names each
# time: a worker may find that of a dead one, and is refused. Thus each attempt gets a store of its own.
APART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def torchrun(folder: Path, environment: dict[str, str], deaths: int) -> None:
    """Train to the end with so many deaths on the way."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, f"--max-restarts={deaths}", "--monitor-interval=0.1", str(SCRIPT), str(folder / "run")],
        env={**environment, **APART, "DIES": str(deaths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ended bit for bit") == 2, done.stdout
    went_on = re.findall(r"attempt (\d) rank \d goes on from (\d+) (\w*)", done.stdout)
    assert len(set(went_on)) == deaths + 1  # in each attempt both ranks go on from one step
    assert {tier for attempt, _, tier in went_on if attempt != "0"} == {"host"}, done.stdout


@pytest.mark.timeout(300)
def test_restarted_workers_go_on_from_host_memory_bit_for_bit(tmp_path: Path, agent_environment) -> None:
    torchrun(tmp_path, agent_environment, 1)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_ten_times_with_two_deaths_each(tmp_path: Path, agent_environment) -> None:
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        torchrun(folder, agent_environment, 2)
