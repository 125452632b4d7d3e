"""Memory that checkpointing takes: the slots, and what the agent and the trainer need beside them."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

import zerostall
from benchmarks.agent import agent_pid, cpu_seconds, private_bytes, segment_bytes
from benchmarks.report import RESULTS, Report
from benchmarks.stall.loop import SIZES, Loop
from benchmarks.stall.memory import Registered, device_used, pinned_used
from benchmarks.workload import gpt, scratch, state_bytes, train_one_step

MIB = 1 << 20
SLOTS = 3
EARLY = 3


@dataclass(frozen=True)
class Reading:
    """Bytes after some save: of the agent's segments, of agent and trainer beside them, of the device, page-locked."""

    segments: int
    agent: int
    trainer: int
    device: int
    pinned: int


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--saves", type=int, default=300)
    options.add_argument("--idle", type=float, default=10.0, help="seconds of watching the idle agent")
    options.add_argument("--model", help="train one of benchmarks/stall/loop.py on a CUDA device, and save all of it")
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the report")
    arguments = options.parse_args()
    if arguments.model:
        job = Loop(SIZES[arguments.model], "cuda", flips=False)
    else:
        job = gpt(width=256, layers=4, batch=1, context=32)

    def step() -> None:
        if isinstance(job, Loop):
            job.step(None, lambda: None)
        else:
            train_one_step(job)

    step()
    image = state_bytes(job)
    readings: dict[int, Reading] = {}
    registered = Registered()
    with (
        scratch(arguments.folder) as folder,
        zerostall.Checkpointer(folder / "saved", model=job.model, optimizer=job.optimizer, keep=2, slots=SLOTS) as ckpt,
    ):
        pid = number = 0
        while ckpt.stats.saves < arguments.saves:
            step()
            number += 1
            saving = ckpt.save(number)
            if saving.skipped:
                continue
            if ckpt.stats.saves in (EARLY, arguments.saves):
                saving.wait("disk", timeout=120)
                pid = pid or agent_pid()
                memory = (segment_bytes(pid), private_bytes(pid), private_bytes(os.getpid()))
                readings[ckpt.stats.saves] = Reading(*memory, device_used(), pinned_used(registered))
            elif isinstance(job, Loop):
                saving.wait("host", timeout=120)  # steps shorter than a copy would skip most saves
        before, start = cpu_seconds(pid), time.monotonic()
        time.sleep(arguments.idle)
        idle = (cpu_seconds(pid) - before) / (time.monotonic() - start)
        skipped = ckpt.stats.skipped
    page = Report(
        "memory",
        f"Memory of checkpointing a state of {image / MIB:.1f} MiB with {SLOTS} slots",
        Path(arguments.folder or tempfile.gettempdir()),
        columns=("after save", "segments", "agent beside them", "trainer beside them", "device", "page-locked"),
    )
    for save, reading in readings.items():
        values = astuple(reading)
        page.rows.append((str(save), *(f"{value / MIB:.1f} MiB" for value in values)))
        page.samples[f"after save {save} bytes"] = [float(value) for value in values]
    page.samples["agent idle cpu share"] = [idle]
    allowed = SLOTS * image + 64 * MIB
    early, late = readings[EARLY], readings[arguments.saves]
    growth = (
        f"{field.name} {(getattr(late, field.name) - getattr(early, field.name)) / MIB:+.1f} MiB"
        for field in fields(Reading)
    )
    page.goals = {
        "host memory ≤ slots × image + 64 MiB": f"{late.segments / MIB:.1f} MiB of {allowed / MIB:.1f} MiB",
        f"equal after save {EARLY} and save {arguments.saves}": ", ".join(growth),
        "agent < 60 MiB beside the segments": f"{late.agent / MIB:.1f} MiB",
        "agent's idle CPU < 1 %": f"{100 * idle:.2f} %",
    }
    page.notes = [
        f"{arguments.saves} saves, one after each step, {skipped} more skipped because no slot was free",
        f"agent watched for {arguments.idle:.0f} s with a trainer attached and nothing to do",
        f"torch {torch.__version__} in the trainer; the agent never imports it",
    ]
    page.write(arguments.results)


if __name__ == "__main__":
    main()
