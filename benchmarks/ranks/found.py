"""What the ranks of one way of dealing out measured, and what is told of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.report import interval, median, percentile, seconds
from benchmarks.stall.goals import ADDED, CEILING, net

STALL = 200e-6  # seconds a save, where the drain fits between two updates
FITS = 0.9  # of a step, at most
OURS = "zerostall"


@dataclass
class Found:
    """What one way of dealing out measured; seconds and bytes. A list of a time is of the slowest rank, one a save.

    Attributes:
        system: that saves; `every`: steps from a save to the next.
        nbytes: of the whole state; `each`: that a rank stores.
        batch: samples a rank and step; step: seconds of one without a save.
        call, guard, inserted: of saves in training: the call, the thread's wait and the stream's before the update.
        idle_guard, idle_inserted: the same marks in steps without saves.
        stall: the call, and the larger of the two waits, less what the marks tell without a save; rank by rank.
        added: of each block of steps with saves: its time less that of as many without, by save.
        drained: from a save until its bytes had left the device, all ranks at once, nothing else going on.
        rates: bytes a second of each rank, then. busy: as `drained`, of saves in training.
        finished: from a save until it was whole where the system keeps it: in memory, or else on the disk.
        host, pinned, device: bytes at most: of host memory, for all ranks; page-locked of one; of one GPU, by anybody.
        free: bytes of that GPU that were used without any checkpoint.
        again: what does not depend on `every` is told of another.
        alone, at_once: bytes a second of plain copies to page-locked memory: of one rank, and of all together.
        save, load: what -> seconds, until the step is durable or back.
    """

    way: str
    ranks: int = 0
    system: str = OURS
    every: int = 1
    nbytes: int = 0
    each: int = 0
    batch: int = 0
    step: float = 0.0
    saves: int = 0
    skipped: int = 0
    call: list[float] = field(default_factory=list)
    guard: list[float] = field(default_factory=list)
    inserted: list[float] = field(default_factory=list)
    idle_guard: list[float] = field(default_factory=list)
    idle_inserted: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)
    drained: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    host: int = 0
    pinned: int = 0
    device: int = 0
    free: int = 0
    again: bool = False
    alone: float = 0.0
    at_once: float = 0.0
    save: dict[str, list[float]] = field(default_factory=dict)
    load: dict[str, list[float]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What it is of."""
        whose = "" if self.system == OURS else f", {self.system}"
        return f"{self.way}{whose}{f', a save every {self.every} steps' if self.every > 1 else ''}"

    @property
    def samples(self) -> dict[str, list[float]]:
        """Every list of seconds, by name."""
        names = ("call", "guard", "inserted", "idle_guard", "idle_inserted", "stall", "added", "drained", "busy")
        found = {f"{self.label}, {name}, s": getattr(self, name) for name in (*names, "finished")}
        for verb in ("save", "load"):
            found |= {f"{self.label}, {verb}, {name}, s": times for name, times in getattr(self, verb).items()}
        return {name: times for name, times in found.items() if times}

    @property
    def floor(self) -> float:
        """Seconds that reading what a rank stores takes on an H200."""
        return self.each / CEILING

    @property
    def fits(self) -> bool:
        """Whether a drain is over well before the update after it."""
        return bool(self.drained) and median(self.drained) < FITS * self.step

    def rows(self) -> list[tuple[str, str, str]]:
        """What is told of it."""
        out: list[tuple[str, str, str]] = []

        def add(what: str, value: str) -> None:
            out.append((self.label, what, value))

        add("state, ranks", f"{self.nbytes / 1e9:.2f} GB, {self.ranks}")
        if self.saves or self.skipped:
            add("a step, of so many samples a rank", f"{seconds(self.step)}, {self.batch}")
            add("saves, skipped", f"{self.saves}, {self.skipped}")
        if self.call:
            waits = (("thread's wait", net(self.guard, self.idle_guard)),)
            waits += (("stream's wait", net(self.inserted, self.idle_inserted)),)
            for name, times in (("call", self.call), *waits, ("stall", self.stall)):
                add(f"{name}: median, 99 %", f"{seconds(median(times))}, {seconds(percentile(times, 0.99))}")
        if self.added and self.each:
            mean, half = interval(self.added)
            add(
                "added to the loop a save, 95 %",
                f"{seconds(mean)} ± {seconds(half)}, {mean / self.floor:.2f} of the floor ({seconds(self.floor)})",
            )
        total = self.each * self.ranks
        if self.busy and total:
            add("all ranks drained at once, in training", _drain(total, self.busy))
        if not self.again:
            self._at_rest(add, total)
        for verb, times in (("save", self.save), ("load", self.load)):
            for name, taken in times.items():
                add(f"{verb}, {name}", _rate(self.nbytes, taken))
            for name, taken in times.items():
                if name != "dcp" and times.get("dcp"):
                    ratio = statistics.median(times["dcp"]) / statistics.median(taken)
                    add(f"{verb}, {name}: times as fast as dcp", f"{ratio:.2f}")
        return out

    def _at_rest(self, add: Callable[[str, str], None], total: int) -> None:
        if self.drained and total:
            add("all ranks drained at once, at rest", _drain(total, self.drained))
        if self.rates:
            add("each drains", ", ".join(f"{rate / 1e9:.1f}" for rate in self.rates) + " GB/s")
        if self.finished:
            add("whole, all ranks at once, at rest", seconds(median(self.finished)))
        if self.host:
            add("host memory taken, all ranks", f"{self.host / 1e9:.1f} GB")
        if self.pinned:
            add("page-locked, of one rank", f"{self.pinned / 1e9:.1f} GB")
        if self.device:
            add("used of a GPU; without saves", f"{self.device / 1e9:.1f} GB; {self.free / 1e9:.1f} GB")
        if self.at_once:
            add("plain copies of all ranks at once; of one", f"{self.at_once / 1e9:.1f}; {self.alone / 1e9:.1f} GB/s")

    def goals(self) -> dict[str, str]:
        """What was to be reached on two H200, beside what was."""
        found: dict[str, str] = {}
        if self.system != OURS:
            return found
        if self.stall:
            limit = "< 0.2 ms, the drain fits" if self.fits else "no goal, the drain does not fit"
            p50, p99 = (percentile(self.stall, share) for share in (0.5, 0.99))
            found[f"{self.label}: stall a save {limit}"] = f"p50 {seconds(p50)}, p99 {seconds(p99)}"
        if self.added and self.each:
            mean, half = interval(self.added)
            found[f"{self.label}: added a save ≤ {seconds(ADDED * self.floor)}"] = f"{seconds(mean)} ± {seconds(half)}"
        if self.drained and self.at_once and not self.again:
            share = self.each * self.ranks / median(self.drained) / self.at_once
            found[f"{self.label}: all links drained at once, of plain copies"] = f"{100 * share:.1f} %"
        return found


def _drain(nbytes: int, times: list[float]) -> str:
    return f"{nbytes / median(times) / 1e9:.1f} GB/s, {seconds(median(times))}"


def _rate(nbytes: float, times: list[float]) -> str:
    middle = statistics.median(times)
    return f"{seconds(middle)} ({seconds(min(times))} to {seconds(max(times))}), {nbytes / middle / 1e9:.2f} GB/s"
