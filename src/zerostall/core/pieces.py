"""A step as a whole: the tensors that all ranks' images hold together, and which image holds which box of each.

Of several boxes of one tensor in one image the first has the tensor's name, the others have `[=box <number>]` behind
it. What belongs to one rank alone, while data of that name on other ranks is other data, is told apart in `core.own`.
"""

from __future__ import annotations

import bisect
import functools
from itertools import repeat
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.begins import start_of
from zerostall.core.boxes import Box, tiling_problem
from zerostall.core.contents import is_whole_view
from zerostall.core.kinds import kinds
from zerostall.core.layout import THIRD
from zerostall.core.own import is_own, named_for
from zerostall.core.shards import View, untiled
from zerostall.errors import CorruptError, FormatError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from zerostall.core.kinds import Kind
    from zerostall.core.layout import Layout
    from zerostall.core.shards import Entry

_FEW = 8


class Piece(msgspec.Struct, frozen=True, gc=False):
    """One box of a tensor, `nbytes` from byte `offset` on of a rank's image, row by row."""

    rank: int
    offset: int
    nbytes: int
    box: Box


class Whole:
    """A tensor of the step, and where all of it is stored: in entries of layouts, each on all ranks of a kind.

    Not all boxes are put down, for of 16 384 ranks one looks for a few.
    """

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self._same: dict[Box, Piece] = {}  # boxes that are the same on all ranks of their kind
        self._cut: list[tuple[Kind, Entry, tuple[int, ...]]] = []

    def add(self, kind: Kind, entry: Entry, numbers: tuple[int, ...]) -> None:
        """Take in an entry; `numbers`: of its begins."""
        if numbers:
            self._cut.append((kind, entry, numbers))
        else:
            # Where two ranks have stored the very same, one is enough.
            box = Box(entry.start, entry.shape)
            self._same.setdefault(box, Piece(kind.ranks[0], entry.offset, entry.nbytes, box))

    @classmethod
    def of(cls, rank: int, name: str, entry: Entry) -> Whole:
        """A tensor of which that entry of one rank is all."""
        made = cls(name, entry.dtype, entry.global_shape)
        box = Box(entry.start, entry.shape)
        made._same[box] = Piece(rank, entry.offset, entry.nbytes, box)
        return made

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All of it, in the order of where pieces begin."""
        found = dict(self._same)
        for kind, entry, numbers in self._cut:
            for index in range(len(kind.ranks)):
                piece = _piece(kind, index, entry, numbers)
                found.setdefault(piece.box, piece)
        return tuple(sorted(found.values(), key=_place))

    def near(self, wanted: Box) -> Iterable[Piece]:
        """The pieces that may have something of that box, in the order of where they begin."""
        found = {piece.box: piece for piece in self._near(wanted)}
        for kind, entry, numbers in self._cut:
            if not entry.nbytes:
                continue
            for index in kind.near(entry, numbers, wanted):
                piece = _piece(kind, index, entry, numbers)
                found.setdefault(piece.box, piece)
        return sorted(found.values(), key=_place)

    def _near(self, wanted: Box) -> Sequence[Piece]:
        sorted_, longest = self._sorted
        if len(sorted_) < _FEW or not wanted.start:
            return sorted_
        first, stop = wanted.start[0], wanted.start[0] + wanted.shape[0]
        low = bisect.bisect_right(sorted_, first - longest, key=_begin)
        return sorted_[low : bisect.bisect_left(sorted_, stop, key=_begin)]

    @functools.cached_property
    def _sorted(self) -> tuple[list[Piece], int]:
        """Boxes that are the same everywhere, and how far one reaches along the first dimension at most."""
        found = sorted(self._same.values(), key=_place)
        return found, max((piece.box.shape[0] for piece in found if piece.box.shape), default=1)

    def problem(self) -> str:
        """Say in words why not all of it is there; empty where it is."""
        if len(self.pieces) == 1 and self.pieces[0].box.shape == self.shape:
            return ""
        return tiling_problem(self.shape, [piece.box for piece in self.pieces])


def _piece(kind: Kind, index: int, entry: Entry, numbers: tuple[int, ...]) -> Piece:
    box = Box(start_of(entry.shape, entry.global_shape, numbers, kind.begins[index]), entry.shape)
    return Piece(kind.ranks[index], entry.offset, entry.nbytes, box)


def _place(piece: Piece) -> tuple[int, ...]:
    return piece.box.start


def _begin(piece: Piece) -> int:
    return piece.box.start[0]


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

    FormatError where ranks contradict each other; names the tensor and the ranks.
    """
    return gathered(kinds((rank, layout) for rank, layout in enumerate(layouts) if layout is not None))


def gathered(found: Iterable[Kind], owners: Collection[int] | None = None) -> Pieces:
    """As `gather`, of ranks sorted by their layouts. Linear in the layouts' entries, whatever the number of ranks.

    Args:
        owners: of these ranks what is their own is taken in, None for all of them.
    """
    wholes: dict[str, Whole] = {}
    views: dict[str, View] = {}
    told: dict[str, int] = {}
    for kind in found:
        layout = kind.layout
        marked = layout.version >= THIRD
        mine = [rank for rank in kind.ranks if owners is None or rank in owners] if marked else []
        for entry, numbers in zip(layout.entries, layout.numbers or repeat(()), strict=False):
            if marked and is_own(entry.name):
                for rank in mine:
                    name = named_for(entry.name, rank)
                    if name in wholes:
                        raise FormatError(f"{name} is stored twice, once more on rank {rank}")
                    wholes[name] = Whole.of(rank, name, entry)
                continue
            name = untiled(entry.name)
            whole = wholes.get(name)
            if whole is None:
                whole = wholes[name] = Whole(name, entry.dtype, entry.global_shape)
                told[name] = kind.ranks[0]
            elif name not in told:
                raise FormatError(f"{name} is stored twice, once more on rank {kind.ranks[0]}")
            elif (whole.dtype, whole.shape) != (entry.dtype, entry.global_shape):
                raise FormatError(
                    f"{name} is {whole.dtype} {whole.shape} on rank {told[name]} "
                    f"and {entry.dtype} {entry.global_shape} on {kind.ranks[0]}"
                )
            whole.add(kind, entry, numbers)
        if layout.views:
            _take_views(layout, views, mine)
    return Pieces(wholes, views)


def _take_views(layout: Layout, views: dict[str, View], owners: Sequence[int]) -> None:
    bases = {entry.name: entry for entry in layout.entries}
    for view in layout.views:
        base = bases[view.base]
        if layout.version >= THIRD and is_own(view.name):
            for rank in owners:
                name = named_for(view.name, rank)
                views[name] = _global_view(name, named_for(view.base, rank), view, base)
            continue
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
