"""What a save costs training on a GPU: a GPT of 0.7 B parameters that is saved at every step.

    python -m benchmarks.stall --out results.json [--policies overlap,freeze,flip] [--targets 0.300,0.155] [--pairs 8]

Blocks of steps with and without saves alternate; a step is: save (or not), forward and backward, optimizer. Apart
from one another are reported

    call              what `save` took on the training thread
    guard             what the guard took on the training thread
    gpu_wait          what the guard inserted into the training stream, by events around it; not with "flip", whose
                      guard is within the step
    added             loop time with saves minus without, a save, pair by pair (the sum of all, and of interference)
    drain             bytes over the time from save until the last chunk had left the device
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import torch

import zerostall
import zerostall.optim
from benchmarks.workload import ROOT, scratch
from zerostall.config import Policy

sys.path.insert(0, str(ROOT / "examples" / "gpt"))

from model import GPT, Shape

CONTEXT = 1024
CEILING = 4.3e12  # bytes a second read from memory, for the floor of the added time


class Loop:
    """A model in training on the device; bf16 autocast, fp32 state."""

    def __init__(self, width: int, layers: int, *, flips: bool) -> None:
        torch.manual_seed(0)
        shape = Shape(width=width, layers=layers, heads=width // 128, context=CONTEXT, dropout=0.0)
        with torch.device("cuda"):
            self.model = GPT(shape)
        kind = zerostall.optim.AdamW if flips else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = 8
        self.looks_at_loss = True
        self.tokens = torch.randint(0, 256, (256, CONTEXT + 1), device="cuda")

    def step(self) -> float | None:
        """One step. A loop that looks at the loss, as most do, lets the CPU run ahead of the device by one step."""
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model.loss(self.tokens[: self.batch])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item() if self.looks_at_loss else None

    def seconds(self, steps: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    def aim(self, target: float) -> float:
        """Choose the batch so that a step takes about `target` seconds; what it takes then."""
        self.batch = 8
        self.seconds(3)
        short = self.seconds(4)
        self.batch = 16
        self.seconds(3)
        each = (self.seconds(4) - short) / 8
        self.batch = max(1, min(256, round(8 + (target - short) / each)))
        self.seconds(3)
        return self.seconds(4)

    def tensors(self) -> list[torch.Tensor]:
        found = [parameter.detach() for parameter in self.model.parameters()]
        for state in self.optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return found


def interval(samples: list[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval (Student's t)."""
    count = len(samples)
    t = {4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 12: 2.20, 16: 2.13}.get(count, 2.0)
    return statistics.fmean(samples), t * statistics.stdev(samples) / math.sqrt(count)


def quantile(samples: list[float], q: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def copy_rate(nbytes: int = 4 << 30) -> float:
    """Bytes a second of a plain pinned copy to the host."""
    source = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target.copy_(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(3):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 3 * nbytes / (time.perf_counter() - start)


def measure(loop: Loop, folder: Path, policy: Policy, target: float, pairs: int, steps: int) -> dict[str, object]:
    before: list[torch.cuda.Event] = []
    after: list[torch.cuda.Event] = []

    def mark(events: list[torch.cuda.Event]) -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    first = loop.optimizer.register_step_pre_hook(lambda *_: mark(before))
    start = time.perf_counter()
    ckpt = zerostall.Checkpointer(
        folder, keep=1, policy=policy, freeze_bytes=6 << 30, model=loop.model, optimizer=loop.optimizer
    )
    last = loop.optimizer.register_step_pre_hook(lambda *_: mark(after))
    number = 0
    try:
        step_seconds = loop.aim(target)
        ready = time.perf_counter()
        ckpt.save(number := number + 1, when_busy="wait").wait("host")
        first_save = time.perf_counter() - ready
        for _ in range(3):
            ckpt.save(number := number + 1, when_busy="wait")
            loop.step()
        sealed = []
        for _ in range(3):
            torch.cuda.synchronize()
            saving = ckpt.save(number := number + 1, when_busy="wait")
            began = time.perf_counter()
            saving.wait("host")
            sealed.append(time.perf_counter() - began)
        idle_drains = ckpt.stats.drain_seconds[-3:]
        skipped = ckpt.stats.skipped
        for samples in (ckpt.stats.call_seconds, ckpt.stats.guard_seconds, ckpt.stats.drain_seconds):
            samples.clear()
        differences, plain, waits, saves = [], [], [], 0
        for _ in range(pairs):
            plain.append(loop.seconds(steps))
            before.clear(), after.clear()
            torch.cuda.synchronize()
            accepted = 0
            began = time.perf_counter()
            for _ in range(steps):
                saving = ckpt.save(number := number + 1)
                accepted += not saving.skipped
                loop.step()
            torch.cuda.synchronize()
            differences.append((time.perf_counter() - began - steps * plain[-1]) / max(accepted, 1))
            saves += accepted
            waits += [one.elapsed_time(two) / 1e3 for one, two in zip(before, after, strict=True)]
            if not saving.skipped:
                saving.wait("host")
        torch.cuda.synchronize()
        stats = ckpt.stats
        # The bytes, once more: a save with steps right behind it, then restored.
        expected = [tensor.clone() for tensor in loop.tensors()]
        saving = ckpt.save(number := number + 1, when_busy="wait")
        loop.step()
        saving.wait("host")
        began = time.perf_counter()
        ckpt.restore(number)
        torch.cuda.synchronize()
        restore_seconds = time.perf_counter() - began
        exact = all(torch.equal(one, two) for one, two in zip(loop.tensors(), expected, strict=True))
        nbytes = sum(tensor.nbytes for tensor in expected)
        del expected
    finally:
        first.remove(), last.remove()
        ckpt.close()
    mean, half = interval(differences)
    return {
        "policy": policy,
        "step_seconds": statistics.fmean(plain),
        "aimed_step_seconds": target,
        "calibrated_step_seconds": step_seconds,
        "batch": loop.batch,
        "state_bytes": nbytes,
        "tensors": len(loop.tensors()),
        "saves": saves,
        "looks_at_loss": loop.looks_at_loss,
        "skipped": stats.skipped - skipped,
        "dirty": stats.dirty,
        "bit_exact": exact,
        "first_save_seconds": first_save,
        "setup_seconds": ready - start,
        "call_seconds": {"p50": quantile(stats.call_seconds, 0.5), "p99": quantile(stats.call_seconds, 0.99),
                         "max": max(stats.call_seconds)},
        "guard_cpu_seconds": {"p50": quantile(stats.guard_seconds, 0.5), "p99": quantile(stats.guard_seconds, 0.99),
                              "max": max(stats.guard_seconds)},
        "gpu_wait_seconds": {"p50": quantile(waits, 0.5), "p99": quantile(waits, 0.99), "max": max(waits)},
        "added_seconds": {"mean": mean, "half_95": half, "pairs": differences},
        "floor_seconds": nbytes / CEILING,
        "drain_seconds": {"p50": quantile(stats.drain_seconds, 0.5), "idle": idle_drains},
        "drain_bytes_per_second": {"training": nbytes / quantile(stats.drain_seconds, 0.5),
                                   "idle": nbytes / statistics.median(idle_drains)},
        "sealed_seconds_idle": sealed,
        "restore_seconds": restore_seconds,
        "raw": {"call": stats.call_seconds, "guard": stats.guard_seconds, "gpu_wait": waits, "plain": plain,
                "drain": stats.drain_seconds},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policies", default="overlap,freeze")
    parser.add_argument("--targets", default="0.300,0.155")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--run-ahead", action="store_true", help="a loop that never waits for the device")
    parser.add_argument("--folder", help="parent of the run's folder")
    arguments = parser.parse_args()
    flips = bool({"flip", "auto"} & set(arguments.policies.split(",")))
    loop = Loop(arguments.width, arguments.layers, flips=flips)
    loop.looks_at_loss = not arguments.run_ahead
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    result: dict[str, object] = {
        "command": " ".join(["python", "-m", "benchmarks.stall", *sys.argv[1:]]),
        "gpu": subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "optimizer": f"{type(loop.optimizer).__module__}.{type(loop.optimizer).__qualname__}",
        "copy_threads": os.environ.get("ZEROSTALL_COPY_THREADS", "default"),
        "parameters": sum(parameter.numel() for parameter in loop.model.parameters()),
        "pinned_copy_bytes_per_second": copy_rate(),
        "runs": [],
    }
    for target in map(float, arguments.targets.split(",")):
        for policy in arguments.policies.split(","):
            with scratch(arguments.folder) as folder:
                run = measure(loop, folder / "run", cast("Policy", policy), target, arguments.pairs, arguments.steps)
            cast("list[object]", result["runs"]).append(run)
            arguments.out.write_text(json.dumps(result, indent=1))
            shown = {key: value for key, value in run.items() if key != "raw"}
            print(json.dumps(shown, indent=1), flush=True)


if __name__ == "__main__":
    main()
