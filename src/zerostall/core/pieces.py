"""A step as a whole: the tensors that all ranks' images hold together, and which image holds which box of each.

Of several boxes of one tensor in one image the first has the tensor's name, the others have `[=box <number>]` behind
it. What belongs to one rank alone, while data of that name on other ranks is other data, has `[=rank <number>]`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.boxes import Box, tiling_problem
from zerostall.core.contents import is_whole_view
from zerostall.core.shards import View, untiled
from zerostall.errors import CorruptError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zerostall.core.layout import Layout
    from zerostall.core.shards import Entry

_RANK = re.compile(r"\[=rank ([0-9]+)\]\Z")


def local_name(name: str, rank: int) -> str:
    """Return what a tensor is called that belongs to one rank alone."""
    return f"{name}[=rank {rank}]"


def owner(name: str) -> tuple[str, int | None]:
    """Return the user's name of a tensor, and the rank that it belongs to alone, if it does."""
    match = _RANK.search(name) if name.endswith("]") else None
    return (name[: match.start()], int(match[1])) if match else (name, None)


class Piece(msgspec.Struct, frozen=True, gc=False):
    """One box of a tensor, `nbytes` from byte `offset` on of a rank's image, row by row."""

    rank: int
    offset: int
    nbytes: int
    box: Box


class Whole(msgspec.Struct, frozen=True):
    """A tensor of the step, and where all of it is stored.

    Attributes:
        pieces: in the order of where they begin; none has an element of another.
        longest: how far a piece reaches along the first dimension at most.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    longest: int

    def problem(self) -> str:
        """Say in words why not all of it is there; empty where it is."""
        if len(self.pieces) == 1 and self.pieces[0].box.shape == self.shape:
            return ""
        return tiling_problem(self.shape, [piece.box for piece in self.pieces])


class Pieces(msgspec.Struct, frozen=True):
    """What a step holds.

    Attributes:
        wholes: by name.
        views: other names, by name; their bases are names of wholes. One that is all of its base has the base's shape.
    """

    wholes: dict[str, Whole]
    views: dict[str, View]

    def insist(self, names: Iterable[str] | None = None) -> None:
        """Make sure that every element of these tensors is stored. CorruptError names the tensor and what is wrong."""
        for name in self.wholes if names is None else names:
            if problem := self.wholes[name].problem():
                raise CorruptError(f"{name} is not stored whole: {problem}")


def gather(layouts: Sequence[Layout | None]) -> Pieces:
    """Put together what the images of all ranks hold; None for a rank whose image is not looked at.

    Linear. FormatError where ranks contradict each other; names the tensor and the ranks.
    """
    found: dict[str, dict[Box, Piece]] = {}
    facts: dict[str, tuple[str, tuple[int, ...], int]] = {}
    views: dict[str, View] = {}
    for rank, layout in enumerate(layouts):
        if layout is None:
            continue
        for entry in layout.entries:
            name = untiled(entry.name)
            kind = facts.setdefault(name, (entry.dtype, entry.global_shape, rank))
            if kind[:2] != (entry.dtype, entry.global_shape):
                raise FormatError(
                    f"{name} is {kind[0]} {kind[1]} on rank {kind[2]} and {entry.dtype} {entry.global_shape} on {rank}"
                )
            box = Box(entry.start, entry.shape)
            # Where two ranks have stored the very same, one is enough.
            found.setdefault(name, {}).setdefault(box, Piece(rank, entry.offset, entry.nbytes, box))
        if layout.views:
            _take_views(layout, views)
    wholes: dict[str, Whole] = {}
    for name, pieces in found.items():
        longest = max(piece.box.shape[0] if piece.box.shape else 1 for piece in pieces.values())
        wholes[name] = Whole(name, *facts[name][:2], tuple(sorted(pieces.values(), key=_place)), longest)
    return Pieces(wholes, views)


def _place(piece: Piece) -> tuple[int, ...]:
    return piece.box.start


def _take_views(layout: Layout, views: dict[str, View]) -> None:
    bases = {entry.name: entry for entry in layout.entries}
    for view in layout.views:
        base = bases[view.base]
        name, of = untiled(view.name), untiled(view.base)
        views.setdefault(name, _global_view(name, of, view, base))


def _global_view(name: str, of: str, view: View, base: Entry) -> View:
    if base.shape == base.global_shape:
        return View(name, of, view.dtype, view.shape, view.strides, view.start)
    if not is_whole_view(view, base):
        raise FormatError(f"{view.name} looks into a part of {of}")
    strides: list[int] = []
    step = 1
    for size in reversed(base.global_shape):
        strides.append(step)
        step *= max(size, 1)
    return View(name, of, view.dtype, base.global_shape, tuple(reversed(strides)), 0)
