"""Images made by hand: a layout, its bytes and its record, without torch."""

from __future__ import annotations

import random

from zerostall import native
from zerostall.core import layout, manifest, values
from zerostall.core.layout import CHUNK, Layout, Shard, View
from zerostall.core.manifest import Manifest, Record
from zerostall.tiers.contract import Image, RunTier
from zerostall.tiers.lone_images import Replica

RUN = "0123456789abcdef"


def make_layout(*sizes: int) -> Layout:
    """One uint8 tensor of each size."""
    return layout.build(Shard(f"model.t{index}", "uint8", (size,), (size,), (0,)) for index, size in enumerate(sizes))


LAYOUT_OF_ALL = layout.build(
    [
        Shard.whole("a", "float32", (2, 3)),
        Shard("b", "bfloat16", (2,), (8,), (6,)),
        Shard.whole("z", "complex64", ()),
        Shard.whole("f", "float4_e2m1fn_x2", (4,)),
        Shard.whole("none", "bool", (0, 2)),
    ],
    [View("v", "a", "float32", (2,), (3,), 4)],
)
"""A bit of everything: boxes, views, types that safetensors does not know, tensors without elements."""


class HandMade:
    """An image in memory of its own; keep it alive while the image is in use."""

    def __init__(self, shape: Layout, step: int, *, rank: int = 0, world: int = 1, seed: int | None = None) -> None:
        self.memory = native.Segment("hand-made", max(4096, -(-shape.nbytes // 4096) * 4096))
        view = self.memory.view(0, shape.nbytes)
        noise = random.Random(step if seed is None else seed).randbytes(shape.nbytes - len(shape.header))
        view[:] = shape.header + noise
        self.bytes = bytes(view)
        self.created = 1.0 + (step if seed is None else seed)
        self.record = record_of(shape, self.bytes, step, rank=rank, world=world, created=self.created)
        self.image = Image(shape, self.record, self.memory.address)


def record_of(
    shape: Layout, data: bytes, step: int, *, rank: int = 0, world: int = 1, run: str = RUN, created: float = 1.0
) -> Record:
    sums = [native.crc32c(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK)]
    small = values.encode({"step": step}, "values")
    return Record.of(shape, sums, small, run=run, step=step, rank=rank, world=world, created=created)


def replica_of(made: HandMade, *, run: str = RUN) -> Replica:
    """What a partner's disk says of it."""
    record = made.record
    return Replica(
        run=run,
        rank=record.rank,
        world=record.world,
        step=record.step,
        created=record.created,
        began=7.0,
        attempt="1.0",
        record=manifest.facts(record, manifest.encode_record(record)).record,
        nbytes=record.nbytes,
    )


def manifest_of(*records: Record) -> Manifest:
    first = records[0]
    return Manifest(
        run=first.run,
        step=first.step,
        world=first.world,
        created=first.created,
        ranks=tuple(manifest.facts(record, manifest.encode_record(record)) for record in records),
    )


def images_of(tier: RunTier, step: int, world: int) -> list[bytes]:
    """The bytes of every rank's image, as the tier has them."""
    found: list[bytes] = []
    for rank in range(world):
        stored = tier.open(step, rank)
        view = memoryview(bytearray(stored.layout.nbytes))
        source = tier.bytes_of(step, rank, stored)
        source.read_into(view, 0)
        source.close()
        found.append(bytes(view))
    return found
