"""From what ranks have stored to what ranks want: which bytes of which image go where. Pure.

A step's pieces (`core.pieces`) are boxes of tensors in images; what is wanted is boxes too. Where both have elements in
common, those are read: as one run of bytes where they lie so, else as a box out of a box.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from zerostall.core.boxes import Box, common, one_run, runs
from zerostall.core.dtypes import DTYPES
from zerostall.core.pieces import Piece
from zerostall.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zerostall.core.pieces import Whole


class Read(msgspec.Struct, frozen=True, gc=False):
    """Elements of one piece that are wanted.

    Attributes:
        piece: where they are stored.
        source: which elements of the piece, counted from its own begin.
        target: which elements of the box that was asked for, counted from its own begin.
        itemsize: bytes of an element.
    """

    piece: Piece
    source: Box
    target: Box
    itemsize: int

    def run(self) -> tuple[int, int] | None:
        """Return (offset in the image, bytes) where the elements lie in one run there, else None."""
        found = one_run(self.piece.box.shape, self.source)
        return None if found is None else (self.piece.offset + found[0] * self.itemsize, found[1] * self.itemsize)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (offset in the image, bytes) of each run, in the order of the elements."""
        for first, count in runs(self.piece.box.shape, self.source):
            yield self.piece.offset + first * self.itemsize, count * self.itemsize


def reads(whole: Whole, wanted: Box) -> list[Read]:
    """Find what has to be read for one box of a tensor.

    CorruptError, naming the tensor and the box, where some of it is stored nowhere.
    """
    if not wanted.count:
        return []
    itemsize = DTYPES[whole.dtype].itemsize
    found: list[Read] = []
    have = 0
    for piece in whole.near(wanted):
        both = common(piece.box, wanted)
        if both is not None:
            found.append(Read(piece, both.within(piece.box), both.within(wanted), itemsize))
            have += both.count
    if have != wanted.count:
        problem = whole.problem() or "its parts do not fit together"
        raise CorruptError(f"{whole.name}: {wanted} cannot be read in full: {problem}")
    return found


def chunks(wanted: Iterable[Read], chunk_bytes: int) -> list[int]:
    """Return the chunks of one image that these reads need, rising."""
    found: set[int] = set()
    for read in wanted:
        step = _step(read)
        if step <= chunk_bytes:  # no chunk between the first and the last is without a wanted byte
            begin, end = _extent(read)
            found.update(range(begin // chunk_bytes, (end - 1) // chunk_bytes + 1))
        else:
            for offset, nbytes in read.spans():
                found.update(range(offset // chunk_bytes, (offset + nbytes - 1) // chunk_bytes + 1))
    return sorted(found)


def _extent(read: Read) -> tuple[int, int]:
    """First byte, and the one behind the last, that a read needs of an image."""
    first = last = 0
    for size, begin, count in zip(read.piece.box.shape, read.source.start, read.source.shape, strict=True):
        first = first * size + begin
        last = last * size + begin + count - 1
    return read.piece.offset + first * read.itemsize, read.piece.offset + (last + 1) * read.itemsize


def _step(read: Read) -> int:
    """The most bytes from one run of a read to the next."""
    step = read.itemsize
    for size in read.piece.box.shape[1:]:
        step *= size
    return step
