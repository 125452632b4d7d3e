"""Trains a small GPT with a checkpoint after every step. Kill it at any moment and start it again: it goes on.

    python examples/gpt/train.py --out runs/gpt --steps 200        # as often as you like; Ctrl-C, kill -9, ...
    python examples/gpt/train.py --steps 200                       # the same without any checkpoint

Both print the same digest of the final weights and optimizer state.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import zerostall
from data import Batches, standard_library_text
from model import GPT, Shape


@dataclass(frozen=True)
class Job:
    """Everything that changes while training."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    batches: Batches


def make_job(shape: Shape, *, batch: int, steps: int, seed: int) -> Job:
    """A job at step 0: the same one for the same arguments."""
    torch.manual_seed(seed)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    batches = Batches(standard_library_text(), batch=batch, length=shape.context, seed=seed)
    return Job(model, optimizer, scheduler, batches)


def train_one_step(job: Job) -> float:
    """One training step; returns the loss."""
    loss = job.model.loss(job.batches.next())
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    return loss.item()


def train(job: Job, first: int, last: int, save: Callable[[int], object]) -> None:
    """Steps `first` to `last - 1`, each followed by `save(number of finished steps)` and one printed line."""
    for step in range(first, last):
        start = time.perf_counter()
        loss = train_one_step(job)
        save(step + 1)
        milliseconds = (time.perf_counter() - start) * 1e3
        print(f"step {step + 1} loss {loss:.4f} {milliseconds:.1f} ms", flush=True)


def digest(job: Job) -> str:
    """SHA-256 over every bit of the weights and of the optimizer's state."""
    whole = hashlib.sha256()

    def add(name: str, tensor: Tensor) -> None:
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    for name, parameter in job.model.named_parameters():
        add(name, parameter)
        for key, value in sorted(job.optimizer.state[parameter].items()):
            add(f"{name}.{key}", value)
    return whole.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="folder of the checkpoints; without it none are made")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    torch.use_deterministic_algorithms(True)
    shape = Shape(width=arguments.width, layers=arguments.layers)
    job = make_job(shape, batch=arguments.batch, steps=arguments.steps, seed=arguments.seed)
    if arguments.out is None:
        train(job, 0, arguments.steps, lambda step: None)
    else:
        with zerostall.Checkpointer(
            arguments.out,
            model=job.model,
            optimizer=job.optimizer,
            scheduler=job.scheduler,
            batches=job.batches,
        ) as ckpt:
            start = time.perf_counter()
            done = ckpt.restore()  # 0 when nothing was saved
            milliseconds = (time.perf_counter() - start) * 1e3
            tier = ckpt.stats.restored_from or "nothing"
            print(f"restored step {done} from {tier} in {milliseconds:.1f} ms", flush=True)
            train(job, done, arguments.steps, ckpt.save)
    print(f"digest {digest(job)}")


if __name__ == "__main__":
    main()
