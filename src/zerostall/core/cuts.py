"""How a tensor is dealt out over a mesh of ranks: cuts, one after the other, and which boxes a rank gets by them.

A cut divides one dimension among `parts` ranks as `torch.chunk` does: all get equally much, rounded up, but the last
ones, which may get less or nothing. One with `strips` first divides the dimension into so many strips and cuts each: so
FSDP cuts what tensor parallelism has cut before (torch's `_StridedShard`).

FSDP's first version lays tensors one behind the other and cuts that: a rank has a run of a tensor's elements, in their
order, which may begin and end anywhere (`FLAT`).
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from zerostall.core.boxes import Box, stretch

if TYPE_CHECKING:
    from collections.abc import Sequence

FLAT = -1
"""In the place of a cut's dimension: elements of many tensors, one behind the other, are cut, `strips` a rank."""

Spans: TypeAlias = list[tuple[int, int]]
"""Ranges (begin, end) of one dimension, one behind the other in a rank's own tensor."""


class Cut(msgspec.Struct, frozen=True, gc=False):
    """One dimension of a mesh divides dimension `dim` of a tensor; for `FLAT` see there."""

    dim: int
    parts: int
    strips: int = 1


class Held(msgspec.Struct, frozen=True):
    """What a rank holds of a tensor: its own tensor of that shape, and where the elements of it belong."""

    spans: tuple[Spans, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rank's own tensor."""
        return tuple(sum(end - begin for begin, end in spans) for spans in self.spans)

    def boxes(self, part: Box | None = None) -> list[tuple[Box, Box]]:
        """Return (box of the global tensor, where it lies in the rank's own tensor), of all or of a part of the own."""
        axes: list[list[tuple[int, int, int]]] = []
        for dim, spans in enumerate(self.spans):
            low, high = (0, 1 << 63) if part is None else (part.start[dim], part.start[dim] + part.shape[dim])
            axes.append(_placed(spans, low, high))
        return [
            (
                Box(tuple(begin for begin, _, _ in one), tuple(size for _, _, size in one)),
                Box(tuple(own for _, own, _ in one), tuple(size for _, _, size in one)),
            )
            for one in product(*axes)
        ]


class Run(msgspec.Struct, frozen=True, gc=False):
    """A rank's elements `begin` to `end` of a tensor of that shape, in row-major order; its own tensor is flat."""

    whole: tuple[int, ...]
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rank's own tensor."""
        return (self.end - self.begin,)

    def boxes(self, part: Box | None = None) -> list[tuple[Box, Box]]:
        """As `Held.boxes`; the second of a pair is flat."""
        first, count = (0, self.end - self.begin) if part is None else (part.start[0], part.shape[0])
        found: list[tuple[Box, Box]] = []
        for box in stretch(self.whole, self.begin + first, self.begin + first + count):
            found.append((box, Box((first,), (box.count,))))
            first += box.count
        return found


def _placed(spans: Spans, low: int, high: int) -> list[tuple[int, int, int]]:
    """(global begin, own begin, size) of each span, as far as it lies in low to high of the own tensor."""
    found: list[tuple[int, int, int]] = []
    own = 0
    for begin, end in spans:
        first, last = max(own, low), min(own + end - begin, high)
        if first < last:
            found.append((begin + first - own, first, last - first))
        own += end - begin
    return found


def held(shape: Sequence[int], cuts: Sequence[Cut], indexes: Sequence[int], ahead: int = 0) -> Held | Run:
    """Return what the rank at these indexes (one a cut) holds of a tensor of that shape.

    `ahead`: elements that lie before it in what a `FLAT` cut divides, which stands alone.
    """
    if cuts and cuts[0].dim == FLAT:
        begin, end = (cuts[0].strips * (indexes[0] + n) - ahead for n in (0, 1))
        count = math.prod(shape)
        first = min(max(begin, 0), count)
        return Run(tuple(shape), first, max(first, min(end, count)))
    spans: list[Spans] = [[(0, size)] for size in shape]
    for cut, index in zip(cuts, indexes, strict=True):
        whole = spans[cut.dim]
        mine: Spans = []
        for strip in range(cut.strips):
            part = _chunk(whole, cut.strips, strip)
            mine += _chunk(part, cut.parts, index)
        spans[cut.dim] = mine
    return Held(tuple(spans))


def _chunk(spans: Spans, parts: int, index: int) -> Spans:
    """The index-th of `parts` equal parts, as `torch.chunk` makes them, of spans one behind the other."""
    total = sum(end - begin for begin, end in spans)
    size = -(-total // parts)
    return [(begin, begin + count) for begin, _, count in _placed(spans, index * size, (index + 1) * size)]
