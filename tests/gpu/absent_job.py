"""One of two ranks of which one is slow, stays away or dies: what the other hears, where NCCL is impatient.

    RANK=0 WORLD_SIZE=2 python absent_job.py SCENARIO FOLDER MEETING SECONDS

SECONDS: after which NCCL ends processes with a collective that does not. Prints `bounded ERROR` where an error ended a
wait, and `still alive` once NCCL would have ended this process since. Without CUDA it does the same with gloo.
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerostall


class Job:
    """A small net that NCCL has dealt with already."""

    def __init__(self, folder: str, device: torch.device) -> None:
        torch.manual_seed(3)
        self.device = device
        self.folder = folder
        net = nn.Linear(512, 512, device=device)
        self.net = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.train()

    def train(self) -> None:
        self.net(torch.ones(8, 512, device=self.device)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checkpointer(self) -> zerostall.Checkpointer:
        return zerostall.Checkpointer(self.folder, model=self.net, optimizer=self.optimizer)


def say(*words: object) -> None:
    print(*words, flush=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def late(job: Job, rank: int, seconds: float) -> None:
    """Rank 1 comes when NCCL would long have ended a process that waited in a collective."""
    if rank == 1:
        time.sleep(2.5 * seconds)
    with job.checkpointer() as ckpt:
        first = ckpt.restore()
        for step in range(first, first + 3):
            job.train()
            saving = ckpt.save(step + 1, when_busy="wait")
        saving.wait("host", timeout=60)
    say("trained on")


def missing(job: Job, rank: int, seconds: float) -> None:
    """Rank 1 lives and never makes a Checkpointer."""
    if rank == 1:
        wait_for(job, "over")
        return
    bounded(job.checkpointer)
    time.sleep(seconds + 3)
    Path(job.folder).parent.joinpath("over").touch()


def dead(job: Job, rank: int, seconds: float) -> None:
    """Rank 1 dies while rank 0 waits for it."""
    if rank == 1:
        time.sleep(1)
        die()
    bounded(job.checkpointer)
    time.sleep(seconds + 3)


def keeper(job: Job, rank: int, seconds: float) -> None:
    """Rank 0, which keeps the store of all, dies while rank 1 waits for it."""
    if rank == 0:
        time.sleep(1)
        die()
    bounded(job.checkpointer)
    time.sleep(seconds + 3)


def saving(job: Job, rank: int, seconds: float) -> None:
    """Rank 1 dies between two saves; rank 0 waits for the second."""
    ckpt = job.checkpointer()
    ckpt.save(1, when_busy="wait").wait("host", timeout=60)
    job.train()
    if job.device.type == "cuda":
        torch.cuda.synchronize()
    if rank == 1:
        die()
    second = ckpt.save(2, when_busy="wait")
    bounded(lambda: second.wait("host", timeout=60))
    time.sleep(seconds + 3)


def bounded(call: Callable[[], object]) -> None:
    try:
        call()
    except zerostall.errors.ZerostallError as error:
        say("bounded", type(error).__name__, error)
    else:
        say("nothing was raised")


def wait_for(job: Job, name: str) -> None:
    deadline = time.monotonic() + 300
    while not Path(job.folder).with_name(name).exists() and time.monotonic() < deadline:
        time.sleep(0.2)


SCENARIOS = {one.__name__: one for one in (late, missing, dead, keeper, saving)}


def main(scenario: str, folder: str, meeting: str, seconds: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=float(seconds)),
        device_id=device if gpu else None,
    )
    SCENARIOS[scenario](Job(folder, device), rank, float(seconds))
    say("still alive")
    os._exit(0)  # what is left of the group is not what is tried here


if __name__ == "__main__":
    main(*sys.argv[1:])
