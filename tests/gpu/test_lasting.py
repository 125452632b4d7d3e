"""On a GPU: many saves take no more memory than a few, and a killed trainer's state comes back bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerostall
from benchmarks.agent import agent_pid, segment_bytes
from benchmarks.machine import ROOT
from benchmarks.stall.loop import SIZES, Loop
from benchmarks.stall.memory import device_used, mapped_slots
from zerostall.config import Policy

pytestmark = pytest.mark.gpu

POLICIES: list[Policy] = ["overlap", "freeze", "flip", "auto"]
FEW, MANY = 5, 100


@pytest.mark.parametrize("policy", POLICIES)
def test_many_saves_take_no_more_memory_than_a_few(tmp_path: Path, policy: Policy) -> None:
    loop = Loop(SIZES["tiny"], "cuda", flips=policy in ("flip", "auto"))
    loop.run(2)
    with zerostall.Checkpointer(
        tmp_path / "run", policy=policy, model=loop.model, optimizer=loop.optimizer, disk_interval=3600.0
    ) as ckpt:

        def saves(until: int) -> tuple[int, int, int, int]:
            while ckpt.stats.saves < until:
                saving = ckpt.save(ckpt.stats.saves + ckpt.stats.skipped + 1)
                loop.step(None, lambda: None)
                if not saving.skipped:
                    saving.wait("host", timeout=60)
            torch.cuda.synchronize()
            own = torch.cuda.memory_reserved()
            return torch.cuda.memory_allocated(), device_used() - own, mapped_slots(), segment_bytes(agent_pid())

        few, many = saves(FEW), saves(MANY)
        assert many[0] == few[0] and many[2:] == few[2:]
        assert many[1] - few[1] < 32 << 20  # the driver loads a kernel's code when it is first used
        assert not ckpt.stats.dirty


def test_a_killed_trainer_comes_back_bit_for_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.recovery", "--model", "tiny", "--device", "cuda"]
    command += ["--steps", "5", "--deaths", "2", "--folder", str(tmp_path), "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    goals = json.loads((tmp_path / "recovery.json").read_text())["goals"]
    assert goals["the state is that of the save, bit for bit"] == "yes"
    assert goals["out of host memory"] == "host"
