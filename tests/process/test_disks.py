"""A run of several ranks on several disks: saved, found again when memory is gone, and what a lost disk costs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import zerostall
from conftest import stop_agent
from ranks.world import Start
from zerostall.errors import RunMismatchError


def test_ranks_go_on_from_several_disks(start: Start, tmp_path: Path, agent_environment: dict[str, str]) -> None:
    where, more = tmp_path / "run", [tmp_path / "nvme 1" / "gpt", tmp_path / "nvme2"]
    runtime = Path(agent_environment["ZEROSTALL_RUNTIME_DIR"])
    start(3, "train", where, 3, *more).wait()
    assert [len(list(disk.rglob("*step-000000000003/*.safetensors"))) for disk in (where, *more)] == [1, 1, 1]
    stop_agent(runtime)
    for said in start(3, "train", where, 1, *more).wait():
        assert "restored 3 disk" in said and "saved 4" in said
    assert [verdict.problems for verdict in zerostall.verify(where, 4)] == [()]
    stop_agent(runtime)
    shutil.rmtree(more[0] / "images" / "step-000000000004")
    for said in start(3, "train", where, 1).wait():  # no longer told of them
        assert "restored 3 disk" in said and "saved 4" in said
    assert len(list(where.glob("step-000000000004/*.safetensors"))) == 3


@pytest.mark.usefixtures("own_agent")
def test_folders_are_checked_before_training(tmp_path: Path) -> None:
    where, other = tmp_path / "run", tmp_path / "other"
    state = {"state": {"t": torch.arange(5)}}
    for wrong in ([where], [where / "in"], [tmp_path], [other, other / "in"], [tmp_path / "\udcff"]):
        with pytest.raises(ValueError, match="disks: "):
            zerostall.Checkpointer(where, disks=wrong, **state)
    with pytest.raises(TypeError, match="disks="):
        zerostall.Checkpointer(where, disks=str(other), **state)
    with pytest.raises(ValueError, match="no folder"):
        zerostall.Checkpointer("s3://bucket/run", disks=[other], **state)
    with zerostall.Checkpointer(where, disks=[other], **state) as ckpt:
        ckpt.save(1)
    with pytest.raises(RunMismatchError, match="has images of the run"):
        zerostall.Checkpointer(tmp_path / "another", disks=[other], **state)
    with pytest.raises(RunMismatchError, match="a run's own folder"):
        zerostall.Checkpointer(tmp_path / "third", disks=[where], **state)
