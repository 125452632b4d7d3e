"""Bringing a state to disk, durable, beside everybody's writers and a bare one: the same bytes, in turns.

Each is done when its bytes are on the disk: files and folders are fsynced, also those of writers that do not do that
by themselves. zerostall is measured from `save` until the step is committed: capture, checksums and manifest count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import zerostall
from benchmarks import bare
from benchmarks.load import state_of
from benchmarks.report import Report, median
from benchmarks.workload import scratch
from zerostall.flow import disk_speed

THREADS = 8
WAIT = 600.0


def synced(path: Path) -> None:
    """A file, or all that is in a folder, and the folder: on the disk."""
    for one in (path, *path.rglob("*"), path.parent) if path.is_dir() else (path, path.parent):
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class Writers:
    """Each writes the state below `folder` and returns what is to be fsynced, None where it has done that itself."""

    def __init__(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        self.folder, self.state = folder, state
        self.block = bare.buffer(sum(tensor.nbytes for tensor in state.values()) // 4096 * 4096)
        self.ckpt = zerostall.Checkpointer(folder / "run", keep=1, weights=state)
        self.step = 0

    def zerostall(self) -> Path | None:
        self.step += 1
        self.ckpt.save(self.step).wait("disk", timeout=WAIT)
        return None

    def bare(self) -> Path | None:
        bare.write(self.folder / "bare", self.block, THREADS)
        return None

    def torch_save(self) -> Path | None:
        torch.save(self.state, self.folder / "state.pt")
        return self.folder / "state.pt"

    def safetensors(self) -> Path | None:
        save_file(self.state, self.folder / "state.safetensors")
        return self.folder / "state.safetensors"

    def dcp(self) -> Path | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self.state, checkpoint_id=str(self.folder / "dcp"), no_dist=True)
        return self.folder / "dcp"

    def clear(self) -> None:
        for name in ("bare", "state.pt", "state.safetensors"):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / "dcp", ignore_errors=True)


NAMES = {
    "bare": f"bare O_DIRECT writer, {THREADS} threads",
    "zerostall": "zerostall: save, until committed on disk",
    "torch_save": "torch.save",
    "safetensors": "safetensors.torch.save_file",
    "dcp": "torch.distributed.checkpoint.save",
}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--megabytes", type=int, default=1024, help="size of the state in MiB")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    options.add_argument("--out", type=Path, help="folder for the report (default: benchmarks/results)")
    arguments = options.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in NAMES}
    with scratch(arguments.folder) as folder:
        writers = Writers(folder, state_of(arguments.megabytes << 20))
        for turn in range(arguments.rounds + 1):
            order = list(NAMES)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                writers.clear()
                os.sync()
                call: Callable[[], Path | None] = getattr(writers, name)
                start = time.perf_counter()
                if (written := call()) is not None:
                    synced(written)
                if turn:  # the first round warms up
                    samples[name].append(time.perf_counter() - start)
        writers.ckpt.close()
        writers.clear()
        engine = disk_speed.samples(folder, arguments.megabytes << 20, rounds=3, threads=THREADS)
    size = len(writers.block)
    floor = median(samples["bare"])
    page = Report(
        "persist",
        f"Bringing {size >> 20} MiB of weights to disk, durable",
        Path(arguments.folder or tempfile.gettempdir()),
        columns=("", "seconds", "GB/s", "share of the floor"),
    )
    for name, label in NAMES.items():
        taken = median(samples[name])
        page.rows.append((label, f"{taken:.3f}", f"{size / taken / 1e9:.2f}", f"{100 * floor / taken:.0f} %"))
    spent = median(engine.processors["write"]) / (arguments.megabytes << 20) * 1e9
    page.goals = {
        "≥ 95 % of a bare O_DIRECT writer": page.rows[1][3],
        "under one core per 2 GB/s written, checksums included (0.5 s a GB)": f"{spent:.2f} s a GB",
    }
    page.notes = [
        f"{arguments.rounds} rounds, another writer first in each, medians, after one that warms up",
        "the disk has nothing else to write when each begins (sync); every file and folder is fsynced, also for those "
        "that return before",
        "zerostall reads the state while it checks and writes, keeps an image in host memory, and training could go on",
        "processor time: of the writer alone, as `zerostall bench disk` measures it",
    ]
    page.samples = {f"{name} s": times for name, times in samples.items()}
    page.samples["processors, writing s a GB"] = [
        one / (arguments.megabytes << 20) * 1e9 for one in engine.processors["write"]
    ]
    path = page.write(arguments.out) if arguments.out else page.write()
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
