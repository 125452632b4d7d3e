"""Which rank stores what: decided by every rank for itself, from what all ranks offer, with one result.

A rank *offers* its tensors: name, type, global shape, and how it is cut over ranks. What several ranks hold alike is
divided among them by bytes, so that N holders move 1/N each. Offers that are the same on many ranks are exchanged
once: a rank says which offer is its own, and where it stands in each way of cutting.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, TypeVar

import msgspec

from zerostall.core.boxes import Box, stretch
from zerostall.core.cuts import FLAT, Cut, Held, Run, held
from zerostall.core.dtypes import DTYPES
from zerostall.errors import FormatError, StateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GRAIN = 64 << 10
"""Bytes of a tensor that stay together: smaller ones are never divided."""

_LISTED = 20
_RANKS = 8

_Kind = TypeVar("_Kind")


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One tensor of an offer.

    Attributes:
        shape: of the whole tensor.
        way: which of the offer's ways it is cut in.
        undivided: its holder stores all of what it holds, or nothing: other names are views of it.
        leads: the first of its holders stores it, and what others hold does not count.
        ahead: elements before it in what a flat cut divides.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    way: int
    undivided: bool = False
    leads: bool = False
    ahead: int = 0


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What one or many ranks have: `rows` sorted by name, `ways` to cut, and other names: (name, the row's name)."""

    ways: tuple[tuple[Cut, ...], ...]
    rows: tuple[Row, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.encode()).digest()


class Stand(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank stands: the digest of its offer, and for each of the offer's ways its index in each cut.

    A way for which there is no index (None) is one whose ranks this one is not among: it holds nothing there.
    """

    offer: bytes
    indexes: tuple[tuple[int, ...] | None, ...]


class Part(msgspec.Struct, frozen=True):
    """What a rank stores of one tensor: these boxes of it, each with where it lies in the rank's own tensor."""

    row: Row
    boxes: tuple[tuple[Box, Box], ...]
    own: tuple[int, ...]


class Shared(msgspec.Struct, frozen=True):
    """What several ranks hold alike, and must prove equal: the names, and the ranks, in order."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]


class Partition(msgspec.Struct, frozen=True):
    """What one rank stores, in order of the names, and what it shares with others."""

    parts: tuple[Part, ...]
    shared: tuple[Shared, ...]


def encode_stand(stand: Stand) -> bytes:
    return msgspec.msgpack.encode(stand)


def decode_stand(data: bytes) -> Stand:
    """Read what another rank has said. FormatError where it is none."""
    return _decoded(data, Stand)


def decode_offer(data: bytes) -> Offer:
    """Read what another rank has said. FormatError where it is none."""
    return _decoded(data, Offer)


def speakers(stands: Sequence[Stand]) -> dict[bytes, int]:
    """Return the rank that tells each offer: the first whose own it is."""
    first: dict[bytes, int] = {}
    for rank, stand in enumerate(stands):
        first.setdefault(stand.offer, rank)
    return first


def decide(rank: int, stands: Sequence[Stand], offers: Mapping[bytes, Offer]) -> Partition:
    """Decide what `rank` stores. Every rank comes to the same view of who stores what.

    Linear in ranks and in tensors, not in their product, where ranks offer alike.

    Raises:
        StateError: ranks offer different tensors under one name, or some of a tensor is offered by nobody; names the
            tensors and the ranks.
    """
    crowd = _Crowd(stands, offers)
    problems = crowd.problems()
    if problems:
        more = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise StateError(
            "the ranks' states do not make one state:\n  " + "\n  ".join(problems[:_LISTED]) + more,
            hint="tensors that are meant to differ from rank to rank go into zerostall.RankLocal(...)",
        )
    mine = stands[rank]
    together: dict[tuple[int, ...], list[tuple[Row, Held | Run]]] = {}
    for row in offers[mine.offer].rows:
        indexes = mine.indexes[row.way]
        if indexes is None:
            continue
        ranks = crowd.holders(row.name, indexes)
        own = held(row.shape, offers[mine.offer].ways[row.way], indexes, row.ahead)
        together.setdefault((ranks[0],) if row.leads else ranks, []).append((row, own))
    parts: list[Part] = []
    shared: list[Shared] = []
    for ranks, rows in together.items():
        if len(ranks) > 1:
            shared.append(Shared(ranks, tuple(row.name for row, _ in rows)))
        if rank in ranks:
            parts += _share(rows, ranks.index(rank), len(ranks))
    parts.sort(key=lambda part: part.row.name)
    return Partition(tuple(parts), tuple(shared))


def _share(rows: Sequence[tuple[Row, Held | Run]], index: int, count: int) -> list[Part]:
    """The index-th of `count` shares, equal by bytes, of what ranks hold alike."""
    sizes = [math.prod(own.shape) * DTYPES[row.dtype].itemsize for row, own in rows]
    total = sum(sizes)
    low, high = total * index // count, total * (index + 1) // count
    found: list[Part] = []
    at = 0
    for (row, own), size in zip(rows, sizes, strict=True):
        if size == 0:
            # Nothing to move, but the tensor must be known of: the first of the holders tells it. Of a single element
            # there is no empty box; whoever has it tells.
            if index == 0 and row.shape:
                found.append(Part(row, tuple(own.boxes()) or _nothing(row, own), own.shape))
        elif at <= high and low <= at + size:
            # A share's end is rounded alike by the two whose shares meet there.
            begin = 0 if index == 0 else _rounded(row, own.shape, low - at)
            end = math.prod(own.shape) if index == count - 1 else _rounded(row, own.shape, high - at)
            boxes = [pair for part in stretch(own.shape, begin, end) for pair in own.boxes(part)]
            if boxes:
                found.append(Part(row, tuple(boxes), own.shape))
        at += size
    return found


def _nothing(row: Row, own: Held | Run) -> tuple[tuple[Box, Box], ...]:
    # A run of a tensor's elements has one dimension, whatever the tensor has.
    empty, of_own = (Box((0,) * len(shape), (0,) * len(shape)) for shape in (row.shape, own.shape))
    return ((empty, of_own),)


def _rounded(row: Row, shape: Sequence[int], nbytes: int) -> int:
    """The element of a tensor at which one share ends and the next begins, near byte `nbytes` of it."""
    count = math.prod(shape)
    itemsize = DTYPES[row.dtype].itemsize
    grain = count
    if not row.undivided and count * itemsize > GRAIN:
        grain = max(1, GRAIN // itemsize)
        run = 1
        for size in reversed(shape):  # the longest whole rows that stay within the grain
            if run * size * itemsize > GRAIN:
                break
            run *= size
        if run > 1:
            grain = run
    element = max(0, min(nbytes // itemsize, count))
    if element == count:
        return count  # which need be no multiple of the grain
    return min((element + grain // 2) // grain * grain, count)


class _Crowd:
    """All ranks' offers, by name."""

    def __init__(self, stands: Sequence[Stand], offers: Mapping[bytes, Offer]) -> None:
        self._offers = offers
        self._ranks: dict[bytes, list[int]] = {}
        for rank, stand in enumerate(stands):
            if stand.offer not in offers:
                raise FormatError(f"rank {rank} speaks of an offer that nobody made")
            self._ranks.setdefault(stand.offer, []).append(rank)
        self._stands = stands
        # name -> each (offer, row) of it. One offer for all ranks is the rule.
        self._rows: dict[str, list[tuple[bytes, Row]]] = {}
        for digest, offer in offers.items():
            for row in offer.rows:
                self._rows.setdefault(row.name, []).append((digest, row))
        self._places: dict[tuple[tuple[bytes, int], ...], dict[tuple[int, ...], tuple[int, ...]]] = {}

    def holders(self, name: str, indexes: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that hold what stands at these indexes of the tensor, rising."""
        return self._places_of(self._rows[name])[indexes]

    def _places_of(self, rows: Sequence[tuple[bytes, Row]]) -> dict[tuple[int, ...], tuple[int, ...]]:
        key = tuple((digest, row.way) for digest, row in rows)
        found = self._places.get(key)
        if found is None:
            lists: dict[tuple[int, ...], list[int]] = {}
            for digest, way in key:
                for rank in self._ranks[digest]:
                    indexes = self._stands[rank].indexes[way]
                    if indexes is not None:
                        lists.setdefault(indexes, []).append(rank)
            found = self._places[key] = {indexes: tuple(sorted(ranks)) for indexes, ranks in lists.items()}
        return found

    def problems(self) -> list[str]:
        """In words, what does not go together, tensor by tensor."""
        found: list[str] = []
        for name, rows in self._rows.items():
            problem = self._difference(rows) if len(rows) > 1 else ""
            if problem := problem or self._hole(rows):
                found.append(f"{name}: {problem}")
        aliases: dict[str, tuple[str, bytes]] = {}
        for digest, offer in self._offers.items():
            for name, base in offer.aliases:
                first, where = aliases.setdefault(name, (base, digest))
                one = f"{name}: another name for {first} on {listed(self._ranks[where])}"
                if name in self._rows:
                    found.append(f"{one}, but a tensor of its own on {listed(self._ranks[self._rows[name][0][0]])}")
                elif base != first:
                    found.append(f"{one}, but for {base} on {listed(self._ranks[digest])}")
        return found

    def _difference(self, rows: Sequence[tuple[bytes, Row]]) -> str:
        first_digest, first = rows[0]
        cuts = self._offers[first_digest].ways[first.way]
        for digest, row in rows[1:]:
            theirs = self._offers[digest].ways[row.way]
            if (row.dtype, row.shape, theirs, row.ahead) != (first.dtype, first.shape, cuts, first.ahead):
                one = f"{_kind(first, cuts)} on {listed(self._ranks[first_digest])}"
                return f"{one}, but {_kind(row, theirs)} on {listed(self._ranks[digest])}"
        return ""

    def _hole(self, rows: Sequence[tuple[bytes, Row]]) -> str:
        digest, row = rows[0]
        cuts = self._offers[digest].ways[row.way]
        places = self._places_of(rows)
        expected = math.prod(cut.parts for cut in cuts)
        if len(places) == expected:
            return ""
        have = sum(math.prod(held(row.shape, cuts, indexes, row.ahead).shape) for indexes in places)
        lacking = math.prod(row.shape) - have
        if lacking == 0:
            return ""
        return f"{lacking} of its {math.prod(row.shape)} elements are held by no rank of this process group"


def _kind(row: Row, cuts: Sequence[Cut]) -> str:
    ways = ", ".join(f"dimension {cut.dim} in {cut.parts}" for cut in cuts)
    how = f"cut along {ways}" if ways else "whole"
    if cuts and cuts[0].dim == FLAT:
        how = f"behind {row.ahead} elements in runs of {cuts[0].strips}"
    return f"{row.dtype} ({', '.join(map(str, row.shape))}) {how}"


def listed(ranks: Sequence[int]) -> str:
    """Name ranks, the first of them if they are many."""
    shown = ", ".join(map(str, ranks[:_RANKS])) + (f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _decoded(data: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise FormatError(f"another rank sent what is no {kind.__name__.lower()}: {error}") from None
