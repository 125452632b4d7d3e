"""What memory a restore takes on a GPU, and which GPUs it touches; each scenario in a process of its own.

    python restored_job.py SCENARIO FOLDER [WORDS]

Prints one JSON document.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerostall

WIDTH, DEPTH = 4096, 8  # 512 MiB of weights, three times that with AdamW's moments


def job(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    device = next(model.parameters()).device
    for _ in range(steps):
        model(torch.ones(4, WIDTH, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def private_bytes() -> int:
    """Of this process's memory what no other shares: what is mapped of the agent's is the agent's."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


def checksum(model: nn.Module) -> float:
    return float(sum(parameter.detach().double().sum().item() for parameter in model.parameters()))


def tell(**facts: object) -> None:
    print("FACTS", json.dumps(facts), flush=True)


def save(folder: str, device: str) -> None:
    model, optimizer = job(device)
    train(model, optimizer, 2)
    values = {"w": torch.ones(3, device=device), "device": torch.device("cuda:7")}
    with zerostall.Checkpointer(folder, model=model, optimizer=optimizer, values=values) as ckpt:
        ckpt.save(1).wait("disk", timeout=120)
    tell(checksum=checksum(model))


def peak(folder: str, device: str) -> None:
    """What a restore takes beside the tensors it fills, from memory or disk, into a fresh optimizer."""
    model, optimizer = job(device)
    values = {"w": torch.zeros(3, device=device), "device": None}
    torch.cuda.synchronize(device)
    used, host = torch.cuda.memory_allocated(device), private_bytes()
    with zerostall.Checkpointer(folder, model=model, optimizer=optimizer, values=values) as ckpt:
        torch.cuda.reset_peak_memory_stats(device)
        free = torch.cuda.mem_get_info(device)[0]
        reserved = torch.cuda.memory_reserved(device)
        assert ckpt.restore() == 1
        source = ckpt.stats.restored_from
        grown = torch.cuda.memory_reserved(device) - reserved
        aside = free - torch.cuda.mem_get_info(device)[0] - grown
        slots = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.is_cuda)
        extra = torch.cuda.max_memory_allocated(device) - used - slots
        kept = torch.cuda.memory_allocated(device) - used - slots
        found = checksum(model)
    tell(
        source=source,
        extra=extra,
        kept=kept,
        aside=aside,
        host=private_bytes() - host,
        checksum=found,
        contexts=[torch._C._cuda_hasPrimaryContext(n) for n in range(torch.cuda.device_count())],
    )


def steady(folder: str, device: str, restored: str) -> None:
    """Memory after a restore and a step, or after two steps from the beginning."""
    model, optimizer = job(device)
    if restored == "yes":
        values = {"w": torch.zeros(3, device=device), "device": None}
        with zerostall.Checkpointer(folder, model=model, optimizer=optimizer, values=values) as ckpt:
            assert ckpt.restore() == 1
    train(model, optimizer, 1 if restored == "yes" else 3)
    torch.cuda.synchronize(device)
    tell(
        allocated=torch.cuda.memory_allocated(device), reserved=torch.cuda.memory_reserved(device), rss=private_bytes()
    )


def without_gpu(folder: str) -> None:
    assert not torch.cuda.is_available()
    loaded = zerostall.load(folder, 1)
    devices = {str(tensor.device) for tensor in loaded["model"].values()}
    model, optimizer = job("cpu")
    values = {"w": torch.zeros(3), "device": None}
    with zerostall.Checkpointer(folder, model=model, optimizer=optimizer, values=values) as ckpt:
        assert ckpt.restore() == 1
    tell(devices=sorted(devices), checksum=checksum(model), value=str(values["device"]))


def sharded(folder: str, meeting: str, rank: str) -> None:
    """What one process has saved whole, on two GPUs by FSDP2: no rank has all of it at any time."""
    from torch.distributed.fsdp import fully_shard

    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
    device = torch.device("cuda", int(rank))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    dist.barrier()
    used = torch.cuda.memory_allocated(device)
    with zerostall.Checkpointer(folder, model=model, optimizer=optimizer) as ckpt:
        torch.cuda.reset_peak_memory_stats(device)
        assert ckpt.restore(only=["model", "optimizer"]) == 1
        slots = sum(t.to_local().nbytes for state in optimizer.state.values() for t in state.values() if t.is_cuda)
        extra = torch.cuda.max_memory_allocated(device) - used - slots
        total = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
    others = [torch._C._cuda_hasPrimaryContext(n) for n in range(2) if n != int(rank)]
    tell(extra=extra, checksum=total, others=others)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    scenario, *words = sys.argv[1:]
    {one.__name__: one for one in (save, peak, steady, without_gpu, sharded)}[scenario](*words)
