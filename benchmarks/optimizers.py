"""What a step of zerostall.optim.AdamW costs beside torch's fused one, with no snapshot in flight.

    python -m benchmarks.optimizers [--out results.json]

Three shapes of a model, each with the same number of elements; times are of the device (events around a step) and of
the thread that calls it, medians of 50 steps in alternating blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import zerostall.optim

ELEMENTS = 512 << 20
SHAPES = {"64 tensors": 64, "1024 tensors": 1024, "8192 tensors": 8192}
BLOCKS, STEPS = 5, 10


def optimizer_of(kind: Callable[..., torch.optim.Optimizer], tensors: int) -> torch.optim.Optimizer:
    each = ELEMENTS // tensors
    parameters = [nn.Parameter(torch.zeros(each, device="cuda")) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return kind(parameters, fused=True)


def steps(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    """Seconds of the device and of this thread, of each step."""
    found = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # so that the device does not wait for this thread
        first.record()
        start = time.perf_counter()
        optimizer.step()
        called = time.perf_counter() - start
        last.record()
        torch.cuda.synchronize()
        found.append((first.elapsed_time(last) / 1e3, called))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name, tensors in SHAPES.items():
        samples: dict[str, list[tuple[float, float]]] = {"torch": [], "zerostall": []}
        for kind, optimizer_class in (("torch", torch.optim.AdamW), ("zerostall", zerostall.optim.AdamW)):
            optimizer = optimizer_of(optimizer_class, tensors)
            steps(optimizer)
            for _ in range(BLOCKS):
                samples[kind] += steps(optimizer)
            del optimizer
            torch.cuda.empty_cache()
        row: dict[str, object] = {"shape": name, "bytes": 28 * ELEMENTS}
        for kind, found in samples.items():
            device, thread = (statistics.median(column) for column in zip(*found, strict=True))
            row[kind] = {"device_seconds": device, "thread_seconds": thread, "bytes_per_second": 28 * ELEMENTS / device}
            print(f"{name:>14} {kind:>10}: {device * 1e3:6.2f} ms on the device, {thread * 1e3:6.2f} ms to call")
        rows.append(row)
    if arguments.out:
        document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        arguments.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
