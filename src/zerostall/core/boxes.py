"""Boxes: rectangular parts of a tensor, and what two of them have in common. Pure arithmetic on integers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Box(msgspec.Struct, frozen=True, gc=False, order=True):
    """The elements from `start` on, `shape` of them in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return all of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The first index behind it, in each dimension."""
        return tuple(begin + size for begin, size in zip(self.start, self.shape, strict=True))

    def within(self, outer: Box) -> Box:
        """Return the same elements, counted from where `outer` begins."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def common(one: Box, other: Box) -> Box | None:
    """Return the elements that are in both; None where there are none."""
    start: list[int] = []
    shape: list[int] = []
    for a, m, b, n in zip(one.start, one.shape, other.start, other.shape, strict=True):
        first = a if a > b else b
        size = (a + m if a + m < b + n else b + n) - first
        if size <= 0:
            return None
        start.append(first)
        shape.append(size)
    return Box(tuple(start), tuple(shape))


def stretch(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the elements `begin` to `end` of a tensor in row-major order as boxes, in that order.

    At most two boxes a dimension and one more; each lies in one piece of the tensor's memory.
    """
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the rows that are in it whole: first to last - 1
    if first > last:  # all of it lies within one row
        return [_in_row(last, box) for box in stretch(shape[1:], begin - last * row, end - last * row)]
    found: list[Box] = []
    if begin < first * row:
        found += [_in_row(first - 1, box) for box in stretch(shape[1:], begin - (first - 1) * row, row)]
    if first < last:
        found.append(Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if end > last * row:
        found += [_in_row(last, box) for box in stretch(shape[1:], 0, end - last * row)]
    return found


def _in_row(row: int, box: Box) -> Box:
    return Box((row, *box.start), (1, *box.shape))


def runs(outer: Sequence[int], inner: Box) -> Iterator[tuple[int, int]]:
    """Yield (first element, count) of the stretches of a row-major tensor of shape `outer` that make up `inner`.

    In the order of inner's own elements; as few as there can be.
    """
    if not inner.count:
        return
    joined = len(outer)  # dimensions from here on lie behind each other
    while joined > 0 and all(inner.shape[d] == outer[d] for d in range(joined, len(outer))):
        joined -= 1
    steps = [math.prod(outer[d + 1 :]) for d in range(len(outer))]
    first = sum(begin * step for begin, step in zip(inner.start, steps, strict=True))
    count = math.prod(inner.shape[joined:])
    index = [0] * joined
    while True:
        yield first, count
        for d in reversed(range(joined)):
            index[d] += 1
            first += steps[d]
            if index[d] < inner.shape[d]:
                break
            first -= index[d] * steps[d]
            index[d] = 0
        else:
            return


def one_run(outer: Sequence[int], inner: Box) -> tuple[int, int] | None:
    """Return (first element, count) where `inner` lies in one piece of a tensor of shape `outer`, else None."""
    found = runs(outer, inner)
    first = next(found, (0, 0))
    return first if next(found, None) is None else None


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Say in words why boxes do not make up a tensor of that shape, each element once; empty where they do.

    Near-linear for boxes that follow each other along one dimension, or on a grid.
    """
    filled = sorted(box for box in boxes if box.count)
    for index, box in enumerate(filled):
        for other in filled[index + 1 :]:
            if other.start and other.start[0] >= box.start[0] + box.shape[0]:
                break
            if common(box, other) is not None:
                return f"{box} and {other} overlap"
    total, have = math.prod(shape), sum(box.count for box in filled)
    return "" if have == total else f"{total - have} of its {total} elements are in no part"
