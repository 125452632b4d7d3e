"""A whole training loop of several ranks, with all that it must go on with; and whose random numbers go on where."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerostall
from ranks.sharded import Samples, say

MICRO_BATCHES = 2
ROWS = torch.arange(240.0).reshape(60, 4) / 240


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def drawn() -> list[float]:
    """The next number of each of this process's generators."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


class Loop:
    """Two micro batches make a step; each rank has noise of its own from three generators."""

    def __init__(self) -> None:
        seed(1)
        net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, 4))
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.samples = Samples()
        seed(100 + dist.get_rank())

    def state(self) -> dict[str, object]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "samples": self.samples,
        }

    def step(self, *, dies: bool) -> None:
        for number in range(MICRO_BATCHES):
            x = ROWS[self.samples.batch(3)] + random.random() + float(np.random.rand())
            self.model.require_backward_grad_sync = number == MICRO_BATCHES - 1
            self.scaler.scale(self.model(x).sub(x).square().mean()).backward()
            if dies and number == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def end(self) -> dict[str, object]:
        slots = [self.optimizer.state[p][key] for p in self.model.parameters() for key in ("exp_avg", "exp_avg_sq")]
        return {
            "tensors": [*(p.detach().clone() for p in self.model.parameters()), *slots],
            "values": [*self.scheduler.get_last_lr(), self.scaler.get_scale(), self.samples.seen, *drawn()],
        }


def whole_loop(where: str, expected: str, dies_after: str) -> None:
    """Five steps, saving each; rank 1 may die in the middle of the one after that step, between two micro batches."""
    job = Loop()
    with zerostall.Checkpointer(where, **job.state()) as ckpt:
        step = ckpt.restore()
        say("restored", step, "seen", job.samples.seen, "scale", job.scaler.get_scale())
        while step < 5:
            job.step(dies=dist.get_rank() == 1 and step == int(dies_after))
            step += 1
            ckpt.save(step, when_busy="wait").wait("host", timeout=60)
        end = job.end()
        path = Path(f"{expected}-{dist.get_rank()}")
        if path.exists():
            known = torch.load(path)
            assert known["values"] == end["values"], (known, end)
            assert all(map(torch.equal, known["tensors"], end["tensors"]))
            say("equal")
        else:
            torch.save(end, path)
        dist.barrier()
        say("drew", *end["values"][-3:])


def generators(where: str, number: str) -> None:
    """Say what each rank's generators give next, after a restore and after a save; seeded by the attempt's number."""
    seed(int(number) + dist.get_rank())
    weight = torch.ones(3)
    with zerostall.Checkpointer(where, s={"w": weight}) as ckpt:
        step = ckpt.restore()
        ckpt.save(step + 1).wait("disk", timeout=60)
        say("drew", *drawn())
    seed(int(number) + dist.get_rank())
    say("unsaved", *drawn())
