"""Memory that checkpointing takes: the slots, and what the agent and the trainer need beside them."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

import zerostall
from benchmarks.agent import agent_pid, cpu_seconds, private_bytes, segment_bytes
from benchmarks.report import Report
from benchmarks.workload import gpt, scratch, state_bytes

MIB = 1 << 20
SLOTS = 3
EARLY = 3


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--saves", type=int, default=300)
    options.add_argument("--idle", type=float, default=10.0, help="seconds of watching the idle agent")
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    arguments = options.parse_args()
    job = gpt(width=256, layers=4, batch=1, context=32)
    image = state_bytes(job)
    readings: dict[int, tuple[int, int, int]] = {}
    with (
        scratch(arguments.folder) as folder,
        zerostall.Checkpointer(folder / "saved", model=job.model, optimizer=job.optimizer, keep=2, slots=SLOTS) as ckpt,
    ):
        pid = 0
        for step in range(1, arguments.saves + 1):
            job.model.loss(job.batches.next()).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            saving = ckpt.save(step)
            if step in (EARLY, arguments.saves):
                saving.wait("disk", timeout=120)
                pid = pid or agent_pid()
                readings[step] = (segment_bytes(pid), private_bytes(pid), private_bytes(os.getpid()))
        before, start = cpu_seconds(pid), time.monotonic()
        time.sleep(arguments.idle)
        idle = (cpu_seconds(pid) - before) / (time.monotonic() - start)
        skipped = ckpt.stats.skipped
    page = Report(
        "memory",
        f"Memory of checkpointing a state of {image / MIB:.1f} MiB with {SLOTS} slots",
        Path(arguments.folder or tempfile.gettempdir()),
        columns=("after save", "segments", "agent beside them", "trainer beside them"),
    )
    for step, values in readings.items():
        page.rows.append((str(step), *(f"{value / MIB:.1f} MiB" for value in values)))
        page.samples[f"after save {step} bytes"] = [float(value) for value in values]
    page.samples["agent idle cpu share"] = [idle]
    allowed = SLOTS * image + 64 * MIB
    early, late = readings[EARLY], readings[arguments.saves]
    page.goals = {
        "host memory ≤ slots × image + 64 MiB": f"{late[0] / MIB:.1f} MiB of {allowed / MIB:.1f} MiB",
        f"equal after save {EARLY} and save {arguments.saves}": (
            f"segments {(late[0] - early[0]) / MIB:+.1f} MiB, agent {(late[1] - early[1]) / MIB:+.1f} MiB, "
            f"trainer {(late[2] - early[2]) / MIB:+.1f} MiB"
        ),
        "agent < 60 MiB beside the segments": f"{late[1] / MIB:.1f} MiB",
        "agent's idle CPU < 1 %": f"{100 * idle:.2f} %",
    }
    page.notes = [
        f"{arguments.saves} saves, one after each step, {skipped} of them skipped because no slot was free",
        f"agent watched for {arguments.idle:.0f} s with a trainer attached and nothing to do",
        f"torch {torch.__version__} in the trainer; the agent never imports it",
    ]
    page.write()


if __name__ == "__main__":
    main()
