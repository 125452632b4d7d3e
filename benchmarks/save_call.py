"""Time of the call `save(step)` on the training thread, and of building the plan, by the number of tensors.

The state is a module of many parameters with AdamW: a quarter parameters, the rest optimizer state, as in training.
With `--device cuda` all of it lies on a GPU, 1 024 tensors of it: `python -m benchmarks.save_call --device cuda`.
"""

from __future__ import annotations

import argparse
import functools
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

import zerostall
from benchmarks import stages
from benchmarks.report import Report, median, percentile, seconds
from benchmarks.workload import scratch
from zerostall import native
from zerostall.core import layout

WAIT = 120.0
T = TypeVar("T")


class Many(nn.Module):
    """A module of `count` parameters of `elements` floats."""

    def __init__(self, count: int, elements: int, device: str = "cpu") -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(elements, device=device)) for _ in range(count)])


@dataclass
class Calls:
    """Times in seconds.

    Attributes:
        first: of the first call.
        later: of those after, each after an update.
        guards: of the guards.
        controls: of work that takes as long as a call, in the same places of the same loop: what the machine itself
            adds to it.
        disturbed: calls and controls that a thread or process pushed off the core, or that slept.
    """

    first: float = 0.0
    later: list[float] = field(default_factory=list)
    guards: list[float] = field(default_factory=list)
    controls: list[float] = field(default_factory=list)
    disturbed: list[int] = field(default_factory=lambda: [0, 0])


def _switches() -> int:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw + usage.ru_nivcsw


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def save_calls(folder: Path, tensors: int, elements: int, saves: int, device: str = "cpu") -> Calls:
    """Each call, and each control, follows an update."""
    model = Many(tensors // 4, elements, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device != "cpu")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = Calls()
    usual = 100e-6

    def timed(kind: int, call: Callable[[], T]) -> tuple[float, T]:
        optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()
        switches, start = _switches(), time.perf_counter()
        result = call()
        took = time.perf_counter() - start
        found.disturbed[kind] += _switches() != switches
        return took, result

    with zerostall.Checkpointer(folder, model=model, optimizer=optimizer, keep=2) as ckpt:
        for step in range(1, saves + 2):
            took, saving = timed(0, functools.partial(ckpt.save, step))
            if step == 1:
                found.first = took
                found.disturbed[0] = 0
            else:
                found.later.append(took)
                usual = min(usual, took) if len(found.later) > 1 else took
            if saving.skipped:
                raise SystemExit(f"save {step} was skipped, though the one before was finished")
            saving.wait("host", timeout=WAIT)
            if step % 2 == 0:  # so that every other call follows a save, every other a control
                found.controls.append(timed(1, functools.partial(_spin, usual))[0])
        found.guards = list(ckpt.stats.guard_seconds)
    return found


def split(page: Report, tensors: int, elements: int, saves: int, arguments: argparse.Namespace) -> None:
    """Some more saves with clocks around their parts, for the notes."""
    parts: dict[str, list[float]] = {}
    for row in (0, 1, 3):
        with scratch(arguments.folder) as folder, stages.clocks(row) as samples:
            save_calls(folder / "saved", tensors, elements, saves, arguments.device)
        parts |= {name: times[2:] for name, times in samples.items() if name.startswith("call") or row == 0}
    parts = {name: times for name, times in parts.items() if len(times) > 2}
    named = "; ".join(f"{name} {seconds(median(times))} (min {seconds(min(times))})" for name, times in parts.items())
    page.notes.append(f"the parts of a call at {tensors:,} tensors, with clocks around them: {named}")
    page.samples.update({f"{name} s": times for name, times in parts.items()})


def plan_seconds(tensors: int, repeats: int = 3) -> list[float]:
    """Times of building layout and plan for so many tensors from nothing."""
    shards = [layout.Shard(f"model.weights.{i}", "float32", (256,), (256,), (0,)) for i in range(tensors)]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        built = layout.build(shards)
        native.Plan(
            nbytes=built.nbytes,
            header=built.header,
            chunk_bytes=layout.CHUNK,
            offsets=[entry.offset for entry in built.entries],
            sizes=[entry.nbytes for entry in built.entries],
        )
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--saves", type=int, default=300, help="calls at 1 000 tensors")
    options.add_argument("--many-saves", type=int, default=20, help="calls at 100 000 tensors")
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the tensors are")
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    arguments = options.parse_args()
    on_device = arguments.device != "cpu"
    page = Report(
        "save_call_cuda" if on_device else "save_call",
        f"Time of save() on the training thread{', all tensors on one GPU' if on_device else ''}",
        Path(arguments.folder or tempfile.gettempdir()),
        columns=("tensors", "of", "calls", "p50", "p99", "max", "first call", "layout and plan"),
    )
    few = 1_024 if on_device else 1_000
    goals = {few: ("p50 ≤ 100 µs", "p99 ≤ 1 ms"), 100_000: ("p50 ≤ 10 ms", None)}
    cases = [(few, 16_384, arguments.saves)] + [(100_000, 256, arguments.many_saves)] * (not on_device)
    for tensors, elements, saves in cases:
        with scratch(arguments.folder) as folder:
            found = save_calls(folder / "saved", tensors, elements, saves, arguments.device)
        plans = plan_seconds(tensors)
        calls = found.later
        page.samples[f"call at {tensors} s"] = calls
        page.samples[f"control at {tensors} s"] = found.controls
        page.samples[f"guard at {tensors} s"] = found.guards
        alone = [seconds(percentile(found.controls, share)) for share in (0.5, 0.99, 1.0)]
        page.notes.append(
            f"at {tensors:,} tensors, the machine alone: {len(found.controls)} spins as long as the shortest call, in "
            f"the same loop: p50 {alone[0]}, p99 {alone[1]}, max {alone[2]}; {found.disturbed[1]} of them lost the "
            f"core, and {found.disturbed[0]} of the {len(calls)} calls"
        )
        page.samples[f"plan at {tensors} s"] = plans
        p50, p99 = percentile(calls, 0.5), percentile(calls, 0.99)
        times = map(seconds, (p50, p99, max(calls), found.first, median(plans)))
        page.rows.append((f"{tensors:,}", f"{elements * 4 >> 10} KiB", str(saves), *times))
        for goal, value in zip(goals[tensors], (p50, p99), strict=True):
            if goal:
                page.goals[f"{tensors:,} tensors: {goal}"] = seconds(value)
    if not on_device:
        slope = median(page.samples["plan at 100000 s"]) / median(page.samples["plan at 1000 s"])
        page.goals["plan: linear, < 3 s at 100,000"] = (
            f"{seconds(median(page.samples['plan at 100000 s']))}, {slope:.0f} × that of 1,000"
        )
    page.notes = [
        *page.notes,
        "parameters of a module and AdamW's state; a quarter of the tensors are its 4-byte step counts",
        "each call follows an optimizer step and the end of the capture before",
        "first call: survey of the state, layout, plan and the memory lease",
        f"beside the call, the guard before the next update: {seconds(median(page.samples[f'guard at {few} s']))}",
    ]
    split(page, few, 16_384, min(50, arguments.saves), arguments)
    page.write()


if __name__ == "__main__":
    main()
