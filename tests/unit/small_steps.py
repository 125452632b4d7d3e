"""Steps that hold whatever a test says, without a trainer."""

from __future__ import annotations

import random
from pathlib import Path

from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core import values
from zerostall.core.layout import Shard, View
from zerostall.flow import importing

DATA = random.Random(7).randbytes(1 << 16)


def store(where: Path, step: int, shards: list[Shard], views: list[View] = [], small: object = None) -> None:
    """A step whose tensors hold the first bytes of DATA, each of them anew."""
    layout = layouts.build(shards, views)

    def fill(segment: native.Segment, pool: native.Pool) -> None:
        view = segment.view(0, layout.nbytes)
        view[: len(layout.header)] = layout.header
        for entry in layout.entries:
            for at in range(0, entry.nbytes, len(DATA)):
                size = min(len(DATA), entry.nbytes - at)
                view[entry.offset + at : entry.offset + at + size] = DATA[:size]

    importing.store(where, step, layout, values.encode(small or {"parts": {}, "rng": None}), fill)


def module(*shards: Shard) -> dict[str, object]:
    return {"parts": {name: ("module", {}) for name in {shard.name.split(".")[0] for shard in shards}}, "rng": None}


def image(where: Path, step: int) -> Path:
    return where / f"step-{step:012d}" / "rank-00000.safetensors"


def whole(name: str, dtype: str = "float32", *shape: int) -> Shard:
    return Shard.whole(name, dtype, shape)
