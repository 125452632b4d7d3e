"""Which elements of a strided view lie in a stretch of memory. Pure arithmetic on integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.core.boxes import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def lying_in(shape: Sequence[int], strides: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return as boxes, each element in one of them, the elements whose places are in [begin, end).

    An element's place is the sum of its indexes times the strides, none of which is negative. Where strides are nested,
    as those of a tensor and of its transposes are, there are at most two boxes a dimension and one more.
    """
    if 0 in shape:
        return []
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])  # from the one that reaches farthest
    found: list[Box] = []
    for ranges in _ranges([(shape[dim], strides[dim]) for dim in order], begin, end):
        start, count = [0] * len(shape), [1] * len(shape)
        for dim, (first, last) in zip(order, ranges, strict=True):
            start[dim], count[dim] = first, last - first
        found.append(Box(tuple(start), tuple(count)))
    return found


def _ranges(dims: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[list[tuple[int, int]]]:
    """The same, each box as the first index and the one behind the last of each dimension, given as (size, stride)."""
    if end <= 0 or begin > sum((size - 1) * stride for size, stride in dims):
        return
    if not dims or dims[0][1] == 0:  # all of them are in the same place
        yield [(0, size) for size, _ in dims]
        return
    (size, stride), inner = dims[0], dims[1:]
    reach = sum((n - 1) * step for n, step in inner)  # from an index's first element to its last
    # The indexes that have something there, and of these the ones that are there whole.
    low, high = max(0, -(-(begin - reach) // stride)), min(size, -(-end // stride))
    first, last = max(low, -(-begin // stride)), min(high, (end - 1 - reach) // stride + 1)
    if first >= last:
        first = last = high
    for index in (*range(low, first), *range(last, high)):
        for rest in _ranges(inner, begin - index * stride, end - index * stride):
            yield [(index, index + 1), *rest]
    if first < last:
        yield [(first, last), *((0, n) for n, _ in inner)]
