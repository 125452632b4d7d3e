"""The training job that is measured: the GPT of examples/gpt, and flat copies of its bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.machine import ROOT
from benchmarks.peers.contract import Training

# Examples are scripts, not a package.
sys.path.insert(0, str(ROOT / "examples" / "gpt"))

from model import Shape
from train import Job, make_job, train_one_step

__all__ = ["Job", "copy_seconds", "gpt", "scratch", "state_bytes", "train_one_step"]


def gpt(*, width: int, layers: int, batch: int, context: int) -> Job:
    """A job that has made two steps, so that the optimizer's state exists."""
    job = make_job(Shape(width=width, layers=layers, context=context), batch=batch, steps=10_000, seed=1)
    for _ in range(2):
        train_one_step(job)
    return job


def state_bytes(job: Training) -> int:
    """Bytes of weights and optimizer state."""
    tensors = [*job.model.parameters()]
    for state in job.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def copy_seconds(nbytes: int, repeats: int = 15) -> list[float]:
    """Times of a plain copy of so many bytes from memory to memory, by torch with all its threads; memory touched."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.ones_like(source)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return times


@contextmanager
def scratch(parent: str | None) -> Iterator[Path]:
    """A folder to write to, with an agent of its own that is gone (like the folder) at the end."""
    folder = Path(tempfile.mkdtemp(prefix="zerostall-bench-", dir=parent))
    before = os.environ.get("ZEROSTALL_RUNTIME_DIR")
    os.environ["ZEROSTALL_RUNTIME_DIR"] = str(folder / "agent")
    try:
        yield folder
    finally:
        stop = [sys.executable, "-m", "zerostall.cli", "agent", "stop", "--force"]
        subprocess.run(stop, capture_output=True, timeout=60, check=False)
        if before is None:
            del os.environ["ZEROSTALL_RUNTIME_DIR"]
        else:
            os.environ["ZEROSTALL_RUNTIME_DIR"] = before
        shutil.rmtree(folder, ignore_errors=True)
