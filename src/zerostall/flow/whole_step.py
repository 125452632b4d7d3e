"""A step as if one process held all of it: every tensor whole, whatever ranks its parts lie with."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import layout as layouts
from zerostall.core import parts
from zerostall.core.boxes import Box
from zerostall.core.contents import natural
from zerostall.core.dtypes import DTYPES
from zerostall.core.layout import Shard, View
from zerostall.core.mosaic import Tile, row_major
from zerostall.core.own import first_owner, local_name, owned_name
from zerostall.core.pieces import gather
from zerostall.core.shards import DISTINCT
from zerostall.flow.catalog import opened_run
from zerostall.flow.checked_images import CheckedImage, CheckedImages
from zerostall.flow.image_reader import buffer
from zerostall.flow.present import present, read_step
from zerostall.flow.readable import Assembled
from zerostall.tiers.contract import Stored
from zerostall.tiers.disk import DiskTier

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from zerostall.core.manifest import Manifest
    from zerostall.core.pieces import Piece, Pieces, Whole
    from zerostall.tiers.contract import ImageBytes, RunTier


class WholeTensor(msgspec.Struct, frozen=True):
    """One tensor of a step.

    Attributes:
        name, dtype, shape: as the user knows it, all ranks together.
        tiles: where its parts lie; a tile's source is a rank, or the tensor that it is a view of.
        place: what two names of the very same elements have in common.
        alias: the tensor of which it is another name, or a part; empty where its elements are its own.
        base: the name of the whole that its tiles lie in; None where they lie in images.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]
    place: tuple[object, ...]
    alias: str
    base: str | None

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
        self._held = gather([image.stored.layout for image in images])
        self.tensors = _tensors(self._held)
        self._first_owner = first_owner(self._held.wholes) or ""
        self.kinds: dict[str, str] = {}
        for image in images:
            for name, kind in parts.kinds(image.stored.record.values).items():
                self.kinds.setdefault(name, kind)

    @property
    def ranks(self) -> list[Stored]:
        """Layout and record of each rank."""
        return [image.stored for image in self._images]

    def readable(self, tensor: WholeTensor, name: str = "") -> Assembled:
        """A tensor to be read, under a name of its own where it is to have one.

        Raises:
            CorruptError: not all of it is stored.
        """
        if tensor.base is not None:
            whole = self._held.wholes[tensor.base]
            base = self._whole(whole.name, whole)
            return Assembled(name or tensor.name, tensor.dtype, tensor.shape, tensor.tiles, [base])
        return self._whole(name or tensor.name, self._held.wholes[tensor.alias or tensor.name])

    def boxes(self, tensor: WholeTensor) -> list[Box]:
        """The boxes in which a tensor is stored; all of it where it is a view."""
        if tensor.base is not None:
            return [Box.whole(tensor.shape)]
        return [piece.box for piece in self._held.wholes[tensor.alias or tensor.name].pieces]

    def pieces(self, name: str) -> tuple[Piece, ...] | None:
        """Where the boxes of an entry of the merged image lie, of every element one; None for what views say it is.

        Raises:
            CorruptError: not all of it is stored.
        """
        for known in (name, local_name(name, 0), owned_name(name, self._first_owner)):
            if known in self._held.wholes:
                self._held.insist([known])
                return self._held.wholes[known].pieces
        return None

    def source(self, rank: int) -> ImageBytes:
        """The bytes of one rank's image, as they are."""
        return self._images[rank].source

    def image_of(self, rank: int) -> CheckedImage:
        """One rank's image, chunk by chunk."""
        return self._images[rank]

    def order(self, tensor: WholeTensor) -> tuple[int, int]:
        """Rank and offset of its first bytes, to read tensors in the order in which they lie."""
        pieces = self._held.wholes[tensor.base or tensor.alias or tensor.name].pieces
        return (pieces[0].rank, pieces[0].offset) if pieces else (0, 0)

    def _whole(self, name: str, whole: Whole) -> Assembled:
        self._held.insist([whole.name])
        return Assembled(name, whole.dtype, whole.shape, map(_tile, whole.pieces), self._images)

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
            self.readable(self.tensors[entry.name]).read_into(memory[entry.offset : entry.offset + entry.nbytes], 0)
        return memory


def once(tensors: Mapping[str, WholeTensor]) -> tuple[dict[str, WholeTensor], dict[str, str]]:
    """What is to be written, and the other names of the very same tensors → the name each is written under."""
    kept: dict[str, WholeTensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    # A tensor's own name before its aliases.
    for name, one in sorted(tensors.items(), key=lambda item: bool(item[1].alias)):
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
        FormatError: its ranks hold different tensors under one name.
    """
    with opened_run(where) as run, contextlib.ExitStack() as stack:
        manifest, found = read_step(run, step, lambda step: _images(run, step, stack))
        with present(run, manifest.step, manifest.created if isinstance(run, DiskTier) else None):
            yield WholeStep(run, manifest, found)


def _images(run: RunTier, step: int, stack: contextlib.ExitStack) -> tuple[Manifest, list[CheckedImage]]:
    images = stack.enter_context(contextlib.closing(CheckedImages()))
    manifest = run.manifest(step)
    stored = [run.open(step, rank) for rank in range(manifest.world)]
    return manifest, [images.add(run.bytes_of(step, rank, one), one) for rank, one in enumerate(stored)]


def _tensors(held: Pieces) -> dict[str, WholeTensor]:
    found: dict[str, WholeTensor] = {}
    for name, whole in held.wholes.items():
        if not name.endswith(DISTINCT):
            tiles = tuple(_tile(piece) for piece in whole.pieces)
            found[name] = WholeTensor(name, whole.dtype, whole.shape, tiles, (name,), "", None)
    for name, view in held.views.items():
        base = held.wholes[view.base]
        alias = "" if view.base.endswith(DISTINCT) else view.base
        same = (view.start, view.dtype, view.shape, view.strides) == (0, base.dtype, base.shape, row_major(base.shape))
        if same and alias:
            found[name] = msgspec.structs.replace(found[alias], name=name, alias=alias)
        else:
            place = (view.base, view.dtype, view.shape, view.strides, view.start)
            tile = Tile((0,) * len(view.shape), view.shape, view.strides, 0, view.start)
            found[name] = WholeTensor(name, view.dtype, view.shape, (tile,), place, alias, view.base)
    return {name: found[name] for name in sorted(found, key=natural)}


def _tile(piece: Piece) -> Tile:
    return Tile(piece.box.start, piece.box.shape, row_major(piece.box.shape), piece.rank, piece.offset)
