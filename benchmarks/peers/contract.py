"""What a benchmark asks of a way to checkpoint, and how states of all of them are compared.

    verb             when the loop calls it
    save             after an update: take a snapshot, as the system's users would at every step
    persist          the same, and it goes on to disk at once; for most systems there is no difference
    before_update    after backward, before optimizer.step(): may wait until the last snapshot is taken
    staged           outside of what is timed: returns when the last snapshot has left the device
    drain            outside of what is timed: returns when everything saved is finished (on disk where persisted)
    make_room        outside of what is timed, after drain: files of finished saves may go
    load             after drain: the newest finished snapshot: path -> tensor, wherever the tensor lies
    close            once

A peer that must finish one save before the next begins waits inside `save`, as a user would have to. A state dict is
handed over as it was built once: its tensors are those of the training, and building it is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

State = dict[str, dict[str, object]]


class Training(Protocol):
    """What is checkpointed."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


class Peer(Protocol):
    """One way to checkpoint.

    Attributes:
        fsyncs: whether a finished save survives a power cut.
        outlives: what of a save survives `kill -9` of the trainer, in a word: "memory", "disk" or "nothing".
        skipped: saves that were asked for and not taken.
    """

    fsyncs: bool
    outlives: str
    skipped: int

    def save(self, step: int) -> None: ...
    def persist(self, step: int) -> None: ...
    def before_update(self) -> None: ...
    def staged(self) -> None: ...
    def drain(self) -> None: ...
    def make_room(self) -> None: ...
    def load(self) -> dict[str, torch.Tensor]: ...
    def close(self) -> None: ...


def state_of(training: Training) -> State:
    return {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}


def tensors_in(state: object, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of nested mappings and sequences, by its path."""
    if isinstance(state, torch.Tensor):
        return {path: state.detach()}
    found: dict[str, torch.Tensor] = {}
    pairs = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list) else ()
    for key, value in pairs:
        found |= tensors_in(value, f"{path}/{key}")
    return found


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Paths whose bits differ or that are missing."""

    def same(one: torch.Tensor, two: torch.Tensor) -> bool:
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        one, two = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one.to(two.device), two))
        return torch.equal(one, two)

    return [path for path, tensor in expected.items() if path not in found or not same(found[path], tensor)]


class Nothing:
    """No checkpoint at all: what the loop costs by itself."""

    fsyncs = False
    outlives = "nothing"
    skipped = 0

    def __init__(self, training: Training, folder: Path) -> None:
        del training, folder

    def save(self, step: int) -> None: ...
    def persist(self, step: int) -> None: ...
    def before_update(self) -> None: ...
    def staged(self) -> None: ...
    def drain(self) -> None: ...
    def make_room(self) -> None: ...
    def load(self) -> dict[str, torch.Tensor]:
        return {}

    def close(self) -> None: ...
