"""Committed steps of several ranks, made by hand from shards and their bytes."""

from __future__ import annotations

from pathlib import Path

from images import RUN, manifest_of
from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core import values as small_values
from zerostall.core.layout import CHUNK, Shard, View
from zerostall.core.manifest import Record
from zerostall.tiers.contract import Image
from zerostall.tiers.disk import DiskTier


def store_ranks(
    where: Path,
    step: int,
    ranks: list[list[tuple[Shard, bytes]]],
    *,
    views: dict[int, list[View]] = {},
    values: object = None,
) -> None:
    """Commit a step; each rank is given as its shards with their bytes, all ranks have the same small values."""
    where.mkdir(exist_ok=True)
    pool = native.Pool("test", 1)
    disk = DiskTier(where, pool)
    records = []
    for rank, held in enumerate(ranks):
        layout = layouts.build([shard for shard, _ in held], views.get(rank, []))
        memory = native.Segment("test", -(-layout.nbytes // 4096) * 4096)
        view = memory.view(0, layout.nbytes)
        view[: len(layout.header)] = layout.header
        data = {shard.name: data for shard, data in held}
        for entry in layout.entries:
            view[entry.offset : entry.offset + entry.nbytes] = data[entry.name]
        record = _record(layout, bytes(view), step, rank, len(ranks), values or _modules(ranks))
        disk.put(Image(layout, record, memory.address))
        records.append(record)
    disk.commit(manifest_of(*records))
    pool.close()


def _modules(ranks: list[list[tuple[Shard, bytes]]]) -> dict[str, object]:
    roots = sorted({shard.name.split(".")[0] for held in ranks for shard, _ in held})
    return {"parts": {root: ("module", {}) for root in roots}, "rng": None}


def _record(layout: layouts.Layout, data: bytes, step: int, rank: int, world: int, small: object) -> Record:
    sums = [native.crc32c(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK)]
    values = small_values.encode(small)
    return Record.of(layout, sums, values, run=RUN, step=step, rank=rank, world=world, created=1.0)
