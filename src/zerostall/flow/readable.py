"""Tensors that can be read from any element on, wherever their bytes lie: what exports write and imports store."""

from __future__ import annotations

import math
import os
import threading
from typing import TYPE_CHECKING, Literal, Protocol

from zerostall.core.dtypes import DTYPES
from zerostall.core.mosaic import Mosaic, Tile
from zerostall.errors import CorruptError
from zerostall.flow.image_reader import buffer
from zerostall.tiers.files import opened, read_exactly, real

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

_INTEGERS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Source(Protocol):
    """Bytes that any thread may read from any place on."""

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes from `offset` on. CorruptError where they are not there or not right."""


class Readable(Protocol):
    """One tensor, its elements in row-major order. Any thread may read it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int: ...

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with bytes `offset` and following; both whole elements."""


class Plain:
    """Bytes in memory: a header, say."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    def read_into(self, view: memoryview, offset: int) -> None:
        view[:] = self._data[offset : offset + len(view)]


class OpenFile:
    """A file that somebody keeps open."""

    def __init__(self, fd: int, path: Path) -> None:
        self.nbytes = os.fstat(fd).st_size
        self.fd = fd
        self.path = path

    def read_into(self, view: memoryview, offset: int) -> None:
        read_exactly(self.fd, view, offset, self.path)


class FileOnDemand:
    """A file that is opened for each read: of a folder of so many that not all could be open. Any thread.

    Raises:
        CorruptError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        self._path = real(path)
        try:
            self.nbytes = self._path.stat().st_size
        except FileNotFoundError:
            raise CorruptError(f"{self._path} is missing") from None

    def read_into(self, view: memoryview, offset: int) -> None:
        try:
            with opened(self._path) as fd:
                read_exactly(fd, view, offset, self._path)
        except FileNotFoundError:
            raise CorruptError(f"{self._path} is missing") from None


class Assembled:
    """A tensor whose tiles lie in `sources`.

    What lies in order is read piece by piece. Of a tile that lies in another order (a transposed tensor) all that it
    spans is held in memory from the first read of it to the last.

    Raises:
        FormatError: a box is not within the tensor.
    """

    def __init__(
        self, name: str, dtype: str, shape: Sequence[int], tiles: Iterable[Tile], sources: Sequence[Source]
    ) -> None:
        self.name, self.dtype, self.shape = name, dtype, tuple(shape)
        self._itemsize = itemsize = DTYPES[dtype].itemsize
        whole, unit, pieces = self.shape, itemsize, list(tiles)
        if itemsize not in _INTEGERS:  # complex128 is gathered as two of 8 bytes
            unit = 8
            whole = (*whole, itemsize // 8)
            pieces = [_split(tile, itemsize // 8) for tile in pieces]
        self._mosaic = Mosaic.of(whole, unit, pieces)
        self._sources = sources
        if not self._mosaic.in_order:
            self._hold()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self._itemsize

    def read_into(self, view: memoryview, offset: int) -> None:
        unit = self._mosaic.itemsize
        before, behind = offset % unit, -(offset + len(view)) % unit
        if before or behind:  # somebody looks into it with smaller elements
            cover = memoryview(bytearray(before + len(view) + behind))
            self.read_into(cover, offset - before)
            view[:] = cover[before : before + len(view)]
            return
        for run in self._mosaic.runs(offset // unit, len(view) // unit):
            at = run.at * unit - offset
            part = view[at : at + run.size * unit]
            if run.stride == 1:
                self._sources[run.source].read_into(part, run.offset)
            else:
                self._gather(part, self._sources[run.source], run.offset, run.size, run.stride)

    def _gather(self, part: memoryview, source: Source, offset: int, count: int, stride: int) -> None:
        unit = self._mosaic.itemsize
        assert isinstance(source, _Held)
        items = source.items(offset, 1 + (count - 1) * stride, _INTEGERS[unit])
        # A stride of 0 repeats one element.
        part[:] = items[::stride].tobytes() if stride else items.tobytes() * count
        source.used(count * unit)

    def _hold(self) -> None:
        unit = self._mosaic.itemsize
        tiles: list[Tile] = []
        held: list[Source] = []
        for number, tile in enumerate(self._mosaic.tiles):
            size = math.prod(tile.shape) * unit
            held.append(_Held(self._sources[tile.source], tile.offset, tile.extent * unit, size))
            tiles.append(Tile(tile.start, tile.shape, tile.strides, number, 0))
        self._mosaic = Mosaic.of(self._mosaic.shape, unit, tiles)
        self._sources = held


class _Held:
    """What a tile spans, in memory from the first read until all of it was used."""

    def __init__(self, source: Source, offset: int, nbytes: int, size: int) -> None:
        self._source, self._offset, self._nbytes = source, offset, nbytes
        self._left = self._size = size
        self._lock = threading.Lock()
        self._memory: memoryview | None = None

    def read_into(self, view: memoryview, offset: int) -> None:
        view[:] = self._bytes()[offset : offset + len(view)]
        self.used(len(view))

    def items(self, offset: int, count: int, code: Literal["B", "H", "I", "Q"]) -> memoryview:
        items = self._bytes().cast(code)
        first = offset // items.itemsize
        return items[first : first + count]

    def used(self, nbytes: int) -> None:
        with self._lock:
            self._left -= nbytes
            if self._left <= 0:
                self._memory, self._left = None, self._size  # somebody may read it once more

    def _bytes(self) -> memoryview:
        with self._lock:
            if self._memory is None:
                memory = memoryview(buffer(self._nbytes))
                self._source.read_into(memory, self._offset)
                self._memory = memory
            return self._memory


class Cast:
    """A piece as another type; `convert` (source bytes, target bytes, source type, target type) does it."""

    def __init__(self, piece: Readable, dtype: str, convert: Convert) -> None:
        self.name, self.dtype, self.shape = piece.name, dtype, piece.shape
        self._piece = piece
        self._convert = convert

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def read_into(self, view: memoryview, offset: int) -> None:
        wide, narrow = DTYPES[self._piece.dtype].itemsize, DTYPES[self.dtype].itemsize
        stored = memoryview(bytearray(len(view) // narrow * wide))
        self._piece.read_into(stored, offset // narrow * wide)
        self._convert(stored, view, self._piece.dtype, self.dtype)


if TYPE_CHECKING:
    Convert = Callable[[memoryview, memoryview, str, str], None]


def _split(tile: Tile, parts: int) -> Tile:
    """The same tile of elements that are taken for `parts` smaller ones each."""
    strides = (*(stride * parts for stride in tile.strides), 1)
    return Tile((*tile.start, 0), (*tile.shape, parts), strides, tile.source, tile.offset)
