"""What a save costs the training loop, beside torch.save and DCP async_save: a short run of benchmarks/loop_time.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.loop_time import Samples  # noqa: E402
from benchmarks.plots import step_times  # noqa: E402
from benchmarks.report import median, percentile, seconds  # noqa: E402

LABELS = {
    "torch.save": "torch.save",
    "dcp-stager": "DCP async_save, best setting",
    "overlap": "[bold]zerostall",
}


def compare(console: Console, folder: Path, plot: Path, *, short: bool) -> None:
    """Measures, prints the table and writes the plot."""
    target = folder / "loop.json"
    blocks, steps = (2, 4) if short else (4, 6)
    command = [sys.executable, "-m", "benchmarks.loop_time", f"--peers={','.join(LABELS)}", f"--json={target}"]
    command += ["--width=256", "--batch=8", "--layers=4", "--context=128", "--every=1", "--durable=1"]
    command += [f"--blocks={blocks}", f"--steps={steps}"]
    with console.status("the same loop with others' checkpoints: " + ", ".join(LABELS)):
        subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    found = [Samples(**one) for one in json.loads(target.read_text())]

    title = f"A save after every step, {found[0].nbytes / 1e6:.0f} MB of weights and optimizer state"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for head in ("step without", "step with", "stall p50", "p99", "max", "added per save", "skipped"):
        table.add_column(head, justify="right")
    for one in found:
        cells = [seconds(median(one.bare)), seconds(median(one.saved))]
        cells += [seconds(percentile(one.stall, share)) for share in (0.5, 0.99, 1.0)]
        table.add_row(LABELS[one.peer], *cells, f"[bold]{seconds(median(one.added))}", str(one.skipped))
    console.print(table)
    console.print(
        "stall: the call and the wait before the next update, on the training thread; added: all that the loop loses "
        "per save,\nbackground work included. Medians of alternating blocks with and without, each system in a process "
        "of its own."
    )
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores + 1:
        console.print(f"[yellow]this machine is busy (load {load:.1f} on {cores} cores): these times are rough")
    if short:
        console.print("--short takes few samples: for a better look leave it out, or see `make bench`")
    step_times(found, plot)
    console.print(f"plot of the step times: {plot}")
