"""One rank: what it measures of one way of dealing out. Rank 0 writes what was found, whenever there is more."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zerostall
from benchmarks.ranks.loop import RankLoop
from zerostall.config import runtime_dir
from zerostall.integrations.dcp import Reader, Writer
from zerostall.wire import channel, rendezvous

PATIENCE = 300.0


@dataclass
class Found:
    """What one way of dealing out measured; seconds and bytes. A list of a time is of the slowest rank, one a save.

    Attributes:
        nbytes: of the whole state; `each`: that a rank stores.
        call, guard, inserted: of saves at every step: the call, the thread's wait and the stream's before the update.
        added: of each block of steps with saves: its time less that of as many without, by save.
        drained: from a save until its bytes had left the device, all ranks at once, nothing else going on.
        alone, at_once: bytes a second of plain copies to page-locked memory: of one rank, and of all together.
        save, load: what -> seconds, until the step is durable or back.
    """

    way: str
    ranks: int = 0
    nbytes: int = 0
    each: int = 0
    step: float = 0.0
    saves: int = 0
    skipped: int = 0
    call: list[float] = field(default_factory=list)
    guard: list[float] = field(default_factory=list)
    inserted: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)
    drained: list[float] = field(default_factory=list)
    alone: float = 0.0
    at_once: float = 0.0
    save: dict[str, list[float]] = field(default_factory=dict)
    load: dict[str, list[float]] = field(default_factory=dict)


def rank_main(options: argparse.Namespace) -> None:
    """What a rank does; rank 0 writes what was found, whenever there is more."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device(options.device, rank) if cuda else torch.device("cpu")
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{options.folder}/meeting",
        rank=rank,
        world_size=world,
        device_id=device if cuda else None,
    )
    if not cuda:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    found = Found(options.way, world)

    def note() -> None:
        if rank == 0:
            Path(options.folder, "found.json").write_text(json.dumps(asdict(found)))

    loop = RankLoop(options.model, str(device), options.way)
    loop.batch = options.batch
    loop.run(2)
    found.nbytes = loop.nbytes()
    if cuda:
        links(found, device)
        note()
    if cuda or options.stalls:
        stalls(found, loop, options, note)
    if options.way == "fsdp2" and not options.skip_files:
        files(found, loop, options, note)
    dist.barrier()
    dist.destroy_process_group()


def kill_agent() -> None:
    """What is in memory goes, and nothing more of it to the disk."""
    dist.barrier()
    if dist.get_rank() == 0 and (connection := rendezvous.connect(runtime_dir())) is not None:
        pid, _ = channel.peer(connection.socket)
        os.kill(pid, signal.SIGKILL)
        connection.close()
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)
    dist.barrier()


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    every: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return max(every)


def together(call: Callable[[], object]) -> float:
    """Seconds until the last rank is through, all beginning at once."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    call()
    return slowest(time.perf_counter() - start)


def links(found: Found, device: torch.device) -> None:
    """Plain copies from the device to page-locked memory: rank 0 by itself, then all ranks at once."""
    here = torch.ones(2 << 30, dtype=torch.uint8, device=device)
    there = torch.ones_like(here, device="cpu", pin_memory=True)

    def copy() -> None:
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    first = dist.get_rank() == 0
    found.alone = here.nbytes / min(together(copy if first else lambda: None) for _ in range(4))
    found.at_once = dist.get_world_size() * here.nbytes / min(together(copy) for _ in range(4))


def stalls(found: Found, loop: RankLoop, options: argparse.Namespace, note: Callable[[], None]) -> None:
    """Blocks of steps without saves and with one at every step, in turn; then saves with nothing else going on."""
    ckpt = zerostall.Checkpointer(
        Path(options.folder, "stall"), keep=1, disk_interval=3600.0, policy=options.policy, **loop.state()
    )
    number = 0
    skipped = 0

    def save() -> bool:
        nonlocal number, skipped
        number += 1
        saving = ckpt.save(number)
        skipped += bool(saving.skipped)
        return not saving.skipped

    def block(saves: bool) -> tuple[float, list]:
        def run() -> None:
            steps.extend(loop.step(save if saves else None, lambda: None) for _ in range(options.steps))
            loop.clock.synchronize()

        steps: list = []
        took = together(run)
        return took, loop.settle(steps)

    ckpt.save(0, when_busy="wait")
    block(True)  # memory is registered, checksums of what is alike are compared
    bare, _ = block(False)
    for _ in range(options.pairs):
        skipped = 0
        with_saves, steps = block(True)
        after, _ = block(False)
        accepted = options.steps - skipped
        found.skipped += skipped
        found.saves += accepted
        if accepted:
            found.added.append((with_saves - (bare + after) / 2) / accepted)
        found.step = after / options.steps
        for step in steps:
            _, ready, guarded, _ = step.device
            values = (step.called - step.begin, step.guarded - step.ready, guarded - ready)
            every: list = [None] * dist.get_world_size()
            dist.all_gather_object(every, values)
            call, guard, inserted = (max(times) for times in zip(*every, strict=True))
            found.call.append(call)
            found.guard.append(guard)
            found.inserted.append(inserted)
        bare = after
        note()
    for _ in range(3):
        number += 1
        before = len(ckpt.stats.drain_seconds)
        dist.barrier()
        ckpt.save(number, when_busy="wait").wait("host", timeout=PATIENCE)
        found.drained.append(slowest(ckpt.stats.drain_seconds[before]))
    captured = ckpt.stats.bytes_captured // max(1, ckpt.stats.saves)
    found.each = int(slowest(float(captured)))
    note()
    with contextlib.suppress(zerostall.errors.ZerostallError):
        ckpt.close(timeout=0.1)  # what is not on disk by now need not get there
    kill_agent()


# ---------------------------------------------------------------------------------------------- beside DCP


def forget_cached(folder: Path) -> None:
    """Take files out of the page cache, so that both sides read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Theirs:
    """torch.distributed.checkpoint, as it is and with our storage; from and to one state."""

    def __init__(self, loop: RankLoop, folder: Path) -> None:
        self._loop = loop
        self._folder = folder
        self._run = folder / "dcp-in-ours"
        self._step = 0

    def forget(self) -> None:
        """Make room for the next save; rank 0 does."""
        for name in ("dcp", "dcp-threads"):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def save(self, name: str, **arguments: object) -> None:
        model, optimizer = get_state_dict(self._loop.model, self._loop.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, **{"checkpoint_id": self._folder / name, **arguments})

    def save_on_threads(self) -> None:
        threads = max(1, len(os.sched_getaffinity(0)))
        self.save(
            "dcp-threads", storage_writer=dcp.FileSystemWriter(self._folder / "dcp-threads", thread_count=threads)
        )

    def save_in_ours(self) -> None:
        self._step += 1
        self.save("", storage_writer=Writer(self._run, step=self._step), checkpoint_id=None)

    def load(self, **arguments: object) -> None:
        model, optimizer = get_state_dict(self._loop.model, self._loop.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, **arguments)
        set_state_dict(self._loop.model, self._loop.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def load_own(self) -> None:
        self.load(checkpoint_id=self._folder / "dcp")

    def load_from_ours(self) -> None:
        self.load(storage_reader=Reader(self._run))


def files(found: Found, loop: RankLoop, options: argparse.Namespace, note: Callable[[], None]) -> None:
    """Save until durable and load into the same model, everybody in turn, each first as often as the others."""
    folder = Path(options.folder)
    theirs = Theirs(loop, folder)
    first = dist.get_rank() == 0
    opened: list[zerostall.Checkpointer] = []
    steps = itertools.count(1)

    def checkpointer() -> zerostall.Checkpointer:
        return zerostall.Checkpointer(folder / "ours", keep=1, rng=False, disk_interval=3600.0, **loop.state())

    def save() -> None:
        opened[0].save(next(steps), when_busy="wait").wait("disk", timeout=PATIENCE)

    def restart() -> None:
        opened.append(checkpointer())
        opened[0].restore()
        assert opened[0].stats.restored_from == "disk"

    saves = {
        "zerostall": save,
        "dcp": lambda: theirs.save("dcp"),
        "dcp, a thread a core": theirs.save_on_threads,
        "dcp with zerostall's Writer": theirs.save_in_ours,
    }
    loads = {
        "zerostall, agent and all": restart,
        "dcp": theirs.load_own,
        "dcp with zerostall's Reader": theirs.load_from_ours,
    }
    opened.append(checkpointer())
    for number in range(options.rounds + 1):
        for name in _turned(saves, number):
            if first:
                theirs.forget()
            took = together(saves[name])
            if number:  # whoever comes the first time has things to make and to compare
                found.save.setdefault(name, []).append(took)
                note()
    if first:
        theirs.forget()
    together(saves["dcp"])
    for _ in range(options.rounds):
        found.load.setdefault("zerostall, from memory", []).append(together(opened[0].restore))
    opened.pop().close()
    for number in range(options.rounds):
        for name in _turned(loads, number):
            kill_agent()
            forget_cached(folder)
            found.load.setdefault(name, []).append(together(loads[name]))
            while opened:
                opened.pop().close()
            note()


def _turned(names: dict[str, Callable[[], None]], number: int) -> list[str]:
    """Another begins each time."""
    every = list(names)
    return every[number % len(every) :] + every[: number % len(every)]
