"""What lies here and there in an image, filled chunk by chunk as these come, in whatever order.

Columns of a matrix, or aliases that are apart in the target: no copy engine brings them, and none of them needs more
of the image in memory than the chunk that is there just now.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from zerostall.core.dtypes import DTYPES
from zerostall.core.shards import View
from zerostall.core.strides import lying_in
from zerostall.trainer.state import tensors, writes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerostall.trainer.state.tensors import Holder


@dataclass(frozen=True, slots=True)
class Spread:
    """Elements of an image, and what they fill.

    Attributes:
        begin: the byte of the image that the view's elements are counted from.
        shape, strides: of what is read, in elements.
        target: of that shape.
    """

    begin: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    target: Holder

    @property
    def end(self) -> int:
        """The byte behind the last."""
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.begin + (0 if 0 in self.shape else (reach + 1) * DTYPES[self.dtype].itemsize)

    def pour(self, at: int, data: torch.Tensor) -> None:
        """Fill what lies in `data`, the image's bytes from `at` on, which divides no element."""
        itemsize = DTYPES[self.dtype].itemsize
        first = -(-(at - self.begin) // itemsize)
        last = (at + data.numel() - self.begin) // itemsize
        for box in lying_in(self.shape, self.strides, first, last):
            place = sum(index * stride for index, stride in zip(box.start, self.strides, strict=True))
            view = View("", "", self.dtype, box.shape, self.strides, self.begin - at + place * itemsize)
            writes.copy_into(tensors.part_of(self.target, box), writes.view_of(data, view))


@dataclass(frozen=True, slots=True)
class _Last:
    """What is there when all chunks are, for a target whose memory others are written into, too.

    Attributes:
        compared: of this name, another decides about the target, and a difference is told; "" is copied.
    """

    target: Holder
    read: torch.Tensor
    compared: str


@dataclass(slots=True)
class Loose:
    """All that lies so in one image.

    Args:
        chunk_bytes: of the image.
    """

    chunk_bytes: int
    _of_chunk: dict[int, list[Spread]] = field(default_factory=dict)
    _last: list[_Last] = field(default_factory=list)

    def add(self, begin: int, view: View, target: Holder, *, alone: bool, compared: str = "") -> None:
        """Have what a view names, counted from byte `begin`, go to a target.

        Args:
            alone: nothing else is written into the target's memory; else it is written when all is there.
            compared: see `_Last`.
        """
        start, shape, strides, dtype = begin + view.start, view.shape, view.strides, view.dtype
        itemsize = DTYPES[dtype].itemsize
        # An element that begins anywhere may lie in two chunks, so it is put together byte by byte.
        odd = start % itemsize != 0
        if odd or compared or not alone:
            read = torch.empty(shape, dtype=tensors.torch_dtype(dtype))
            self._last.append(_Last(target, read, compared))
            target = read
            if odd:
                target = writes.as_bits(read.reshape(-1)).view(torch.uint8).view(*shape, itemsize)
                shape, strides, dtype = (*shape, itemsize), (*(itemsize * stride for stride in strides), 1), "uint8"
        spread = Spread(start, dtype, shape, strides, target)
        for chunk in range(start // self.chunk_bytes, -(-spread.end // self.chunk_bytes)):
            self._of_chunk.setdefault(chunk, []).append(spread)

    def __contains__(self, chunk: int) -> bool:
        """Whether something may lie there."""
        return chunk in self._of_chunk

    def pour(self, chunk: int, data: torch.Tensor) -> None:
        """Fill what lies in a chunk, whose bytes these are."""
        for spread in self._of_chunk.get(chunk, ()):
            spread.pour(chunk * self.chunk_bytes, data)

    def settle(self) -> list[str]:
        """All chunks have come, and all else is written: write what had to wait. The names of what differs."""
        for last in self._last:
            if not last.compared:
                writes.copy_into(last.target, last.read)
        return [one.compared for one in self._last if one.compared and not writes.alike(one.target, one.read)]


def alone(holders: Iterable[Holder]) -> frozenset[int]:
    """The memory, by `Geometry.storage`, that only one of these is in."""
    found = Counter(tensors.geometry(holder).storage for holder in holders)
    return frozenset(storage for storage, count in found.items() if count == 1)
