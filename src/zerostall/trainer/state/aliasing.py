"""Tensors that share memory: each byte is stored once, and every other name of it is a view.

Three rules, storage by storage:

1. A tensor that lies wholly within a contiguous one is a view of that one.
2. Tensors with the very same elements in the same order are one entry.
3. An expanded tensor (stride 0) is stored by its distinct elements, its full shape is a view of those.

Anything else that overlaps only in part is stored separately: correct, if larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.layout import View
from zerostall.core.shards import DISTINCT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.trainer.state.tensors import Geometry


@dataclass(frozen=True, slots=True)
class Sharing:
    """What is stored, and which names are views of it.

    Attributes:
        bases: indexes of the leaves that are stored under their own name, in their order.
        expanded: indexes of the leaves whose distinct elements are stored, under name + DISTINCT.
        views: the other names.
        base_of: leaf index -> the leaf index whose entry holds its bytes, for those that are views of another leaf.
    """

    bases: list[int]
    expanded: list[int]
    views: list[View]
    base_of: dict[int, int]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor of this shape stored row by row."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def narrowed(geometry: Geometry) -> Geometry:
    """Return the geometry of an expanded tensor's distinct elements."""
    shape = tuple(1 if stride == 0 else size for size, stride in zip(geometry.shape, geometry.strides, strict=True))
    return msgspec.structs.replace(geometry, shape=shape)


def share(names: Sequence[str], geometries: Sequence[Geometry]) -> Sharing:
    """Find what is stored once. Linear but for a sort within each storage."""
    storages: dict[int, list[int]] = {}
    bases: list[int] = []
    for index, where in enumerate(geometries):
        if 0 in where.shape:
            bases.append(index)  # no memory: empties are never tied, whatever their pointers say
        else:
            storages.setdefault(where.storage, []).append(index)
    sharing = Sharing(bases, [], [], {})
    for members in storages.values():
        if len(members) == 1 and not geometries[members[0]].repeats:
            bases.append(members[0])
        else:
            _share_storage(names, geometries, members, sharing)
    bases.sort()
    return sharing


def _share_storage(names: Sequence[str], geometries: Sequence[Geometry], members: list[int], sharing: Sharing) -> None:
    # By address, the longest first: a cover stands before all that it covers. Equal ones keep the user's order.
    contiguous = [i for i in members if geometries[i].contiguous]
    contiguous.sort(key=lambda i: (geometries[i].start, -geometries[i].stop, -geometries[i].itemsize))
    covers: list[int] = []
    for index in contiguous:
        if not (covers and _cover(names, geometries, index, covers[-1], sharing)):
            sharing.bases.append(index)
            if not covers or geometries[index].stop > geometries[covers[-1]].stop:
                covers.append(index)
    twins: dict[Geometry, int] = {}
    for index in members:
        where = geometries[index]
        if where.contiguous:
            continue
        cover = _covering(geometries, covers, where)
        if cover is not None and _cover(names, geometries, index, cover, sharing):
            continue
        first = twins.setdefault(where, index)
        if first != index:
            _twin(names, geometries, index, first, sharing)
        elif where.repeats:
            sharing.expanded.append(index)
            sharing.views.append(_expansion(names[index], names[index] + DISTINCT, where))
        else:
            sharing.bases.append(index)


def _covering(geometries: Sequence[Geometry], covers: list[int], where: Geometry) -> int | None:
    """Find the contiguous tensor that holds all of `where`: starts and stops of covers both rise."""
    low, high = 0, len(covers)
    while low < high:
        middle = (low + high) // 2
        if geometries[covers[middle]].stop < where.stop:
            low = middle + 1
        else:
            high = middle
    if low == len(covers) or geometries[covers[low]].start > where.start:
        return None
    return covers[low]


def _cover(names: Sequence[str], geometries: Sequence[Geometry], index: int, cover: int, sharing: Sharing) -> bool:
    """Make leaf `index` a view of leaf `cover` if it lies within it and its elements fall on whole steps."""
    where, base = geometries[index], geometries[cover]
    start = where.start - base.start
    if start < 0 or where.stop > base.stop or start % where.itemsize:
        return False
    sharing.views.append(View(names[index], names[cover], where.dtype, where.shape, where.strides, start))
    sharing.base_of[index] = cover
    return True


def _twin(names: Sequence[str], geometries: Sequence[Geometry], index: int, first: int, sharing: Sharing) -> None:
    where = geometries[index]
    if where.repeats:
        sharing.views.append(_expansion(names[index], names[first] + DISTINCT, where))
    else:
        strides = contiguous_strides(where.shape)
        sharing.views.append(View(names[index], names[first], where.dtype, where.shape, strides, 0))
    sharing.base_of[index] = first


def _expansion(name: str, base: str, where: Geometry) -> View:
    rows = contiguous_strides(narrowed(where).shape)
    strides = tuple(0 if stride == 0 else row for row, stride in zip(rows, where.strides, strict=True))
    return View(name, base, where.dtype, where.shape, strides, 0)
