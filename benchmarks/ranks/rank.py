"""One rank: what it measures of one way of dealing out. Rank 0 writes what was found, whenever there is more."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

import zerostall
from benchmarks.ranks.beside_dcp import files
from benchmarks.ranks.found import Found
from benchmarks.ranks.loop import RankLoop
from benchmarks.ranks.together import PATIENCE, Allowance, kill_agent, slowest, together
from benchmarks.report import median
from benchmarks.stall.loop import Step

ROOM = 1.4  # of the time that the drain takes, for a step, where no batch was asked for


def rank_main(options: argparse.Namespace) -> None:
    """What a rank does; rank 0 writes what was found, whenever there is more."""
    allowance = Allowance(options.begin, options.begin + options.seconds)
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
    found = Found("fsdp2 beside dcp" if options.way == "dcp" else options.way, world)

    def note() -> None:
        if rank == 0:
            target = Path(options.folder, "found.json")
            target.with_suffix(".new").write_text(json.dumps(asdict(found)))
            target.with_suffix(".new").replace(target)

    loop = RankLoop(options.model, str(device), options.way)
    loop.batch = options.batch or (4 if cuda else 1)
    loop.run(2)
    found.nbytes = loop.nbytes()
    if options.way == "dcp":
        files(found, loop, options, allowance, note)
    else:
        if cuda:
            links(found, device)
            note()
        stalls(found, loop, options, allowance, note)
    dist.barrier()
    dist.destroy_process_group()


def links(found: Found, device: torch.device) -> None:
    """Plain copies from the device to page-locked memory: rank 0 by itself, then all ranks at once."""
    here = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    there = torch.ones_like(here, device="cpu", pin_memory=True)

    def copy() -> None:
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    first = dist.get_rank() == 0
    found.alone = here.nbytes / min(together(copy if first else lambda: None) for _ in range(4))
    found.at_once = dist.get_world_size() * here.nbytes / min(together(copy) for _ in range(4))


class Stalls:
    """Blocks of steps without saves and with one at every step, in turn; and saves with nothing else going on."""

    def __init__(self, found: Found, loop: RankLoop, ckpt: zerostall.Checkpointer, steps: int) -> None:
        self._found = found
        self._loop = loop
        self._ckpt = ckpt
        self._steps = steps
        self._number = 0
        self._skipped = 0

    def _save(self) -> bool:
        self._number += 1
        saving = self._ckpt.save(self._number)
        self._skipped += bool(saving.skipped)
        return not saving.skipped

    def block(self, saves: bool) -> tuple[float, list[Step]]:
        """Seconds of so many steps, and the steps."""

        def run() -> None:
            steps.extend(self._loop.step(self._save if saves else None, lambda: None) for _ in range(self._steps))
            self._loop.clock.synchronize()

        steps: list[tuple[Step, list[object]]] = []
        took = together(run)
        return took, self._loop.settle(steps)

    def at_rest(self, count: int) -> None:
        """Saves with nothing else going on: how fast all links drain at once."""
        for _ in range(count):
            self._number += 1
            before = len(self._ckpt.stats.drain_seconds)
            dist.barrier()
            self._ckpt.save(self._number, when_busy="wait").wait("host", timeout=PATIENCE)
            self._found.drained.append(slowest(self._ckpt.stats.drain_seconds[before]))
        stats = self._ckpt.stats
        self._found.each = int(slowest(stats.bytes_captured / max(1, stats.saves)))

    def pair(self, bare: float) -> float:
        """A block with saves, and one without; seconds of the latter. `bare`: of the one before."""
        found = self._found
        self._skipped = 0
        drains = len(self._ckpt.stats.drain_seconds)
        with_saves, saving = self.block(True)
        after, idle = self.block(False)
        skipped = int(slowest(self._skipped))
        accepted = self._steps - skipped
        found.skipped += skipped
        found.saves += accepted
        found.step = after / self._steps
        if accepted:
            found.added.append((with_saves - (bare + after) / 2) / accepted)
        guards, inserts = zip(*map(_waits, idle), strict=True)
        base = (median(guards), median(inserts))
        for guard, inserted in zip(_slowest_of(guards), _slowest_of(inserts), strict=True):
            found.idle_guard.append(guard)
            found.idle_inserted.append(inserted)
        taken = [step for step in saving if step.saved]
        stalls = []
        for step in taken:
            guard, inserted = _waits(step)
            wait = max(0.0, guard - base[0], inserted - base[1])
            stalls.append((step.called - step.begin, guard, inserted, step.called - step.begin + wait))
        if len(taken) == accepted:  # a save that only some ranks have skipped is no save
            columns = zip(*stalls, strict=True) if stalls else [()] * 4
            for name, values in zip(("call", "guard", "inserted", "stall"), columns, strict=True):
                getattr(found, name).extend(_slowest_of(values))
        else:
            for _ in range(4):
                _slowest_of(())
        found.busy += _slowest_of(self._ckpt.stats.drain_seconds[drains:])
        return after


def _waits(step: Step) -> tuple[float, float]:
    """What the thread and the stream waited for before the update."""
    _, ready, guarded, _ = step.device
    return step.guarded - step.ready, guarded - ready


def _slowest_of(values: object) -> list[float]:
    """Of each save the largest of all ranks' values, of as many saves as every rank has."""
    every: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, list(values))  # type: ignore[call-overload]
    return [max(times) for times in zip(*every, strict=False)]


def stalls(
    found: Found, loop: RankLoop, options: argparse.Namespace, allowance: Allowance, note: Callable[[], None]
) -> None:
    """Pairs of blocks until there are enough or there is no more time; `note` is called after each."""
    ckpt = zerostall.Checkpointer(
        Path(options.folder, "stall"), keep=1, slots=2, disk_interval=3600.0, policy=options.policy, **loop.state()
    )
    measured = Stalls(found, loop, ckpt, options.steps)
    ckpt.save(0, when_busy="wait").wait("disk", timeout=PATIENCE)  # and the disk rests from now on
    measured.block(True)  # memory is registered, checksums of what is alike are compared
    measured.at_rest(3)
    if loop.clock.gpu and not options.batch:
        loop.aim(ROOM * median(found.drained))
        loop.batch = int(slowest(loop.batch))
    found.batch = loop.batch
    note()
    bare, _ = measured.block(False)
    for pair in range(options.pairs):
        if pair and not allowance.has(2.5 * bare):
            break
        bare = measured.pair(bare)
        note()
    with contextlib.suppress(zerostall.errors.ZerostallError):
        ckpt.close(timeout=0.1)  # what is not on disk by now need not get there
    kill_agent()
