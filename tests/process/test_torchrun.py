"""torchrun as it is: workers that die are started again, find the agent, and end as if nothing had happened."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "ranks" / "elastic.py"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_restarted_workers_go_on_from_host_memory_bit_for_bit(tmp_path: Path, agent_environment) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    done = subprocess.run(
        [*command, "--monitor-interval=0.1", str(SCRIPT), str(tmp_path / "run")],
        env={**agent_environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ended bit for bit") == 2, done.stdout
    went_on = re.findall(r"attempt (\d) rank \d goes on from (\d+) (\w*)", done.stdout)
    assert len(set(went_on)) == 3  # in each attempt both ranks go on from one step
    assert {tier for attempt, _, tier in went_on if attempt != "0"} == {"host"}
