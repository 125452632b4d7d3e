"""Files of several ranks, as torch_checkpointing and torch.save write them, become one step without any rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerostall
from free_ports import free_ports
from ranks.meshes import SHAPES, full
from ranks.sharded import same
from ranks.world import Start

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kind", ["fsdp", "2d", "hsdp", "tp"])
def test_what_is_dealt_out_is_put_together_again(
    start: Start, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, run, expected = tmp_path / "folder", tmp_path / "run", tmp_path / "expected"
    folder.mkdir()
    start(4, "save_items", folder, kind, expected).wait()
    done = zerostall.import_file(folder, run, 1)
    assert "progress.rank (rank 1)" in caplog.text and done.step == 1
    found = zerostall.load(run, 1)
    for name in SHAPES:
        for number in range(5):
            assert torch.equal(found["odd"][f"{name}{number}"], full(name)), (name, number)
    assert found["progress"]["epoch"] == 3 and found["progress"]["rank"] == 0
    assert [found["progress"][f"stage{rank}"].tolist() for rank in range(4)] == [[float(n)] * 2 for n in range(4)]
    flat = {f"model.{name}": tensor for name, tensor in found["model"].items()}
    for name, slots in found["optimizer"]["state"].items():
        flat |= {f"optimizer.{name}.{key}": value for key, value in slots.items()}
    assert torch.equal(flat.pop("model.head.weight"), flat["model.table.weight"])  # tied, and told once by torch
    whole = torch.load(expected)
    assert not same(flat, whole), same(flat, whole)
    for rank in (1, 3):  # the others are no replicas of them, whatever the way
        (folder / f"model_{rank}.pt").unlink()
    with pytest.raises(zerostall.errors.FormatError, match=r"is not whole: .* elements are in no part"):
        zerostall.import_file(folder, run, 2)


SAVE = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
    w = distribute_tensor(torch.arange(14.0).reshape(7, 2), mesh, [Shard(0)])
    manager.save(sys.argv[1], {"model": {"w": w, "r": torch.ones(3)}, "step": 3}).result()
    manager.close()
    dist.barrier()
    dist.destroy_process_group()
"""


def test_a_folder_that_torch_checkpointing_wrote_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch_checkpointing")
    script = tmp_path / "save.py"  # it starts processes that import this one anew
    script.write_text(SAVE)
    (port,) = free_ports(1)
    ranks = []
    for rank in range(2):
        meeting = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        meeting |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **meeting}
        command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "folder")]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for one in ranks:
            _, errors = one.communicate(timeout=240)
            assert one.returncode == 0, errors
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    zerostall.import_file(tmp_path / "folder", tmp_path / "run", 3)
    found = zerostall.load(tmp_path / "run")
    assert torch.equal(found["model"]["w"], torch.arange(14.0).reshape(7, 2))
    assert torch.equal(found["model"]["r"], torch.ones(3)) and found["rest"] == {"step": 3}
