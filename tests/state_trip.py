"""A round trip of a state through memory, with no agent and no disk."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import nn

from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core.layout import CHUNK, Layout
from zerostall.core.manifest import Record
from zerostall.tiers.contract import Stored
from zerostall.trainer.state import Asked, RestoreReport, State, Survey
from zerostall.trainer.state.load import tree
from zerostall.trainer.state.writes import as_bits

_POOL = native.Pool("test", 2)


@dataclass(frozen=True)
class Saved:
    """An image, its layout and its record, all through their encodings."""

    stored: Stored
    image: bytearray


def bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = as_bits(tensor).cpu().reshape(-1)
    return torch.empty(flat.shape, dtype=flat.dtype).copy_(flat).view(torch.uint8) if flat.numel() else flat


def plan_of(layout: Layout) -> native.Plan:
    return native.Plan(
        nbytes=layout.nbytes,
        header=layout.header,
        chunk_bytes=CHUNK,
        offsets=[entry.offset for entry in layout.entries],
        sizes=[entry.nbytes for entry in layout.entries],
    )


def save(*, rng: bool = False, **roots: object) -> Saved:
    return save_state(State(roots, rng=rng))


def save_state(state: State, survey: Survey | None = None) -> Saved:
    """Save it as a later save does, which has a survey of before."""
    survey, values = state.observe(survey)
    layout = survey.layout
    image = bytearray(layout.nbytes)
    sources = native.Tensors(survey.tensors, survey.tracked)
    assert sources.refresh() == []
    address = torch.frombuffer(image, dtype=torch.uint8).data_ptr()
    capture = native.Capture(_POOL, plan_of(layout), sources, address, at_once=survey.at_once)
    assert capture.wait(60)
    record = Record(
        run="r",
        step=1,
        rank=0,
        world=1,
        layout=survey.layout.digest,
        begins=survey.layout.begins,
        nbytes=survey.layout.nbytes,
        chunk_bytes=CHUNK,
        checksums=[],
        checksum=0,
        values=values.encode(),
    )
    return Saved(Stored(layouts.decode(layouts.encode(survey.layout), record.begins), record), image)


def restore(saved: Saved, /, *, rng: bool = False, options: dict | None = None, **roots: object) -> RestoreReport:
    """Restore into these roots; `options` are those of `Asked`."""
    return restore_state(saved, State(roots, rng=rng), **(options or {}))


def restore_state(saved: Saved, state: State, **options: object) -> RestoreReport:
    targets = state.targets(saved.stored, Asked(**options))
    if targets.entries:
        into = native.Tensors(targets.tensors, [False] * len(targets.tensors))
        into.refresh()
        address = torch.frombuffer(saved.image, dtype=torch.uint8).data_ptr()
        scatter = native.Scatter(_POOL, plan_of(saved.stored.layout), into, address, targets.entries)
        assert scatter.wait(60)
    return state.accept(targets, memoryview(saved.image))


def names(saved: Saved) -> set[str]:
    return {entry.name for entry in saved.stored.layout.entries}


def aliases(saved: Saved) -> dict[str, str]:
    return {view.name: view.base for view in saved.stored.layout.views}


def load(saved: Saved) -> dict[str, object]:
    return tree(saved.stored, memoryview(saved.image))


def same(one: object, other: object) -> bool:
    """Structure, types, shapes and bits, NaN payloads included."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(bits(one), bits(other))
        )
    if hasattr(one, "tobytes") and hasattr(one, "dtype"):
        return type(one) is type(other) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other or (one != one and other != other)
    return one == other


class Average:
    """Averaged weights, with their own count."""

    def __init__(self, model: nn.Module) -> None:
        self.updates = 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict:
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict) -> None:
        self.updates, self.shadow = state["updates"], state["shadow"]
