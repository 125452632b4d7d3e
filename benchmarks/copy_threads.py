"""Time that a save adds to a training loop with one copy thread and with two, by blocks that take turns in one process.

Each block is compared with the bare blocks right before and after it, as in `loop_time`. Beside it, of the saves with
two threads, how many found both on one core when they had ended: training there has a third of it then, not half.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

import zerostall
from benchmarks import workload
from benchmarks.loop_time import cycles
from benchmarks.report import Report, interval, median, seconds

EVERY = 2


def _copiers() -> dict[int, int]:
    """Threads of this process that copy, and on which core each ran last."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "copy":
            found[int(task.name)] = int((task / "stat").read_text().rsplit(")", 1)[1].split()[36])
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--width", type=int, default=384)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--context", type=int, default=64)
    options.add_argument("--blocks", type=int, default=12, help="blocks of each number of threads")
    options.add_argument("--steps", type=int, default=8, help="steps a block, a multiple of 2")
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    arguments = options.parse_args()
    job = workload.gpt(width=arguments.width, layers=arguments.layers, batch=arguments.batch, context=arguments.context)
    nbytes = workload.state_bytes(job)
    copy = workload.copy_seconds(nbytes)
    kinds: list[int] = arguments.threads
    saves: dict[int, zerostall.Checkpointer] = {}
    added: dict[int, list[float]] = {kind: [] for kind in kinds}
    drains: dict[int, list[float]] = {kind: [] for kind in kinds}
    together = dict.fromkeys(kinds, 0)
    number = 0

    def block(kind: int | None) -> list[float]:
        nonlocal number
        times = []
        for i in range(arguments.steps):
            start = time.perf_counter()
            job.model.loss(job.batches.next()).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            number += 1
            saving = saves[kind].save(number) if kind is not None and i % EVERY == 0 else None
            times.append(time.perf_counter() - start)
            if kind is not None and saving is None:
                cores = [core for thread, core in _copiers().items() if thread in threads[kind]]
                together[kind] += len(cores) > 1 and len(set(cores)) == 1
        if kind is not None:
            saving = saves[kind].save(number + 1, when_busy="wait")
            number += 1
            saving.wait("host", timeout=120)
            drains[kind] += saves[kind].stats.drain_seconds[-arguments.steps // EVERY :]
        return cycles(times, EVERY)

    threads: dict[int, set[int]] = {}
    with workload.scratch(arguments.folder) as folder:
        before = os.environ.get("ZEROSTALL_COPY_THREADS")
        for kind in kinds:
            os.environ["ZEROSTALL_COPY_THREADS"] = str(kind)
            there = set(_copiers())
            saves[kind] = zerostall.Checkpointer(
                folder / f"with-{kind}", model=job.model, optimizer=job.optimizer, keep=2, disk_interval=1e6
            )
            threads[kind] = set(_copiers()) - there
        del os.environ["ZEROSTALL_COPY_THREADS"]
        if before is not None:
            os.environ["ZEROSTALL_COPY_THREADS"] = before
        for kind in kinds:
            block(kind)
        together = dict.fromkeys(kinds, 0)
        bare = block(None)
        for turn in range(arguments.blocks):
            for kind in kinds if turn % 2 == 0 else kinds[::-1]:
                with_saves = block(kind)
                after = block(None)
                added[kind].append(median(with_saves) - median(bare + after))
                bare = after
        for one in saves.values():
            one.close()
    page = Report(
        "copy_threads",
        f"Time a save adds by the number of copy threads: {nbytes / 1e6:.0f} MB, training on "
        f"{torch.get_num_threads()} threads",
        Path(arguments.folder or tempfile.gettempdir()),
        columns=("copy threads", "added per save", "mean and 95 %", "× plain copy", "read in", "both on one core"),
    )
    looks = arguments.blocks * (arguments.steps // EVERY)
    for kind in kinds:
        mean, half = interval(added[kind])
        spread = f"{mean * 1e3:.1f} ± {half * 1e3:.1f} ms"
        ratio = f"{median(added[kind]) / median(copy):.2f}"
        cells = (str(kind), seconds(median(added[kind])), spread, ratio, seconds(median(drains[kind])))
        page.rows.append((*cells, f"{together[kind]} of {looks}"))
        page.samples[f"added with {kind} s"] = added[kind]
        page.samples[f"read in with {kind} s"] = drains[kind]
    page.notes = [
        f"a save every {EVERY} steps; {arguments.blocks} blocks of {arguments.steps} steps, in turn with bare ones",
        f"plain copy: {seconds(median(copy))} by torch with all threads",
    ]
    page.write()


if __name__ == "__main__":
    main()
