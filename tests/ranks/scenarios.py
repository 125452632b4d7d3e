"""What ranks do in tests: each function is one rank's program."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from pathlib import Path

import torch.distributed as dist

import zerostall
from crash.states import Job
from ranks import elastic


class Ranked(Job):
    """A job whose objects have other names on every rank, as the stages of a pipeline do."""

    def state(self) -> dict[str, object]:
        return {f"{name}{dist.get_rank()}": part for name, part in super().state().items()}


def say(*words: object) -> None:
    print(*words, flush=True)


def begin(where: str, **options) -> tuple[Ranked, zerostall.Checkpointer, int]:
    """A job, its checkpointer and the step it was restored to, every bit checked."""
    job = Ranked()
    ckpt = zerostall.Checkpointer(where, **options, **job.state())
    step = ckpt.restore()
    assert not job.difference(step), job.difference(step)
    say("restored", step, ckpt.stats.restored_from or "nothing")
    return job, ckpt, step


def train(where: str, steps: str, *disks: str) -> None:
    """Go on for some steps, each of which gets to disk."""
    job, ckpt, step = begin(where, disks=disks)
    with ckpt:
        for _ in range(int(steps)):
            step = job.train_one_step()
            saving = ckpt.save(step, when_busy="wait")
            saving.wait("host")
            dist.barrier()
        saving.wait("disk", timeout=60)
    say("saved", step)


def loop(where: str, steps: str) -> None:
    """Train with a barrier a step, as training's own collectives are; saves are skipped when there is no slot."""
    job, ckpt, step = begin(where)
    pending: list[zerostall.Saving] = []
    with ckpt:
        while step < int(steps):
            step = job.train_one_step()
            pending.append(ckpt.save(step))
            for saving in [saving for saving in pending if "host" in saving.tiers]:
                say("reached", saving.step)
                pending.remove(saving)
            say("trained", step)
            dist.barrier()
        ckpt.save(step, when_busy="wait", if_exists="replace").wait(timeout=60)
    say("saved", step)


def durable(where: str, steps: str) -> None:
    """Train until killed; says which steps have got to disk."""
    job, ckpt, step = begin(where, disk_interval=0.0)
    pending: list[zerostall.Saving] = []
    with ckpt:
        while step < int(steps):
            step = job.train_one_step()
            pending.append(ckpt.save(step))
            for saving in [saving for saving in pending if "disk" in saving.tiers]:
                say("durable", saving.step)
                pending.remove(saving)
            dist.barrier()
        ckpt.save(step, when_busy="wait", if_exists="replace").wait(timeout=60)
    say("saved", step)


def differ(where: str) -> None:
    """Rank 1 was given another option; then rank 2 a state that cannot be saved; then all agree."""
    rank = dist.get_rank()
    for options, state in (({"slots": 4 if rank == 1 else 3}, {}), ({}, {"bad": {1, object()} if rank == 2 else 1})):
        try:
            zerostall.Checkpointer(where, **options, **Ranked().state(), **state)
        except zerostall.errors.ZerostallError as error:
            say("refused", type(error).__name__, error)
        else:
            raise AssertionError("nothing was refused")
    job, ckpt, _ = begin(where)
    with ckpt:
        ckpt.save(job.train_one_step()).wait(timeout=60)
    say("files", *sorted(path.name for path in (Path(where) / "step-000000000001").iterdir()))


def resume(where: str) -> None:
    """What a script for torchrun does."""
    elastic.main(where)


def resume_apart(where: str) -> None:
    """The same, each node with a disk of its own."""
    mount_own_disk(where)
    elastic.main(where)


def stay_apart(where: str, step: str) -> None:
    mount_own_disk(where)
    elastic.main(where, stays=int(step))


def mount_own_disk(where: str) -> None:
    """Have a folder of this node's own at that path, for this thread and the processes that it starts. Needs root."""
    own = Path(f"{where} of {os.environ['GROUP_RANK']}")
    if (others := Path(f"{own}, others' images")).exists():
        os.environ["ZEROSTALL_REPLICA_DISK"] = str(others)
    for folder in (own, Path(where)):
        folder.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", own, where], check=True)


def stay(where: str, step: str) -> None:
    """The same up to that step; of what it saves the disk gets the first step, and the last when all have ended."""
    elastic.main(where, stays=int(step), disk_interval=3600.0)


def hurry(where: str, seconds: str) -> None:
    """Save faster than images get to other nodes."""
    elastic.hurry(where, seconds)


def preempted(where: str, seconds: str) -> None:
    """Train until a signal says to leave; `seconds` of work a step."""
    job, ckpt, step = begin(where, preempt=("SIGTERM",), grace=60.0)
    with ckpt:
        due = ckpt.every(steps=1_000_000)
        while not ckpt.preempted:
            step = job.train_one_step()
            if due(step):
                ckpt.save(step)
            say("trained", step)
            time.sleep(float(seconds))
            dist.barrier()
    say("left", step)


def minutely(where: str) -> None:
    """Save on the clock of rank 0, while the others' clocks stand still."""
    job, ckpt, step = begin(where)
    saved: list[int] = []
    if dist.get_rank() > 0:
        time.monotonic = lambda: 0.0  # type: ignore[assignment]
    due = ckpt.every(seconds=0.5)
    with ckpt:
        while len(saved) < 3:
            step = job.train_one_step()
            if due(step):
                ckpt.save(step, when_busy="wait")
                saved.append(step)
            time.sleep(0.002)
            dist.barrier()
    say("saved", *saved)
