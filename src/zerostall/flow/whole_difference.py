"""How two steps differ that were stored by other ranks or in other parts: their tensors are compared as wholes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from zerostall.core import pieces
from zerostall.core.dtypes import DTYPES
from zerostall.core.mosaic import Tile, row_major
from zerostall.core.shards import DISTINCT
from zerostall.flow.checked_images import CheckedImages
from zerostall.flow.difference import Changed, Difference, Reshaped, Side, changed_elements, changed_values
from zerostall.flow.readable import Assembled

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.core.pieces import Pieces, Whole
    from zerostall.flow.checked_images import CheckedImage

_BLOCK = 1 << 20


def compare_wholes(a: Side, b: Side, count: Callable[[int], None]) -> Difference:
    """Compare tensor by tensor; `count` is told of bytes as they are read. Values are compared rank by rank.

    Raises:
        CorruptError: one of both is damaged, or a part of a tensor is stored nowhere.
    """
    result = Difference(a.step, b.step)
    with contextlib.closing(CheckedImages()) as images:
        one, other = _Opened(a, images), _Opened(b, images)
        mine, theirs = one.kinds(), other.kinds()
        result.only_a.extend(name for name in mine if name not in theirs)
        result.only_b.extend(name for name in theirs if name not in mine)
        for name, kind in mine.items():
            if name not in theirs:
                continue
            if theirs[name] != kind:
                result.reshaped.append(Reshaped(name, kind, theirs[name]))
            elif name in one.held.wholes:
                changed = _changed(one.whole(name), other.whole(name), count)
                whole = one.held.wholes[name]
                if changed:
                    elements = one.whole(name).nbytes // DTYPES[whole.dtype].itemsize
                    result.changed.append(Changed(name, whole.dtype, whole.shape, elements, changed))
                else:
                    result.equal += 1
        for rank, (left, right) in enumerate(zip(one.images, other.images, strict=False)):
            result.values.extend(changed_values(left.stored, right.stored, f"rank {rank}: "))
    return result


class _Opened:
    """One of both steps, with all of its images open."""

    def __init__(self, side: Side, images: CheckedImages) -> None:
        stored = [side.run.open(side.step, rank) for rank in range(side.manifest.world)]
        self.images: list[CheckedImage] = [
            images.add(side.run.bytes_of(side.step, rank, each), each) for rank, each in enumerate(stored)
        ]
        self.held: Pieces = pieces.gather([each.layout for each in stored])
        self.held.insist()

    def kinds(self) -> dict[str, str]:
        """What each name is, in words."""
        found = {
            name: f"{whole.dtype} {whole.shape}"
            for name, whole in self.held.wholes.items()
            if not name.endswith(DISTINCT)
        }
        for name, view in self.held.views.items():
            found[name] = f"{view.dtype} {view.shape}, within {view.base.removesuffix(DISTINCT)}"
        return found

    def whole(self, name: str) -> Assembled:
        whole: Whole = self.held.wholes[name]
        tiles = [
            Tile(piece.box.start, piece.box.shape, row_major(piece.box.shape), piece.rank, piece.offset)
            for piece in whole.pieces
        ]
        return Assembled(name, whole.dtype, whole.shape, tiles, self.images)


def _changed(one: Assembled, other: Assembled, count: Callable[[int], None]) -> int:
    """How many elements differ."""
    changed = 0
    itemsize = DTYPES[one.dtype].itemsize
    for start in range(0, one.nbytes, _BLOCK):
        size = min(_BLOCK, one.nbytes - start)
        left, right = bytearray(size), bytearray(size)
        one.read_into(memoryview(left), start)
        other.read_into(memoryview(right), start)
        changed += changed_elements(left, right, itemsize)
        count(2 * size)
    return changed
