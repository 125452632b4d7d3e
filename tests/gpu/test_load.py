"""Steps and safetensors files into a device's memory, through host memory and, where it is there, by cuFile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import zerostall
from zerostall.errors import CorruptError

pytestmark = pytest.mark.gpu


def state() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    sizes = [0, 1, 3, 1001, 1 << 20, 5 << 20, 9]
    return {f"t{k}": torch.randn(size, generator=made) for k, size in enumerate(sizes)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with zerostall.Checkpointer(tmp_path / "run", tensors=state(), net=nn.Linear(3, 4)) as ckpt:
        ckpt.save(1).wait("disk", timeout=120)
    return tmp_path / "run"


@pytest.mark.parametrize("gds", ["off", "auto", "on"])
def test_a_step(run: Path, monkeypatch: pytest.MonkeyPatch, gds: str) -> None:
    monkeypatch.setenv("ZEROSTALL_GDS", gds)
    busy = torch.empty(8 << 20, device="cuda")
    torch.cuda._sleep(50_000_000)
    busy.fill_(1.0)  # still queued when its memory is given to what is loaded
    del busy
    found = zerostall.load(run, device="cuda")
    for name, tensor in state().items():
        assert found["tensors"][name].is_cuda  # type: ignore[index]
        assert torch.equal(found["tensors"][name].cpu(), tensor), name  # type: ignore[index]
    assert found["net"]["weight"].is_cuda  # type: ignore[index]


def test_a_safetensors_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state(), tmp_path / "model.safetensors")
    found = zerostall.load(tmp_path / "model.safetensors", device="cuda:0")
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in state().items())  # type: ignore[attr-defined]


def test_damage_is_told(run: Path) -> None:
    image = next(run.glob("step-*/*.safetensors"))
    with image.open("r+b") as file:
        file.seek(image.stat().st_size // 2)
        file.write(b"damage")
    with pytest.raises(CorruptError, match="fails its checksum"):
        zerostall.load(run, device="cuda")


RANK = """
import sys
import torch, torch.distributed as dist
import zerostall
from zerostall.trainer.exchange import filling
rank, world, store, run = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
device = torch.device("cuda", rank)
alone = zerostall.load(run, device=device)["tensors"]
for pass_on in (True, False):
    filling.ROUND = 1
    choose = filling.passing.choose
    def chosen(*seen):
        print("chosen", choose(*seen).reason)
        return filling.passing.Way(pass_on, "as the test wants")
    filling.passing.choose = chosen
    found = zerostall.load(run, device=device, process_group=dist.group.WORLD)["tensors"]
    filling.passing.choose = choose
    for name, tensor in alone.items():
        assert found[name].device == device and torch.equal(found[name], tensor), name
dist.barrier()
dist.destroy_process_group()
print("ENDED")
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_over_nccl(run: Path, tmp_path: Path) -> None:
    world = torch.cuda.device_count()
    command = [str(world), str(tmp_path / "store"), str(run)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    for said in [child.communicate(timeout=100)[0] for child in ranks]:
        assert "ENDED" in said and "chosen" in said, said
