"""Where a rank's boxes begin, told apart from all else that a layout says: ranks that are cut alike share one layout.

A *begin* is where boxes begin along one dimension. A layout says which of a rank's begins each box has; the begins
themselves stand in the rank's record, and in the manifest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zerostall.core.shards import Entry, Shard


def numbered(boxes: Iterable[Shard | Entry]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return for each box the numbers of its begins, one for each dimension in which it is smaller than its tensor, and
    the begins.

    Boxes have a begin in common where the dimension, the sizes of box and tensor, and the begin are the same; so ranks
    that are cut alike number theirs alike.
    """
    known: dict[tuple[int, int, int, int], int] = {}
    numbers: list[tuple[int, ...]] = []
    for box in boxes:
        if box.shape == box.global_shape:
            numbers.append(())
            continue
        mine = [
            known.setdefault((dim, size, total, begin), len(known))
            for dim, (size, total, begin) in enumerate(zip(box.shape, box.global_shape, box.start, strict=True))
            if size != total
        ]
        numbers.append(tuple(mine))
    return tuple(numbers), tuple(begin for _, _, _, begin in known)


def count_of(numbers: Iterable[Sequence[int]]) -> int:
    """How many begins boxes with these numbers of begins need."""
    return 1 + max((max(mine) for mine in numbers if mine), default=-1)


def start_of(
    shape: Sequence[int], whole: Sequence[int], numbers: Sequence[int], begins: Sequence[int]
) -> tuple[int, ...]:
    """Where a box begins that has the begins of these numbers; there is one for each dimension that needs it."""
    mine = iter(numbers)
    return tuple(0 if size == total else begins[next(mine)] for size, total in zip(shape, whole, strict=True))


def insist(numbers: Sequence[Sequence[int]], begins: Sequence[int], source: str) -> None:
    """FormatError where these are not the begins that boxes with these numbers need."""
    needed = count_of(numbers)
    if len(begins) != needed:
        raise FormatError(f"{source}: {len(begins)} begins are told, its boxes need {needed}")
