"""A step as if one process held all of it: every tensor whole, whatever ranks its parts lie with."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import layout as layouts
from zerostall.core import parts
from zerostall.core.contents import Content, contents, natural, untiled
from zerostall.core.dtypes import DTYPES
from zerostall.core.layout import Layout, Shard, View
from zerostall.core.mosaic import Tile, row_major
from zerostall.errors import CapabilityError, CorruptError
from zerostall.flow.catalog import existing, newest, opened_run
from zerostall.flow.checked_images import CheckedImage, CheckedImages
from zerostall.flow.image_reader import buffer
from zerostall.flow.pieces import Assembled
from zerostall.tiers.contract import Stored

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from zerostall.core.manifest import Manifest
    from zerostall.tiers.contract import RunTier


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """One tensor of a step.

    Attributes:
        name, dtype, shape: as the user knows it, all ranks together.
        tiles: where its parts lie; a tile's source is a rank.
        place: what two names of the very same elements have in common.
        alias: whether it is another name for a tensor that has its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]
    place: tuple[object, ...]
    alias: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class WholeStep:
    """A committed step, open for reading by any thread; made by `opened_step`.

    Attributes:
        tensors: by name, in natural order.
        kinds: name of each part of the state → its kind.
    """

    def __init__(self, run: RunTier, manifest: Manifest, images: list[CheckedImage]) -> None:
        self.where = run.where
        self.step = manifest.step
        self.manifest = manifest
        self._images = images
        self.tensors = _tensors([image.stored.layout for image in images])
        self.kinds: dict[str, str] = {}
        for image in images:
            for name, kind in parts.kinds(image.stored.record.values).items():
                self.kinds.setdefault(name, kind)

    @property
    def ranks(self) -> list[Stored]:
        """Layout and record of each rank."""
        return [image.stored for image in self._images]

    def piece(self, tensor: WholeTensor, name: str = "") -> Assembled:
        """A tensor to be read, under a name of its own where it is to have one.

        Raises:
            CorruptError: its boxes are not within it.
        """
        return Assembled(name or tensor.name, tensor.dtype, tensor.shape, tensor.tiles, self._images)

    def merged(self) -> Stored:
        """Layout and record of the image that one rank with all of it would have.

        The record's small values are those of rank 0.
        """
        if len(self._images) == 1 and all(entry.shape == entry.global_shape for entry in self.ranks[0].layout.entries):
            return self.ranks[0]
        kept, aliases = once(self.tensors)
        shards = [Shard.whole(one.name, one.dtype, one.shape) for one in kept.values()]
        views = [
            View(name, base, kept[base].dtype, kept[base].shape, row_major(kept[base].shape), 0)
            for name, base in aliases.items()
        ]
        layout = layouts.build(shards, views)
        record = self.ranks[0].record
        return Stored(
            layout, msgspec.structs.replace(record, rank=0, world=1, nbytes=layout.nbytes, layout=layout.digest)
        )

    def image(self, merged: Stored) -> memoryview:
        """The bytes of such an image, every chunk checked. Memory: all of it."""
        memory = memoryview(buffer(merged.layout.nbytes))
        if merged is self.ranks[0]:
            self._images[0].read_into(memory, 0)
            return memory
        memory[: len(merged.layout.header)] = merged.layout.header
        for entry in merged.layout.entries:
            self.piece(self.tensors[entry.name]).read_into(memory[entry.offset : entry.offset + entry.nbytes], 0)
        return memory


def once(tensors: Mapping[str, WholeTensor]) -> tuple[dict[str, WholeTensor], dict[str, str]]:
    """What is to be written, and the other names of the very same tensors → the name each is written under."""
    kept: dict[str, WholeTensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    # A tensor's own name before its aliases.
    for name, one in sorted(tensors.items(), key=lambda item: item[1].alias):
        # Empty tensors have no bytes to share.
        if one.place in seen and one.nbytes:
            aliases[name] = seen[one.place]
        else:
            kept[name] = one
            seen[one.place] = name
    return kept, aliases


@contextlib.contextmanager
def opened_step(where: str | os.PathLike[str], step: int | None) -> Iterator[WholeStep]:
    """A step (None: the newest clean one) for reading. Memory: a few chunks of 16 MiB.

    Raises:
        SnapshotNotFoundError: no such step.
        CorruptError: the step is damaged.
        CapabilityError: its ranks hold different tensors under one name.
    """
    with opened_run(where) as run, contextlib.closing(CheckedImages()) as images:
        step = newest(run) if step is None else existing(run, step)
        manifest = run.manifest(step)
        stored = [run.open(step, rank) for rank in range(manifest.world)]
        found = [images.add(run.bytes_of(step, rank, one), one) for rank, one in enumerate(stored)]
        yield WholeStep(run, manifest, found)


def _tensors(ranks: list[Layout]) -> dict[str, WholeTensor]:
    found: dict[str, WholeTensor] = {}
    tiles: dict[str, list[Tile]] = {}
    for rank, layout in enumerate(ranks):
        for content in contents(layout):
            name = untiled(content.name)
            one = _described(name, content)
            known = found.setdefault(name, one)
            if (known.dtype, known.shape) != (one.dtype, one.shape):
                raise CapabilityError(
                    f"{name} is {known.dtype} {known.shape} on one rank and {one.dtype} {one.shape} on rank {rank}: "
                    "together they are no tensor"
                )
            tiles.setdefault(name, []).append(_tile(rank, content))
    ordered = sorted(found, key=natural)
    return {name: _with(found[name], tiles[name]) for name in ordered}


def _described(name: str, content: Content) -> WholeTensor:
    entry, view = content.entry, content.view
    if view is None:
        place = (untiled(entry.name), content.dtype, entry.global_shape)
        return WholeTensor(name, content.dtype, entry.global_shape, (), place, bool(content.alias_of))
    if entry.shape != entry.global_shape:
        raise CapabilityError(f"{name} is a view of a part of {entry.name}: of which whole, nobody can say")
    place = (entry.name, content.dtype, content.shape, view.start, view.strides)
    return WholeTensor(name, content.dtype, content.shape, (), place, bool(content.alias_of))


def _tile(rank: int, content: Content) -> Tile:
    entry, view = content.entry, content.view
    if view is None:
        return Tile(entry.start, entry.shape, row_major(entry.shape), rank, entry.offset)
    return Tile((0,) * len(view.shape), view.shape, view.strides, rank, entry.offset + view.start)


def _with(one: WholeTensor, tiles: list[Tile]) -> WholeTensor:
    held = sum(math.prod(tile.shape) for tile in {(tile.start, tile.shape): tile for tile in tiles}.values())
    if held < math.prod(one.shape):
        raise CorruptError(f"of {one.name} {one.shape}, {math.prod(one.shape) - held} elements are stored nowhere")
    return WholeTensor(one.name, one.dtype, one.shape, tuple(tiles), one.place, one.alias)
