"""One rank of a job on CUDA devices: trains a large net, saves every step, and must end as if it had never been killed.

    RANK=0 WORLD_SIZE=2 python ranks_job.py ddp|fsdp2 FOLDER MEETING STEPS PARAMETERS

It begins when a line comes in, so that a launcher can keep it ready while others still train, and makes STEPS steps
after those that it has restored. Prints `restored K tier`, `step K` as steps are made, and at the end `ended bit for
bit`. Without CUDA it does the same on the CPU, with gloo, so that the test of it can be tried anywhere.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zerostall

BATCH = 64


def say(*words: object) -> None:
    print(*words, flush=True)


class Job:
    """A stack of square layers: the same weights at first on every rank, other data on each."""

    def __init__(self, way: str, device: torch.device, parameters: int) -> None:
        gpu = device.type == "cuda"
        width = 8192 if gpu else 64
        torch.manual_seed(3)
        with device:
            layers = [nn.Linear(width, width) for _ in range(max(1, round(parameters / width**2)))]
        self.net: nn.Module = nn.Sequential(*layers)
        self.width, self.device = width, device
        if way == "fsdp2":
            for layer in layers:
                fully_shard(layer)
            fully_shard(self.net)
        else:
            self.net = DistributedDataParallel(self.net, device_ids=[device] if gpu else None)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=gpu)

    def state(self) -> dict[str, object]:
        return {"net": self.net, "optimizer": self.optimizer}

    def step(self, number: int) -> None:
        generator = torch.Generator(self.device).manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(BATCH, self.width, device=self.device, generator=generator)
        with torch.autocast(self.device.type, torch.bfloat16):
            self.net(x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def shards(self) -> list[torch.Tensor]:
        """What this rank has of weights and moments."""
        found = list(self.net.parameters())
        for parameter in list(found):
            found += [self.optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq", "step")]
        return [(t.to_local() if isinstance(t, DTensor) else t).detach() for t in found]


def main(way: str, folder: str, meeting: str, steps: str, parameters: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # a context takes its time
    say("ready")
    if not sys.stdin.readline():
        return  # whoever kept it ready is gone
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        device_id=device if gpu else None,
    )
    began = time.monotonic()
    job = Job(way, device, int(parameters))
    with zerostall.Checkpointer(folder, slots=2, keep=1, disk_interval=3600.0, **job.state()) as ckpt:
        first = ckpt.restore()
        say("restored", first, ckpt.stats.restored_from or "nothing", f"{time.monotonic() - began:.1f} s")
        savings: list[zerostall.Saving] = []
        last = first + int(steps)
        for number in range(first, last):
            job.step(number)
            savings = [*savings[-7:], ckpt.save(number + 1)]
            if clean := [saving.step for saving in savings if "host" in saving.tiers]:
                say("clean", clean[-1])
            say("step", number + 1)
            if not gpu:
                time.sleep(0.02)
        ended = [tensor.clone() for tensor in job.shards()]
        try:
            ckpt.close(timeout=0.1)  # a disk need not take part in this
        except zerostall.errors.ZerostallError as error:
            say("closed:", type(error).__name__)
    del job
    other = Job(way, device, int(parameters))
    for number in range(last):
        other.step(number)
    odd = [index for index, (a, b) in enumerate(zip(ended, other.shards(), strict=True)) if not torch.equal(a, b)]
    assert not odd, f"{len(odd)} of {len(ended)} tensors differ, the first is number {odd[0]}"
    say("ended bit for bit", f"{time.monotonic() - began:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
