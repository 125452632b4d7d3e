"""What a step of zerostall.optim.AdamW costs beside torch's fused one, with no snapshot in flight, and when it flips.

    python -m benchmarks.optimizers [--out results.json]

Three shapes of a model, each with the same number of elements; times are of the device (events around a step) and of
the thread that calls it, medians of 30 steps. "flips": every moment is still to be read by a snapshot when the step
comes; "flips and keeps": every parameter too.
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
BLOCKS, STEPS = 3, 10


class AllPending:
    """A snapshot that has read nothing yet when the step comes, and everything right afterwards."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, parameters: bool) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self.places: dict[tuple[int, int], int] = {}

    def look(self) -> None:
        """What a checkpointer would know from its own look at the tensors, at `save`."""
        tensors = [state[key] for state in self._optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        tensors += self._optimizer.state if self._parameters else ()
        self.places = {(tensor.data_ptr(), tensor.nbytes): place for place, tensor in enumerate(tensors)}

    def pending(self) -> dict[tuple[int, int], int]:
        return self.places

    def claim(self, left: object, kept: object) -> AllPending:
        return self

    def release(self) -> None:
        pass

    def over(self) -> bool:
        return True


def optimizer_of(kind: Callable[..., torch.optim.Optimizer], tensors: int) -> torch.optim.Optimizer:
    each = ELEMENTS // tensors
    parameters = [nn.Parameter(torch.zeros(each, device="cuda")) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return kind(parameters, fused=True)


def steps(optimizer: torch.optim.Optimizer, snapshot: AllPending | None) -> list[tuple[float, float]]:
    """Seconds of the device and of this thread, of each step."""
    tensors = sum(len(group["params"]) for group in optimizer.param_groups)
    found = []
    for _ in range(STEPS):
        if snapshot is not None:
            snapshot.look()
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000 + 30_000 * tensors)  # cycles, so that the device does not wait for this thread
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
        samples: dict[str, list[tuple[float, float]]] = {}
        for kind in ("torch", "zerostall", "flips", "flips and keeps"):
            samples[kind] = []
            snapshot = None
            optimizer = optimizer_of(torch.optim.AdamW if kind == "torch" else zerostall.optim.AdamW, tensors)
            optimizer.step()
            if isinstance(optimizer, zerostall.optim.AdamW) and "flips" in kind:
                snapshot = AllPending(optimizer, parameters="keeps" in kind)
                optimizer.flip_for(snapshot, 16 << 30)
            steps(optimizer, snapshot)
            for _ in range(BLOCKS):
                samples[kind] += steps(optimizer, snapshot)
            if isinstance(optimizer, zerostall.optim.AdamW):
                optimizer.flip_for(None, 0)  # each knows the other
            del optimizer, snapshot
            torch.cuda.empty_cache()
        row: dict[str, object] = {"shape": name, "bytes": 28 * ELEMENTS}
        for kind, found in samples.items():
            device, thread = (statistics.median(column) for column in zip(*found, strict=True))
            row[kind] = {"device_seconds": device, "thread_seconds": thread, "bytes_per_second": 28 * ELEMENTS / device}
            print(f"{name:>14} {kind:>15}: {device * 1e3:6.2f} ms on the device, {thread * 1e3:6.2f} ms to call")
        rows.append(row)
    if arguments.out:
        document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        arguments.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
