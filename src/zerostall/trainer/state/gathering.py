"""From "this stored tensor goes to that tensor" to what is read of which rank's image, where several ranks have it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from zerostall.core import reshard
from zerostall.core.shards import View
from zerostall.errors import CorruptError
from zerostall.trainer.state import sharded, tensors, writes
from zerostall.trainer.state.aliasing import contiguous_strides
from zerostall.trainer.state.spread import Loose, alone

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerostall.core.pieces import Piece, Whole
    from zerostall.core.reshard import Read
    from zerostall.trainer.state.stored_step import StoredStep
    from zerostall.trainer.state.tensors import Geometry, Holder


@dataclass(frozen=True, slots=True)
class Look:
    """A view into a tensor that one rank has whole, and what is filled from it.

    Attributes:
        alone: nothing else is written into the target's memory.
    """

    piece: Piece
    view: View
    target: Holder
    alone: bool = False


@dataclass(slots=True)
class Share:
    """What is read of one rank's image.

    Attributes:
        runs: one run of bytes each, in the order of their offsets, none over another: (offset, bytes, target).
        boxes: what does not lie in one run.
        looks: views; after all else.
    """

    runs: list[tuple[int, int, Holder]] = field(default_factory=list)
    boxes: list[tuple[Read, Holder]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)

    def chunks(self, chunk_bytes: int) -> list[int]:
        """The chunks of the image that are needed, rising."""
        found = set(reshard.chunks(self.reads, chunk_bytes))
        for look in self.looks:
            begin, end = look.piece.offset, look.piece.offset + look.piece.nbytes
            found.update(range(begin // chunk_bytes, -(-end // chunk_bytes)))
        return sorted(found)

    def loose_chunks(self, chunk_bytes: int) -> list[int]:
        """Those that are read past `native.Scatter`, which checks the others while it copies."""
        found = set(reshard.chunks([read for read, _ in self.boxes], chunk_bytes))
        for look in self.looks:
            begin, end = look.piece.offset, look.piece.offset + look.piece.nbytes
            found.update(range(begin // chunk_bytes, -(-end // chunk_bytes)))
        return sorted(found)

    def pour(self, image: torch.Tensor) -> None:
        """Fill what is not filled run by run. `image`: its bytes, of which the loose chunks have been checked."""
        for read, target in self.boxes:
            source = writes.view_of(_bytes(image, read.piece), _all(read.piece, tensors.dtype_name(target) or ""))
            part = tensors.part_of(source, read.source)
            assert isinstance(part, torch.Tensor)
            writes.copy_into(target, part)
        for look in self.looks:
            writes.copy_into(look.target, writes.view_of(_bytes(image, look.piece), look.view))

    def loose(self, chunk_bytes: int) -> Loose:
        """What `pour` fills, to be filled as chunks come."""
        found = Loose(chunk_bytes)
        for read, target in self.boxes:
            part, strides = read.source, contiguous_strides(read.piece.box.shape)
            begin = sum(index * stride for index, stride in zip(part.start, strides, strict=True)) * read.itemsize
            view = View("", "", tensors.dtype_name(target) or "", part.shape, strides, begin)
            found.add(read.piece.offset, view, target, alone=True)  # else it is memory of its own already
        for look in self.looks:
            found.add(look.piece.offset, look.view, look.target, alone=look.alone)
        return found

    def sort(self) -> None:
        """Put the runs in order; what lies over another is read as a box."""
        found = sorted(
            ((*run, read, target) for read, target in self._single if (run := read.run()) is not None),
            key=lambda item: item[:2],
        )
        at = 0
        for offset, nbytes, read, target in found:
            if offset >= at:
                self.runs.append((offset, nbytes, target))
                at = offset + nbytes
            else:
                self.boxes.append((read, target))
        self._single.clear()

    _single: list[tuple[Read, Holder]] = field(default_factory=list)

    def add(self, read: Read, target: Holder) -> None:
        """Take in elements to be read; `sort` comes when all are there."""
        self.reads.append(read)
        (self.boxes if read.run() is None else self._single).append((read, target))


@dataclass(frozen=True, slots=True)
class Overlap:
    """A box whose target lies over another's: it is read into memory of its own first.

    Attributes:
        covered: the other target decides, this one is only compared with it.
    """

    name: str
    target: Holder
    read: torch.Tensor
    covered: bool


@dataclass(slots=True)
class Gathering:
    """What is read of all images.

    Attributes:
        shares: rank -> what is read of its image.
        targets: every tensor that is written into.
        overlaps: what is copied, or compared, when all else is there.
        refused: name -> why its target cannot be written.
    """

    shares: dict[int, Share] = field(default_factory=dict)
    targets: list[Holder] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def share(self, rank: int) -> Share:
        return self.shares.setdefault(rank, Share())

    def settle(self) -> list[str]:
        """All bytes are there: copy what lies over another, one after the other. What the user is to be told."""
        for overlap in self.overlaps:
            if not overlap.covered:
                writes.copy_into(overlap.target, overlap.read)
        covered = [overlap for overlap in self.overlaps if overlap.covered]
        return [writes.contradiction(one.name) for one in covered if not writes.alike(one.target, one.read)]


def plan(step: StoredStep, pairs: Iterable[tuple[str, Holder]]) -> Gathering:
    """Decide how each pair (stored name, target of its shape and type) is filled.

    CorruptError, naming the tensor and the box, where a part of it is stored nowhere.
    """
    found = Gathering()
    written: set[tuple[Geometry, str]] = set()
    overlaps: dict[int, list[Overlap]] = {}
    filled: list[tuple[str, Whole, Holder]] = []
    for name, holder in pairs:
        view = step.state.views.get(name)
        whole = step.wholes[name if view is None else view.base]
        found.targets.append(holder)
        if view is not None and not _is_all(view, whole):
            _look(found, name, view, whole, holder)
        elif writes.repeats(holder):
            found.refused[name] = writes.EXPANDED
        elif (where := tensors.geometry(holder), whole.name) not in written:  # else two names of one memory
            written.add((where, whole.name))
            filled.append((name, whole, holder))
    over = writes.overlaps((tensors.geometry(holder), number) for number, (_, _, holder) in enumerate(filled))
    for number, (name, whole, holder) in enumerate(filled):
        for box, target in sharded.parts(name, holder):
            goal = target
            if number in over:
                goal = torch.empty(
                    box.shape, dtype=tensors.torch_dtype(whole.dtype), device=writes.as_tensor(target).device
                )
                overlaps.setdefault(number, []).append(Overlap(name, target, goal, over[number]))
            for read in reshard.reads(whole, box):
                found.share(read.piece.rank).add(read, tensors.part_of(goal, read.target))
    found.overlaps += [one for number in over for one in overlaps.get(number, ())]
    single = alone(found.targets) if any(share.looks for share in found.shares.values()) else frozenset()
    for share in found.shares.values():
        share.sort()
        share.looks = [replace(one, alone=tensors.geometry(one.target).storage in single) for one in share.looks]
    return found


def _look(found: Gathering, name: str, view: View, whole: Whole, holder: Holder) -> None:
    if len(whole.pieces) != 1 or whole.pieces[0].box.shape != whole.shape:
        raise CorruptError(f"{name} is a view into {whole.name}, of which no rank has stored all")
    piece = whole.pieces[0]
    if tensors.is_distributed(holder):
        for box, target in sharded.parts(name, holder):
            start = view.start + sum(a * b for a, b in zip(box.start, view.strides, strict=True)) * _itemsize(holder)
            part = View(view.name, view.base, view.dtype, box.shape, view.strides, start)
            found.share(piece.rank).looks.append(Look(piece, part, target))
        return
    if writes.repeats(holder):
        once = writes.once(view, holder)
        if once is None:
            found.refused[name] = writes.EXPANDED
            return
        view, holder = writes.narrowed(view), once
    found.share(piece.rank).looks.append(Look(piece, view, holder))


def _itemsize(holder: Holder) -> int:
    return holder.element_size() if isinstance(holder, torch.Tensor) else holder.itemsize


def _is_all(view: View, whole: Whole) -> bool:
    return (view.dtype, view.shape, view.strides, view.start) == (
        whole.dtype,
        whole.shape,
        contiguous_strides(whole.shape),
        0,
    )


def _bytes(image: torch.Tensor, piece: Piece) -> torch.Tensor:
    return image[piece.offset : piece.offset + piece.nbytes]


def _all(piece: Piece, dtype: str) -> View:
    return View("", "", dtype, piece.box.shape, contiguous_strides(piece.box.shape), 0)
