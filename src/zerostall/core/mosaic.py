"""A tensor whose parts lie in several places, and where each stretch of its elements is to be found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from zerostall.core.quoting import dims
from zerostall.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Tile(msgspec.Struct, frozen=True, gc=False):
    """A box of a tensor, and where its elements lie.

    Attributes:
        start, shape: which box.
        strides: in elements, of how it lies in its source.
        source: number of the source, in whatever list the caller has.
        offset: in bytes, of its first element in that source.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: int
    offset: int

    @property
    def extent(self) -> int:
        """Elements from the first to behind the last, as they lie in the source."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @staticmethod
    def whole(shape: Sequence[int], source: int, offset: int) -> Tile:
        """A tensor that lies in one place, in row-major order."""
        return Tile((0,) * len(shape), tuple(shape), row_major(shape), source, offset)


class Run(NamedTuple):
    """Elements that lie `stride` apart: `size` of them from byte `offset` of a source, the first of them element `at`
    of the tensor in row-major order.
    """

    at: int
    source: int
    offset: int
    size: int
    stride: int


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor without holes in row-major order."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Mosaic:
    """A tensor of `shape` made of tiles; made by `of`.

    Attributes:
        tiles: no two of the same box, in the order of their boxes.
        outer: how many dimensions are left when those behind, which every tile has whole and in order, count as one.
    """

    shape: tuple[int, ...]
    itemsize: int
    tiles: tuple[Tile, ...]
    outer: int

    @staticmethod
    def of(shape: Sequence[int], itemsize: int, tiles: Iterable[Tile]) -> Mosaic:
        """Boxes that are there more than once (replicas) count once. FormatError for one outside the tensor."""
        whole = tuple(shape)
        kept: dict[tuple[tuple[int, ...], tuple[int, ...]], Tile] = {}
        for tile in tiles:
            if len(tile.start) != len(whole) or any(
                begin < 0 or begin + size > total
                for begin, size, total in zip(tile.start, tile.shape, whole, strict=True)
            ):
                raise FormatError(f"the box {dims(tile.shape)} at {dims(tile.start)} is not within {dims(whole)}")
            if 0 not in tile.shape:
                kept.setdefault((tile.start, tile.shape), tile)
        found = tuple(tile for _, tile in sorted(kept.items()))
        return Mosaic(whole, itemsize, found, _outer(whole, found))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def in_order(self) -> bool:
        """Whether every run has a stride of 1, so that what is asked for is all that needs to be read."""
        unit = math.prod(self.shape[self.outer :])
        return self.outer == 0 or all(
            tile.shape[self.outer - 1] == 1 or tile.strides[self.outer - 1] == unit for tile in self.tiles
        )

    def runs(self, first: int, count: int) -> Iterator[Run]:
        """Yield the runs that make up elements `first` to `first + count`, in order, each element once.

        FormatError where no tile holds an element.
        """
        at = first
        for run in self._overlapping(first, first + count):
            if run.at > at:
                break
            spare = at - run.at
            if spare < run.size:
                yield Run(at, run.source, run.offset + spare * run.stride * self.itemsize, run.size - spare, run.stride)
                at = run.at + run.size
        if at != first + count:
            raise FormatError(f"of a tensor {dims(self.shape)}, element {at} is stored nowhere")

    def _overlapping(self, first: int, end: int) -> Iterator[Run]:
        if first >= end or not self.tiles:
            return
        if self.outer == 0:
            tile = self.tiles[0]
            yield Run(first, tile.source, tile.offset + first * self.itemsize, end - first, 1)
            return
        unit = math.prod(self.shape[self.outer :])
        line = self.shape[self.outer - 1] * unit
        lines = self.shape[: self.outer - 1]
        index = list(_unravel(first // line, lines))
        near = self._near(first // line, (end - 1) // line, lines)
        for number in range(first // line, (end - 1) // line + 1):
            for tile in near:
                base = 0
                for place, begin, size, stride in zip(index, tile.start, tile.shape, tile.strides, strict=False):
                    if not begin <= place < begin + size:
                        break
                    base += (place - begin) * stride
                else:
                    yield from self._of_line(tile, base, number * line, unit, first, end)
            _advance(index, lines)

    def _near(self, first_line: int, last_line: int, lines: tuple[int, ...]) -> list[Tile]:
        """Tiles that these lines may cross, in the order in which a line crosses them."""
        last = self.outer - 1
        near: Iterable[Tile] = self.tiles
        if lines:
            inner = math.prod(lines[1:])
            low, high = first_line // inner, last_line // inner
            near = [tile for tile in near if tile.start[0] <= high and low < tile.start[0] + tile.shape[0]]
        return sorted(near, key=lambda tile: tile.start[last])

    def _of_line(self, tile: Tile, base: int, begin: int, unit: int, first: int, end: int) -> Iterator[Run]:
        """Runs of one line (its first element is `begin`) within a tile, cut to `first` to `end`."""
        dim = self.outer - 1
        size, stride = tile.shape[dim], tile.strides[dim]
        begin += tile.start[dim] * unit
        if size == 1 or stride == unit:
            stretches = [(begin, base, size * unit, 1)]
        elif unit == 1:
            stretches = [(begin, base, size, stride)]
        else:
            stretches = [(begin + number * unit, base + number * stride, unit, 1) for number in range(size)]
        for at, place, count, step in stretches:
            low, high = max(at, first), min(at + count, end)
            if low < high:
                offset = tile.offset + (place + (low - at) * step) * self.itemsize
                yield Run(low, tile.source, offset, high - low, step)


def _outer(shape: tuple[int, ...], tiles: Sequence[Tile]) -> int:
    outer, unit = len(shape), 1
    while outer:
        dim = outer - 1
        if not all(tile.shape[dim] == shape[dim] and (shape[dim] == 1 or tile.strides[dim] == unit) for tile in tiles):
            break
        unit *= shape[dim]
        outer = dim
    return outer


def _unravel(number: int, shape: Sequence[int]) -> Iterator[int]:
    behind = math.prod(shape)
    for size in shape:
        behind //= size
        yield number // behind
        number %= behind


def _advance(index: list[int], shape: Sequence[int]) -> None:
    for dim in reversed(range(len(index))):
        index[dim] += 1
        if index[dim] < shape[dim]:
            return
        index[dim] = 0
