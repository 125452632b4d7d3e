"""A restore takes no second copy on the GPU, leaves nothing behind, and touches the GPUs of its tensors alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

JOB = Path(__file__).parent / "restored_job.py"
STATE = 3 * (512 << 20)
MOST = 128 << 20
"""Bytes beside the tensors that are filled: under a tenth of the state."""

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]
two_gpus = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")


def begin(scenario: str, *words: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", str(JOB), scenario, *map(str, words)]
    everything = {**os.environ, **environment}
    return subprocess.Popen(command, env=everything, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def facts(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return json.loads(next(line for line in said.splitlines() if line.startswith("FACTS"))[5:])


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, float]:
    return tmp_path / "run", facts(begin("save", tmp_path / "run", "cuda:0"))["checksum"]


def test_a_restore_has_no_second_copy(saved: tuple[Path, float]) -> None:
    where, checksum = saved
    found = facts(begin("peak", where, "cuda:0"))
    print(found)
    assert found["checksum"] == checksum and found["source"] == "host"
    assert found["extra"] < MOST and found["kept"] < 1 << 20 and found["aside"] < MOST
    assert found["host"] < STATE // 2


def test_after_a_restore_training_takes_no_more_than_from_the_beginning(saved: tuple[Path, float]) -> None:
    where, _ = saved
    fresh, restored = (facts(begin("steady", where, "cuda:0", how)) for how in ("no", "yes"))
    print(fresh, restored)
    assert restored["allocated"] == fresh["allocated"]
    assert restored["reserved"] <= fresh["reserved"] + (64 << 20)
    assert restored["rss"] <= fresh["rss"] + (300 << 20)


def test_what_was_saved_on_a_gpu_is_read_where_there_is_none(saved: tuple[Path, float]) -> None:
    where, checksum = saved
    found = facts(begin("without_gpu", where, CUDA_VISIBLE_DEVICES=""))
    assert found == {"devices": ["cpu"], "checksum": pytest.approx(checksum, rel=1e-9), "value": "cuda:7"}


@two_gpus
def test_only_the_target_s_gpu_is_touched(saved: tuple[Path, float]) -> None:
    """Neither the one it was saved on, nor one that a rank's number would name."""
    where, checksum = saved
    found = facts(begin("peak", where, "cuda:1", LOCAL_RANK="0", RANK="0"))
    print(found)
    assert found["contexts"] == [False, True]
    assert found["checksum"] == checksum and found["extra"] < MOST


@two_gpus
def test_a_whole_step_goes_to_shards_without_being_whole_anywhere(saved: tuple[Path, float], tmp_path: Path) -> None:
    where, checksum = saved
    ranks = [begin("sharded", where, tmp_path / "meeting", rank) for rank in range(2)]
    for rank, process in enumerate(ranks):
        found = facts(process)
        print(rank, found)
        assert found["extra"] < MOST and found["others"] == [False]
        assert found["checksum"] == pytest.approx(checksum, rel=1e-9)
