"""Ranks whose images have one layout: they differ in their bytes and in where their boxes begin."""

from __future__ import annotations

import bisect
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zerostall.core.boxes import Box
    from zerostall.core.layout import Layout
    from zerostall.core.shards import Entry


class Kind:
    """Ranks of one layout.

    Attributes:
        layout: that of the first of them.
        ranks: rising.
        begins: each rank's own, in the same order.
    """

    def __init__(self, layout: Layout, ranks: Sequence[int], begins: Sequence[Sequence[int]]) -> None:
        self.layout = layout
        self.ranks = ranks
        self.begins = begins
        self._lines: dict[int, _Line] = {}

    def near(self, entry: Entry, numbers: Sequence[int], wanted: Box) -> Iterator[int]:
        """Yield which of the ranks, counted from 0, have in that entry's box something of the one that is wanted.

        `numbers`: of the entry's begins. Little more work than there are such ranks, however many others there are.
        """
        sizes = enumerate(zip(entry.shape, entry.global_shape, strict=True))
        cut = [dim for dim, (size, total) in sizes if size != total]
        spans = [
            (number, wanted.start[dim] - entry.shape[dim] + 1, wanted.start[dim] + wanted.shape[dim])
            for dim, number in zip(cut, numbers, strict=True)
        ]
        # Along one dimension many may be near, where another tells at once who is.
        number, low, high = min(spans, key=lambda span: self._line(span[0]).count(*span[1:]))
        others = [span for span in spans if span[0] != number]
        for index in self._line(number).between(low, high):
            mine = self.begins[index]
            if all(low <= mine[other] < high for other, low, high in others):
                yield index

    def _line(self, number: int) -> _Line:
        found = self._lines.get(number)
        if found is None:
            found = self._lines[number] = _Line([mine[number] for mine in self.begins])
        return found


class _Line:
    """Where the boxes of all ranks begin along one dimension."""

    def __init__(self, begins: Sequence[int]) -> None:
        at: dict[int, list[int]] = {}
        for index, begin in enumerate(begins):
            at.setdefault(begin, []).append(index)
        self._begins = sorted(at)
        self._indexes = [at[begin] for begin in self._begins]
        self._before = [0, *accumulate(map(len, self._indexes))]

    def count(self, low: int, high: int) -> int:
        """How many begin from `low` on and before `high`."""
        first, last = (bisect.bisect_left(self._begins, edge) for edge in (low, high))
        return self._before[max(first, last)] - self._before[first]

    def between(self, low: int, high: int) -> Iterator[int]:
        for at in range(bisect.bisect_left(self._begins, low), bisect.bisect_left(self._begins, high)):
            yield from self._indexes[at]


def kinds(layouts: Iterable[tuple[int, Layout]]) -> list[Kind]:
    """Sort ranks, rising, by their layouts."""
    alike: dict[str, list[tuple[int, Layout]]] = {}
    for rank, layout in layouts:
        alike.setdefault(layout.digest, []).append((rank, layout))
    return [
        Kind(each[0][1], [rank for rank, _ in each], [layout.begins for _, layout in each]) for each in alike.values()
    ]
