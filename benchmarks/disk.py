"""Speed of persisting and restoring against bare writers, readers and copies of the same bytes, neighbours in time."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import zerostall
from benchmarks import bare
from benchmarks.report import Report, median
from benchmarks.workload import scratch
from zerostall import native
from zerostall.core import neighbours
from zerostall.flow import disk_speed

THREADS = 8
WAIT = 300.0
TENSOR = 32 << 20
KEPT = 2
HEADER = 1 << 20
"""More than an image has beside its tensors."""


def state_of(nbytes: int) -> dict[str, torch.Tensor]:
    """A plain state of tensors of 32 MiB that hold noise."""
    generator = torch.Generator().manual_seed(1)
    return {
        f"tensor{i}": torch.randint(256, (TENSOR,), dtype=torch.uint8, generator=generator)
        for i in range(nbytes // TENSOR)
    }


def timed(call: Callable[[], object]) -> float:
    """Seconds that it takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


PAIRS = {
    "write": "bare write",
    "read": "bare read",
    "save to disk": "bare write beside",
    "restore disk": "bare read of the same",
    "restore host": "copy",
}
"""What is measured, and the floor that each of its turns has right before or after it."""


def whole(folder: Path, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Save until on disk, restore from host and from disk, through trainer and agent."""
    state = state_of(nbytes)
    flat = torch.ones(nbytes, dtype=torch.uint8)
    copy = torch.ones_like(flat)
    steps = itertools.count(1)
    room, beside = bare.buffer(nbytes + HEADER), folder.with_name("beside")
    block = room[:nbytes]
    found: dict[str, list[float]] = {name: [] for pair in list(PAIRS.items())[2:] for name in pair}

    def pair(turn: int, name: str, ours: Callable[[], float], floor: Callable[[], float]) -> None:
        """One after the other, another first each time; what comes before the first turn is not counted."""
        for label, call in [(name, ours), (PAIRS[name], floor)][:: -1 if turn % 2 else 1]:
            seconds = call()
            if turn:
                found[label].append(seconds)

    with zerostall.Checkpointer(folder, keep=KEPT, state=state) as ckpt:

        def save() -> float:
            seconds = timed(lambda: ckpt.save(next(steps)).wait("disk", timeout=WAIT))
            while len(list(folder.glob("step-*"))) > KEPT:  # removing an old step would slow the floor's turn
                time.sleep(0.002)
            return seconds

        for turn in range(rounds + 1):
            pair(turn, "save to disk", save, lambda: bare.write(beside, block, THREADS))
            pair(turn, "restore host", lambda: timed(ckpt.restore), lambda: timed(lambda: copy.copy_(flat)))
    image = max(folder.glob("step-*")) / "rank-00000.safetensors"
    whole_file = room[: image.stat().st_size]
    for turn in range(rounds // 2 + 1):  # each with another agent, which takes longer than what is measured
        stop = [sys.executable, "-m", "zerostall.cli", "agent", "stop", "--force"]
        subprocess.run(stop, check=True, capture_output=True, timeout=60)
        with zerostall.Checkpointer(folder, keep=2, state=state) as ckpt:
            pair(turn, "restore disk", lambda: timed(ckpt.restore), lambda: bare.read(image, whole_file, THREADS))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--megabytes", type=int, default=512, help="size of the state in MiB")
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    arguments = options.parse_args()
    nbytes = arguments.megabytes << 20
    with scratch(arguments.folder) as folder:
        engine = disk_speed.samples(folder, nbytes, rounds=arguments.rounds, threads=THREADS)
        if engine.fell_back:
            raise SystemExit(f"no direct I/O here: {engine.fell_back}")
        found = engine.walls
        found |= whole(folder / "saved", nbytes, arguments.rounds)
    block = bare.buffer(64 << 20)
    found["crc32c of 64 MiB"] = []
    for _ in range(20):
        start = time.perf_counter()
        native.crc32c(block)
        found["crc32c of 64 MiB"].append(time.perf_counter() - start)

    def rate(name: str, size: int = nbytes) -> str:
        return f"{size / median(found[name]) / 1e9:.2f} GB/s"

    def share(name: str) -> str:
        return str(neighbours.share(found[PAIRS[name]], found[name]))

    page = Report(
        "disk",
        f"Persist and restore {arguments.megabytes} MiB, against bare copies of the same bytes",
        Path(arguments.folder or tempfile.gettempdir()),
        columns=("", "zerostall", "floor", "share of the floor", "the floor is"),
    )
    for label, name, what in (
        ("persist an image", "write", "aligned O_DIRECT writer, fsync"),
        ("read an image", "read", "aligned O_DIRECT reader"),
        ("save, until on disk", "save to disk", "aligned O_DIRECT writer, fsync"),
        ("restore from disk", "restore disk", "aligned O_DIRECT reader"),
        ("restore from host memory", "restore host", "memory copy by torch, all threads"),
    ):
        page.rows.append((label, rate(name), rate(PAIRS[name]), share(name), what))
    for label, name in (("processors, persisting", "write"), ("processors, reading", "read")):
        spent = median(engine.processors[name]) / nbytes * 1e9
        page.rows.append((label, f"{spent:.2f} s a GB", "–", "–", ""))
    page.rows.append(("CRC-32C, one core", rate("crc32c of 64 MiB", 64 << 20), "–", "–", ""))
    page.goals = {
        "CRC-32C ≥ 10 GB/s a core": rate("crc32c of 64 MiB", 64 << 20),
        "persist ≥ 95 % of a bare writer": share("write"),
        "under one core per 2 GB/s written (0.5 s a GB)": page.rows[-3][1],
        "restore from host ≥ 80 % of a memory copy": share("restore host"),
        "read an image ≥ 95 % of a bare reader": share("read"),
        "restore from disk ≥ 95 % of a bare reader": share("restore disk"),
    }
    page.notes = [
        f"{arguments.rounds} rounds (from disk half as many) after one that is not counted; rates are medians; "
        f"{THREADS} threads on both sides, "
        "the bare ones' memory in huge pages",
        "a share is the median of ratios of neighbours, each turn of ours beside one of the floor, in turn the first; "
        "in brackets between what it lies with 95 % confidence",
        "what was written before is removed before either clock begins",
        "restore and its bare reader read the same file: where it lies on the disk is worth some percent",
        "persist, read and restore check every chunk's CRC-32C",
        "save until on disk is all told: capture, seal, write, fsync of image, record, manifest and folders",
        "restore is the call `restore()` with the agent running; from disk its memory is empty",
    ]
    page.samples = {f"{name} s": times for name, times in found.items()}
    page.write()


if __name__ == "__main__":
    main()
