"""What a layout holds as its user knows it: one line a tensor, aliases told from what has bytes of its own."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from zerostall.core.dtypes import DTYPES
from zerostall.core.shards import DISTINCT, Entry, View

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerostall.core.layout import Layout

_DIGITS = re.compile("([0-9]+)")

NaturalKey: TypeAlias = tuple[tuple[int, int, str], ...]


class Content(msgspec.Struct, frozen=True, gc=False):
    """One named tensor of a layout.

    Attributes:
        name, dtype, shape: as the user knows it.
        nbytes: of its elements, each counted as often as the shape has it.
        entry: where its bytes lie.
        view: which of them are its own; None where that is the whole entry, in order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    entry: Entry
    view: View | None

    @property
    def alias_of(self) -> str:
        """The name of the tensor whose bytes these are; empty where they are its own."""
        return "" if self.name == self.entry.name or self.entry.name.endswith(DISTINCT) else self.entry.name

    @property
    def twin(self) -> bool:
        """Whether this is an alias with the very same elements, type and shape as its entry."""
        return self.view is None and self.name != self.entry.name


def contents(layout: Layout) -> tuple[Content, ...]:
    """Return every tensor of a layout that a user named, in natural order (`layers.2` before `layers.10`)."""
    found = [
        Content(entry.name, entry.dtype, entry.shape, entry.nbytes, entry, None)
        for entry in layout.entries
        if not entry.name.endswith(DISTINCT)
    ]
    bases = {entry.name: entry for entry in layout.entries}
    for view in layout.views:
        base = bases[view.base]
        nbytes = math.prod(view.shape) * DTYPES[view.dtype].itemsize
        part = None if is_whole_view(view, base) else view
        found.append(Content(view.name, view.dtype, view.shape, nbytes, base, part))
    return tuple(sorted(found, key=lambda content: natural(content.name)))


def natural(name: str) -> NaturalKey:
    """Return a key that sorts numbers within names by their value."""
    parts = _DIGITS.split(name)
    # Numbers by length, then as text: int() would be slow for absurdly long ones.
    return tuple(
        (len(part.lstrip("0")), 1, part.lstrip("0")) if odd % 2 else (0, 0, part) for odd, part in enumerate(parts)
    )


def runs(shape: Sequence[int], strides: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, count, stride), in elements, of the runs that make up a strided tensor in row-major order.

    As few runs as dimensions allow: those that lie behind each other as one run would are joined.
    """
    if 0 in shape:
        return
    sizes, steps = _joined(shape, strides)
    if not sizes:
        yield 0, 1, 1
        return
    count, stride = sizes.pop(), steps.pop()
    index = [0] * len(sizes)
    start = 0
    while True:
        yield start, count, stride
        for dim in reversed(range(len(sizes))):
            index[dim] += 1
            start += steps[dim]
            if index[dim] < sizes[dim]:
                break
            start -= index[dim] * steps[dim]
            index[dim] = 0
        else:
            return


def _joined(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if sizes and steps[-1] == size * stride:
            sizes[-1] *= size
            steps[-1] = stride
        else:
            sizes.append(size)
            steps.append(stride)
    return sizes, steps


def is_whole_view(view: View, base: Entry) -> bool:
    """Return whether a view is all of its base, in order, under another name."""
    if view.start or view.dtype != base.dtype or view.shape != base.shape:
        return False
    if 0 in view.shape:
        return True
    sizes, steps = _joined(view.shape, view.strides)
    return not sizes or (len(sizes) == 1 and steps == [1])
