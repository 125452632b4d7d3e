"""A round trip of a state through memory, with no agent and no disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerostall.core import layout as layouts
from zerostall.core.layout import CHUNK
from zerostall.core.manifest import Record
from zerostall.tiers.contract import Stored
from zerostall.trainer.load import tree
from zerostall.trainer.state import RestoreReport, State
from zerostall.trainer.writes import as_tensor


@dataclass(frozen=True)
class Saved:
    """An image, its layout and its record, all through their encodings."""

    stored: Stored
    image: bytearray


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def save(*, rng: bool = False, **roots: object) -> Saved:
    return save_state(State(roots, rng=rng))


def save_state(state: State) -> Saved:
    survey = state.survey()
    values = state.values(survey)
    image = bytearray(survey.layout.nbytes)
    image[: len(survey.layout.header)] = survey.layout.header
    data = torch.frombuffer(image, dtype=torch.uint8)
    for entry, holder in zip(survey.layout.entries, survey.tensors, strict=True):
        if entry.nbytes:
            data[entry.offset : entry.offset + entry.nbytes] = bits(as_tensor(holder))
    record = Record(
        run="r",
        step=1,
        rank=0,
        world=1,
        layout=survey.layout.digest,
        nbytes=survey.layout.nbytes,
        chunk_bytes=CHUNK,
        checksums=[],
        checksum=0,
        values=values.encode(),
    )
    return Saved(Stored(layouts.decode(layouts.encode(survey.layout)), record), image)


def restore(saved: Saved, /, *, rng: bool = False, options: dict | None = None, **roots: object) -> RestoreReport:
    return restore_state(saved, State(roots, rng=rng), **(options or {}))


def restore_state(saved: Saved, state: State, **options: object) -> RestoreReport:
    targets = state.targets(saved.stored, **options)
    data = torch.frombuffer(saved.image, dtype=torch.uint8)
    for index, holder in zip(targets.entries, targets.tensors, strict=True):
        entry = saved.stored.layout.entries[index]
        target = as_tensor(holder)
        if entry.nbytes:
            source = data[entry.offset : entry.offset + entry.nbytes].clone().view(target.dtype).view(target.shape)
            target.copy_(source)
    return state.accept(targets, memoryview(saved.image))


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
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other or (one != one and other != other)
    return one == other
