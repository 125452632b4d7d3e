"""Steps that came from elsewhere, in the hands of a Checkpointer; and the commands on folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forked
import zerostall
from forked import python

SAVE = """
import sys, warnings, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from zerostall.integrations.dcp import Writer
warnings.simplefilter("ignore")
run, plain = sys.argv[1:]

def trained(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer

def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one[0].state_dict().values(), other[0].state_dict().values())) and all(
        torch.equal(slot[key], other[1].state_dict()["state"][n][key])
        for n, slot in one[1].state_dict()["state"].items() for key in slot
    )

first = trained(1)
module, slots = get_state_dict(*first)
dcp.save({"model": module, "optimizer": slots}, storage_writer=Writer(run, step=7))
dcp.save({"model": module, "optimizer": slots}, checkpoint_id=plain)
"""
RESTORE = (
    SAVE.split("first =")[0]
    + """
import zerostall
zerostall.import_file(plain, run + "-imported", 9)
for where, step in ((run, 7), (run + "-imported", 9)):
    first, other = trained(1), trained(2)
    assert not same(first, other)
    with zerostall.Checkpointer(where, model=other[0], optimizer=other[1], rng=False) as ckpt:
        assert ckpt.restore() == step
        assert same(first, other)
        other[1].step()
        ckpt.save(step + 1).wait("disk")
print("restored")
"""
)


def run_code(code: str, environment: dict[str, str], *words: object) -> str:
    done = python("-c", code, *words, environment=environment, seconds=270)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_training_goes_on_from_a_step_of_dcp(agent_environment: dict[str, str], tmp_path: Path) -> None:
    run, plain = tmp_path / "run", tmp_path / "plain"
    environment = {**agent_environment, "OMP_NUM_THREADS": "1"}
    run_code(SAVE, environment, run, plain)
    assert run_code(RESTORE, environment, run, plain) == "restored\n"
    assert [snapshot.step for snapshot in zerostall.snapshots(run)] == [7, 8]

    def cli(*words: object) -> dict[str, object]:
        done = forked.cli(environment, *words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    out = cli("export", run, 8, tmp_path / "out", "--format", "dcp", "--weights", "--dtype", "bfloat16")
    assert (out["step"], out["tensors"]) == (8, 9)
    back = cli("import", tmp_path / "out", run, "--step", 20, "--only", "*weight", "--root", "net")
    assert (back["step"], back["tensors"]) == (20, 3)
    assert zerostall.load(run, 20)["net"]["0.weight"].dtype == torch.bfloat16


TORCH_CHECKPOINTING = """
import sys, torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
if __name__ == "__main__":
    manager = CheckpointManager(
        CheckpointManager.Config(storage_config=LocalFileSystemStorageConfig(use_direct_io=False))
    )
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "extra": {"t": torch.ones(2), "n": [1, "x"]}, "step": 3}
    manager.save(sys.argv[1], state).result()
    manager.close()
"""


@pytest.mark.timeout(300)
def test_a_folder_that_torch_checkpointing_wrote(tmp_path: Path) -> None:
    pytest.importorskip("torch_checkpointing")
    script = tmp_path / "save.py"  # it starts a process that imports this one anew
    script.write_text(TORCH_CHECKPOINTING)
    command = [sys.executable, str(script), str(tmp_path / "folder")]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=270
    )
    assert done.returncode == 0, done.stderr
    zerostall.import_file(tmp_path / "folder", tmp_path / "run", 3)
    found = zerostall.load(tmp_path / "run")
    assert torch.equal(found["model"]["w"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(found["extra"]["t"], torch.ones(2)) and found["extra"]["n"] == [1, "x"]
    assert found["rest"] == {"step": 3}
