"""Saves through other GPUs' memory by all ranks at once: the rate of each link, and what collectives lose meanwhile."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import zerostall
from benchmarks.ranks.loop import RankLoop
from benchmarks.ranks.stalls import GRANTED
from benchmarks.ranks.together import PATIENCE, Allowance, every_rank, kill_agent, slowest
from benchmarks.report import interval, median, seconds
from zerostall.core.vaults import Links
from zerostall.native import DeviceFacts
from zerostall.trainer import lockers

SHAPES = ("ring", "pairs", "straight")
VAULT_SAVES = 12  # in which every rank's vault must have been found
COPIED = 1 << 30
REDUCED = {"cuda": 128 << 20, "cpu": 1 << 20}  # bytes of a collective
ALONE = 40
MOST = 400  # collectives beside one save
MARGIN = 1.3


@dataclass
class Between:
    """What one shape measured: who lends memory to whom. Seconds and bytes; of a save the slowest rank's.

    Attributes:
        each: bytes of a rank's image.
        through: ranks whose images went through another GPU's memory.
        bare: bytes a second of plain copies from each GPU to the one that lends to it, all at once.
        rates: of each rank, from a save until its bytes had left, all at once; of the fastest save.
        read, sealed: until they had left the device; until they were whole in host memory.
        collectives: "all-reduce, alone" and so on -> seconds of each, on rank 0.
    """

    way: str
    ranks: int = 0
    each: int = 0
    through: int = 0
    bare: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    sealed: list[float] = field(default_factory=list)
    collectives: dict[str, list[float]] = field(default_factory=dict)

    @property
    def samples(self) -> dict[str, list[float]]:
        found = {f"{self.way}, read, s": self.read, f"{self.way}, sealed, s": self.sealed}
        return found | {f"{self.way}, {name}, s": times for name, times in self.collectives.items()}

    def rows(self) -> list[tuple[str, str, str]]:
        """What is told of it."""
        out = [(self.way, "a rank's image; ranks that went through another GPU's memory",
                f"{self.each / 1e9:.2f} GB; {self.through} of {self.ranks}")]  # fmt: skip
        if self.bare:
            out.append((self.way, "plain copies to that GPU, all links at once", _rates(self.bare)))
        if self.read:
            out.append((self.way, "each link, all saving at once", _rates(self.rates)))
            out.append((self.way, "read; whole in host memory", " ; ".join(map(_middle, (self.read, self.sealed)))))
        for name, times in self.collectives.items():
            verb = name.split(",")[0]
            plain = self.collectives[f"{verb}, alone"]
            more = "" if times is plain else f", {100 * (median(times) / median(plain) - 1):+.1f} %"
            mean, half = interval(times)
            out.append((self.way, name, f"{_middle(times)}, mean {seconds(mean)} ± {seconds(half)}{more}"))
        return out

    def goals(self) -> dict[str, str]:
        return {}


def _middle(times: list[float]) -> str:
    return seconds(median(times))


def _rates(rates: list[float]) -> str:
    return ", ".join(f"{rate / 1e9:.1f}" for rate in rates) + f" GB/s; {sum(rates) / 1e9:.1f} in all"


def lender(shape: str, rank: int, world: int) -> int:
    """The rank on whose GPU another one's images are kept."""
    return rank ^ 1 if shape == "pairs" else (rank + 1) % world


def hide_all_but_pairs() -> None:
    """As on a host where GPUs reach one another by twos alone: that is what the checkpointer decides by."""
    whole = lockers.topology

    def paired() -> tuple[dict[str, DeviceFacts], Links]:
        gpus, links = whole()
        at = {uuid: number for number, uuid in enumerate(gpus)}
        return gpus, {(one, two): link for (one, two), link in links.items() if at[one] // 2 == at[two] // 2}

    lockers.topology = paired


def plain_copies(shape: str) -> list[float]:
    """Bytes a second from each rank's GPU to its lender's, all at once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    here = torch.ones(COPIED, dtype=torch.uint8, device=torch.device("cuda", rank))
    there = torch.empty_like(here, device=torch.device("cuda", lender(shape, rank, world)))

    own: list[float] = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize(rank)
        own.append(time.perf_counter() - start)
    del here, there
    torch.cuda.empty_cache()
    return every_rank(COPIED / min(own[1:]))


class Collectives:
    """Collectives one after the other, each with a mark behind it."""

    def __init__(self, loop: RankLoop) -> None:
        self._clock = loop.clock
        world = dist.get_world_size()
        words = REDUCED[loop.device.type] // 4 // world * world
        self._whole = torch.ones(words, device=loop.device)
        self._part = torch.ones(words // world, device=loop.device)
        self.verbs: dict[str, Callable[[], object]] = {
            "all-reduce": lambda: dist.all_reduce(self._whole, dist.ReduceOp.MAX),  # which keeps it small
            "reduce-scatter": lambda: dist.reduce_scatter_tensor(self._part, self._whole),
        }

    def times(self, verb: str, count: int) -> list[tuple[float, float]]:
        """Begin and end of each, in seconds since the first one began."""
        call, marks = self.verbs[verb], [self._clock.mark()]
        for _ in range(count):
            call()
            marks.append(self._clock.mark())
        self._clock.synchronize()
        at = self._clock.seconds(marks)
        return [(begin - at[0], end - at[0]) for begin, end in itertools.pairwise(at)]


def neighbours(
    found: Between, loop: RankLoop, options: argparse.Namespace, allowance: Allowance, note: Callable[[], None]
) -> None:
    """Saves at rest, then beside collectives, as many as there is time for."""
    through = found.way != "straight"
    if through and loop.clock.gpu and found.ranks > 1:
        found.bare = plain_copies(found.way)
    if found.way == "pairs":
        hide_all_but_pairs()
    ckpt = zerostall.Checkpointer(
        Path(options.folder, "saved"), keep=1, slots=3, disk_interval=3600.0, peer=through, rng=False, **loop.state()
    )
    saves = Saves(ckpt)
    ckpt.save(0, when_busy="wait").wait("disk", timeout=PATIENCE)  # and the disk rests from now on
    for _ in range(VAULT_SAVES):
        saves.finished()
        if not through or not loop.clock.gpu or slowest(-ckpt.stats.stowed) <= -2:
            break
    found.through = sum(int(stowed > 0) for stowed in every_rank(ckpt.stats.stowed))
    for _ in range(4):
        if (sealed := saves.finished()) is None:
            continue
        found.sealed.append(sealed)
        found.each = int(slowest(ckpt.stats.bytes_captured / max(1, ckpt.stats.saves)))
        times = every_rank(ckpt.stats.drain_seconds[-1])
        if not found.read or max(times) < min(found.read):
            found.rates = [found.each / taken for taken in times]
        found.read.append(max(times))
    note()
    collectives = Collectives(loop)
    for verb in collectives.verbs:
        collectives.times(verb, 5)
        dist.barrier()
        alone = [end - begin for begin, end in collectives.times(verb, ALONE)]
        found.collectives[f"{verb}, alone"] = alone
        if not found.sealed:
            continue
        count = min(MOST, max(4, math.ceil(MARGIN * slowest(median(found.sealed)) / slowest(median(alone)))))
        for number in range(options.rounds):
            if number and not allowance.has(2 * median(found.sealed)):
                break
            beside(found, collectives, verb, count, saves)
            note()
    with contextlib.suppress(zerostall.errors.ZerostallError):
        ckpt.close(timeout=0.1)
    kill_agent()


class Saves:
    """Saves of all ranks, numbered alike. They go to no disk, so one may find no slot: then it counts on no rank."""

    def __init__(self, ckpt: zerostall.Checkpointer) -> None:
        self.ckpt = ckpt
        self._number = 0

    def begin(self) -> zerostall.Saving:
        """One more, all at once."""
        time.sleep(GRANTED)
        dist.barrier()
        self._number += 1
        return self.ckpt.save(self._number)

    def whole(self, saving: zerostall.Saving) -> bool:
        """Waits until it is whole in host memory; false where some rank has skipped it."""
        if slowest(bool(saving.skipped)):
            return False
        saving.wait("host", timeout=PATIENCE)
        return True

    def finished(self) -> float | None:
        """A save with nothing else going on: seconds until it was whole everywhere."""
        start = time.perf_counter()
        taken = self.whole(self.begin())
        seconds = slowest(time.perf_counter() - start - GRANTED)
        return seconds if taken else None


def beside(found: Between, collectives: Collectives, verb: str, count: int, saves: Saves) -> None:
    """So many collectives right behind a save, by what of the save was going on when they ended."""
    saving = saves.begin()
    times = collectives.times(verb, count)
    if not saves.whole(saving):
        return
    read = saves.ckpt.stats.drain_seconds[-1]
    whole = max(read, median(found.sealed))
    reading, bringing = f"{verb}, while a save is read", f"{verb}, while it is brought to host memory"
    for begin, end in times:
        if end <= read or begin == 0.0:
            found.collectives.setdefault(reading, []).append(end - begin)
        elif begin >= read and end <= whole and found.through:
            found.collectives.setdefault(bringing, []).append(end - begin)
