"""What several ranks have saved of one thing, each in a file of its own, put together again.

Tensors that are dealt out are made whole of their parts. What every rank has whole must be alike on all: tensors are
compared byte by byte, for which is right nobody can say. Names that only some ranks have are taken in. Of other values
that differ the first rank's are taken, and it is said.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from zerostall.core.boxes import tiling_problem
from zerostall.core.dtypes import DTYPES
from zerostall.core.inert import Global, Made
from zerostall.core.mosaic import Tile
from zerostall.core.quoting import clip
from zerostall.errors import FormatError
from zerostall.flow.readable import Assembled
from zerostall.flow.torch_archive import Loose, Part
from zerostall.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerostall.core.boxes import Box
    from zerostall.flow.readable import Source

_BLOCK = 1 << 22
_NAMED = 10
_OWN = "what is each rank's own cannot be put together: choose another item by its name (key=, --key)"


class Merged:
    """Puts together one item after the other of a folder; `tell` says what differed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._differing: list[str] = []

    def item(self, name: str, ranks: Sequence[tuple[int, object]]) -> object:
        """One item, from what each of these ranks has of it.

        Raises:
            FormatError: a part is missing, or ranks contradict each other; names the tensor.
        """
        first = ranks[0][1]
        values = [value for _, value in ranks]
        if any(isinstance(value, Part) for value in values):
            return self._whole(name, ranks)
        if all(isinstance(value, dict) for value in values):
            return self._dict(name, cast("list[tuple[int, dict[object, object]]]", ranks))
        if type(first) in (list, tuple):
            lists = cast("list[list[object]]", [value for value in values if type(value) is type(first)])
            if len(lists) == len(values) and len({len(one) for one in lists}) == 1:
                columns = [
                    self.item(
                        f"{name}[{number}]", [(rank, one[number]) for (rank, _), one in zip(ranks, lists, strict=True)]
                    )
                    for number in range(len(lists[0]))
                ]
                return columns if type(first) is list else tuple(columns)
        if any(map(_has_tensors, values)):
            self._insist_on_alike(name, ranks)
        elif other := next((rank for rank, value in ranks if not _same(first, value)), None):
            self._differing.append(f"{clip(name)} (rank {other})")
        return first

    def tell(self) -> None:
        if self._differing:
            names = ", ".join(self._differing[:_NAMED])
            more = len(self._differing) - _NAMED
            log.warning(
                "%s: values differ between its ranks, the first rank's are taken: %s%s",
                self._folder,
                names,
                f" and {more} more" if more > 0 else "",
            )

    def _dict(self, name: str, ranks: list[tuple[int, dict[object, object]]]) -> object:
        made = ranks[0][1].copy()
        for key in dict.fromkeys(key for _, value in ranks for key in value):
            made[key] = self.item(f"{name}.{clip(key)}", [(rank, value[key]) for rank, value in ranks if key in value])
        return made

    def _whole(self, name: str, ranks: Sequence[tuple[int, object]]) -> Loose:
        """A tensor of the parts that ranks have of it; replicas of a part count once."""
        first = cast("Part", next(value for _, value in ranks if isinstance(value, Part)))
        tiles: dict[Box, Tile] = {}
        sources: list[Source] = []
        places: list[object] = []
        for rank, part in ranks:
            if not isinstance(part, Part) or (part.shape, part.local.dtype) != (first.shape, first.local.dtype):
                raise self._contradiction(name, rank, "is dealt out, and of another shape or type, or whole, on rank")
            local = part.local
            tile = local.tiles[0]
            itemsize = DTYPES[local.dtype].itemsize
            for box, own in part.boxes:
                if box in tiles or not box.count:
                    continue
                offset = tile.offset + itemsize * sum(a * b for a, b in zip(own.start, tile.strides, strict=True))
                tiles[box] = Tile(box.start, box.shape, tile.strides, len(sources), offset)
            sources.append(local.sources[0])
            places.append(local.place)
        if problem := tiling_problem(first.shape, list(tiles)):
            raise FormatError(
                f"{self._folder}: {clip(name)} is not whole: {problem}", hint="the files of all ranks must be there"
            )
        return Loose(first.local.dtype, first.shape, tuple(tiles.values()), tuple(sources), (first.shape, *places))

    def _insist_on_alike(self, name: str, ranks: Sequence[tuple[int, object]]) -> None:
        first = ranks[0][1]
        for rank, other in ranks[1:]:
            if not isinstance(first, Loose) or not isinstance(other, Loose):
                raise self._contradiction(name, rank, "is a tensor on one rank and something else on rank")
            if (first.dtype, first.shape) != (other.dtype, other.shape):
                raise self._contradiction(name, rank, "has another shape or type on rank")
            if not _alike(first, other):
                raise self._contradiction(name, rank, "is whole and has other elements on rank")

    def _contradiction(self, name: str, rank: int, how: str) -> FormatError:
        return FormatError(f"{self._folder}: {clip(name)} {how} {rank}", hint=_OWN)


def _has_tensors(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if type(value) in (list, tuple):
        return any(map(_has_tensors, cast("list[object]", value)))
    return isinstance(value, (Loose, Part))


def _alike(one: Loose, other: Loose) -> bool:
    """Whether two tensors of one shape and type have the same bytes; a few MB of memory."""
    if not one.nbytes:
        return True
    itemsize = DTYPES[one.dtype].itemsize
    pair = [Assembled("", each.dtype, each.shape, each.tiles, each.sources) for each in (one, other)]
    step = _BLOCK // itemsize * itemsize
    for at in range(0, math.prod(one.shape) * itemsize, step):
        blocks = [bytearray(min(step, one.nbytes - at)) for _ in pair]
        for block, tensor in zip(blocks, pair, strict=True):
            tensor.read_into(memoryview(block), at)
        if blocks[0] != blocks[1]:
            return False
    return True


def _same(one: object, other: object) -> bool:
    """Whether two values are equal, types and what is inert included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Global) and isinstance(other, Global):
        return one.name == other.name
    if isinstance(one, Made) and isinstance(other, Made):
        return one.name == other.name and _same(one.args, other.args) and _same(one.state, other.state)
    if type(one) in (list, tuple):
        mine, others = cast("list[object]", one), cast("list[object]", other)
        return len(mine) == len(others) and all(map(_same, mine, others))
    return one == other or (one != one and other != other)
