"""A script for torchrun: trains with DistributedDataParallel, dies twice, and must end as if it had not."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import zerostall

STEPS = 15
DEATHS = {0: (1, 7), 1: (0, 12)}  # attempt: (rank, step); as many as DIES says, or all
MICRO_BATCHES = 2


class Batches:
    """This rank's way through its data, as a stateful loader keeps it."""

    def __init__(self) -> None:
        self._data = torch.arange(160.0).reshape(40, 4) / 160
        self._sampler = DistributedSampler(range(40), shuffle=True, seed=7)
        self._epoch = self._position = 0

    def next(self) -> torch.Tensor:
        self._sampler.set_epoch(self._epoch)
        indices = list(self._sampler)[self._position : self._position + 4]
        self._position += 4
        if self._position >= len(self._sampler):
            self._epoch, self._position = self._epoch + 1, 0
        return self._data[indices]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]


class Job:
    def __init__(self) -> None:
        torch.manual_seed(1)  # the same weights on every rank, other noise on each
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 4))
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.batches = Batches()
        torch.manual_seed(100 + dist.get_rank())

    def state(self) -> dict[str, object]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "batches": self.batches,
        }

    def step(self) -> None:
        for number in range(MICRO_BATCHES):
            x = self.batches.next()
            if number < MICRO_BATCHES - 1:
                with self.model.no_sync():
                    self.model(x).sub(x).square().mean().backward()
            else:
                self.model(x).sub(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def digest(self) -> list[float]:
        parts = [p.detach().double().sum().item() for p in self.model.parameters()]
        parts += [s["exp_avg_sq"].double().sum().item() for s in self.optimizer.state.values()]
        return [*parts, *self.scheduler.get_last_lr(), torch.rand(()).item(), self.batches.next().sum().item()]


def main(where: str, stays: int | None = None, **options: object) -> None:
    """`stays`: after that step nothing more happens, until somebody kills it; `options` are the checkpointer's."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    job = Job()
    with zerostall.Checkpointer(where, **options, **job.state()) as ckpt:
        first = ckpt.restore()
        say(f"attempt {attempt} rank {rank} goes on from {first} {ckpt.stats.restored_from}")
        for step in range(first, STEPS):
            job.step()
            saving = ckpt.save(step + 1, when_busy="wait")
            if step == first and "DURABLE" in os.environ:
                saving.wait("disk")  # a node that is lost takes what is in its memory only
            while step + 1 == stays:
                signal.pause()
            if attempt < int(os.environ.get("DIES", "2")) and DEATHS.get(attempt) == (rank, step + 1):
                os.kill(os.getpid(), signal.SIGKILL)
    ended = job.digest()
    reference = Job()
    for _ in range(STEPS):
        reference.step()
    assert reference.digest() == ended
    say(f"rank {rank} ended bit for bit")
    dist.barrier()
    # gloo's threads, which live as long as the models, may want the interpreter while it ends, and torch then aborts.
    os._exit(0)


def hurry(where: str, seconds: str) -> None:
    """Save at each step, one every so many seconds, until somebody kills it; the attempt after that ends soon."""
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    job = Job()
    with zerostall.Checkpointer(where, disk_interval=3600.0, **job.state()) as ckpt:
        first = ckpt.restore()
        say(f"attempt {attempt} rank {rank} goes on from {first} {ckpt.stats.restored_from}")
        end = first + 5 if attempt else None
        for step in itertools.count(first + 1):
            job.step()
            ckpt.save(step)
            if step == end:
                break
            time.sleep(float(seconds))
    ended = job.digest()
    reference = Job()
    for _ in range(first + 5):
        reference.step()
    assert reference.digest() == ended
    say(f"rank {rank} ended bit for bit")
    dist.barrier()
    os._exit(0)


def say(line: str) -> None:
    """By one write: the other rank writes to the same pipe."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
