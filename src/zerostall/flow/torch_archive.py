"""Files of torch.save (and parts of files that are one), read without torch and without running anything of theirs.

Such a file is a zip archive without compression: a pickle, and the bytes of each tensor's storage. The pickle is read
by `core.pickles`; where a tensor stands, its place in the file is put, so that its bytes are read when they are wanted.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from zerostall.core import dtensors, pickles
from zerostall.core.dtypes import DTYPES
from zerostall.core.inert import Global, Made
from zerostall.core.mosaic import Tile
from zerostall.core.quoting import clip, quote
from zerostall.core.safetensors import MAX_BYTES, MAX_RANK
from zerostall.errors import FormatError

if TYPE_CHECKING:
    from zerostall.core.boxes import Box
    from zerostall.core.inert import Name
    from zerostall.flow.readable import Source

MAGIC = b"PK\x03\x04"

_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_TAIL = _END.size + _LOCATOR.size + _END64.size + (1 << 16)
_MAX_DIRECTORY = 1 << 28

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_REBUILDERS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_ALLOWED: frozenset[Name] = frozenset(
    {
        *(("torch", name) for name in (*_STORAGES, *DTYPES, "Size", "device")),
        *(("torch._utils", name) for name in (*_REBUILDERS, "_rebuild_parameter")),
        ("torch.storage", "UntypedStorage"),
        ("torch.serialization", "_get_layout"),
        ("torch._tensor", "_rebuild_from_type_v2"),
        ("torch._utils", "_rebuild_wrapper_subclass"),
        *dtensors.NAMES,
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Loose:
    """A tensor in somebody's file, before it has a name here.

    Attributes:
        tiles, sources: where its elements lie.
        place: what two tensors with the very same elements have in common; None where it has no such.
    """

    dtype: str
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]
    sources: tuple[Source, ...]
    place: tuple[object, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one rank has of a tensor that was dealt out.

    Attributes:
        shape: of the whole tensor.
        boxes: which boxes of it are here, each with where it lies in `local`.
    """

    local: Loose
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Box], ...]


class _Storage(NamedTuple):
    key: str
    dtype: str | None  # None: its tensors say it
    elements: int


def read_archive(source: Source, begin: int, nbytes: int, what: str, *, parts: bool = False) -> object:
    """What torch.load would return of the archive in bytes `begin` to `begin + nbytes` of a source.

    Tensors are `Loose`; parameters are tensors; torch's data types and devices are inert. `parts`: there is a `Part` of
    each distributed tensor; without, those of which not all is here are refused.

    Raises:
        FormatError: it is no such archive, is damaged, or would need code of its own to be read; names `what`.
    """
    entries = _Directory(source, begin, nbytes, what).entries()
    pickled = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickled) != 1:
        raise FormatError(f"{what} is a zip archive, but not one of torch.save")
    top = pickled[0].removesuffix("data.pkl")
    order = entries.get(f"{top}byteorder")
    if order is not None and _bytes(source, order, 64, what) != b"little":
        raise FormatError(f"{what} was written on a machine of another byte order")
    data = _bytes(source, entries[pickled[0]], pickles.MAX_PICKLE, what)
    value = pickles.read(data, _ALLOWED, persistent=_storage, source=what)
    return _Tensors(source, entries, top, what, 64 * len(data) + 1000, parts).of(value)


def _bytes(source: Source, place: tuple[int, int], most: int, what: str) -> bytes:
    if place[1] > most:
        raise FormatError(f"{what}: {place[1]} bytes where at most {most} belong")
    data = bytearray(place[1])
    source.read_into(memoryview(data), place[0])
    return bytes(data)


def _storage(pid: object) -> object:
    if type(pid) is tuple and len(pid) == 5 and pid[0] == "storage":
        _, kind, key, _, elements = cast("tuple[object, object, object, object, object]", pid)
        if type(kind) is Global and type(key) is str and type(elements) is int and elements >= 0:
            module, name = kind.name
            if module == "torch.storage" or (module == "torch" and name in _STORAGES):
                return _Storage(key, _STORAGES.get(name), elements)
    raise FormatError("it refers to something that is no tensor's storage")


class _Directory:
    """The list of what is in a zip archive."""

    def __init__(self, source: Source, begin: int, nbytes: int, what: str) -> None:
        self._source, self._begin, self._nbytes, self._what = source, begin, nbytes, what

    def entries(self) -> dict[str, tuple[int, int]]:
        """Name → (offset in the source, size)."""
        try:
            return self._entries()
        except (struct.error, UnicodeDecodeError):
            raise self._damaged("its directory cannot be read") from None

    def _entries(self) -> dict[str, tuple[int, int]]:
        first, size, count = self._found()
        if size > _MAX_DIRECTORY or first + size > self._nbytes:
            raise self._damaged("its directory lies outside of it")
        data = self._read(first, size)
        found: dict[str, tuple[int, int]] = {}
        at = 0
        for _ in range(count):
            fields = _ENTRY.unpack_from(data, at)
            if fields[0] != b"PK\x01\x02":
                raise self._damaged("its directory is damaged")
            flags, method, stored, plain, name_size, extra_size, note_size = *fields[3:5], *fields[8:13]
            at += _ENTRY.size
            name = data[at : at + name_size].decode()
            extra = data[at + name_size : at + name_size + extra_size]
            at += name_size + extra_size + note_size
            plain, stored, local = _wide(extra, plain, stored, fields[16])
            if method or flags & 1 or stored != plain:
                raise self._damaged(f"{quote(name)} in it is compressed or encrypted")
            if name in found:
                raise self._damaged(f"{quote(name)} is in it twice")
            found[name] = self._place(local, plain, name)
        return found

    def _found(self) -> tuple[int, int, int]:
        """Offset and size of the directory, and how many entries it has."""
        size = min(self._nbytes, _TAIL)
        tail = self._read(self._nbytes - size, size)
        at = tail.rfind(b"PK\x05\x06")
        if at < 0 or len(tail) - at < _END.size:
            raise self._damaged("it has no end, or is no archive of torch.save at all")
        _, _, _, _, count, length, first, _ = _END.unpack_from(tail, at)
        if at >= _LOCATOR.size and tail[at - _LOCATOR.size : at - _LOCATOR.size + 4] == b"PK\x06\x07":
            place = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)[2]
            if place + _END64.size > self._nbytes:
                raise self._damaged("its directory lies outside of it")
            fields = _END64.unpack(self._read(place, _END64.size))
            if fields[0] != b"PK\x06\x06":
                raise self._damaged("its directory is damaged")
            count, length, first = fields[7:10]
        return first, length, count

    def _place(self, local: int, size: int, name: str) -> tuple[int, int]:
        if local + _LOCAL.size > self._nbytes:
            raise self._damaged(f"{quote(name)} lies outside of it")
        fields = _LOCAL.unpack(self._read(local, _LOCAL.size))
        first = local + _LOCAL.size + fields[9] + fields[10]
        if fields[0] != MAGIC or first + size > self._nbytes:
            raise self._damaged(f"{quote(name)} lies outside of it")
        return self._begin + first, size

    def _read(self, offset: int, size: int) -> bytes:
        data = bytearray(size)
        self._source.read_into(memoryview(data), self._begin + offset)
        return bytes(data)

    def _damaged(self, why: str) -> FormatError:
        return FormatError(f"{self._what} is no torch.save file, or a damaged one: {why}")


def _wide(extra: bytes, plain: int, stored: int, local: int) -> tuple[int, int, int]:
    """Sizes and offset, from the field for large archives where the usual ones are too small."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            full = 0xFFFFFFFF
            plain = next(numbers, plain) if plain == full else plain
            stored = next(numbers, stored) if stored == full else stored
            local = next(numbers, local) if local == full else local
        at += 4 + size
    return plain, stored, local


class _Tensors:
    """Puts tensors in the place of what torch's functions would have made them of."""

    def __init__(
        self, source: Source, entries: dict[str, tuple[int, int]], top: str, what: str, budget: int, parts: bool
    ) -> None:
        self._parts = parts
        self._source, self._entries, self._top, self._what = source, entries, top, what
        self._budget = budget  # a small file can refer to itself so often that nobody could walk it

    def of(self, value: object, depth: int = 0) -> object:
        self._budget -= 1
        if self._budget < 0 or depth > 200:
            raise FormatError(f"{self._what}: its values lie too deep or too often in each other")
        if isinstance(value, dict):
            for key in value:
                value[key] = self.of(value[key], depth + 1)
            return value
        if type(value) is list:
            value[:] = [self.of(item, depth + 1) for item in value]
            return value
        if type(value) is tuple:
            return tuple([self.of(item, depth + 1) for item in value])
        if type(value) is Made:
            return self._made(value, depth)
        if type(value) is Global and _dtype(value) in DTYPES:
            return value
        if isinstance(value, (_Storage, Global)):
            raise FormatError(f"{self._what} holds a bare storage or class")
        return value

    def _made(self, made: Made, depth: int) -> object:
        module, name = made.name
        if module == "torch._utils" and made.args:
            if name == "_rebuild_parameter":
                return self.of(made.args[0], depth + 1)
            if name != "_rebuild_wrapper_subclass":
                return self._tensor(made)
        if module == "torch._tensor":
            return self._dealt_out(made, depth)
        if name == "Size" and len(made.args) == 1:
            return tuple(_sizes(made.args[0], self._what))
        return made

    def _dealt_out(self, made: Made, depth: int) -> Loose | Part:
        """A DTensor: its local part where several ranks have it, and itself where all of it is here."""
        kinds = tuple(one.name[1] for one in made.args[:2] if type(one) is Global)
        state = made.args[3] if len(made.args) == 4 else None
        if type(state) is tuple and len(state) == 2:  # attributes, of which it has none, and slots
            state = state[1]
        if kinds != ("_rebuild_wrapper_subclass", "DTensor") or type(state) is not dict:
            raise self._refused("a tensor of a class of its own cannot be read")
        held = cast("dict[object, object]", state)
        local = self.of(held.get("_local_tensor"), depth + 1)
        if not isinstance(local, Loose):
            raise self._refused("a distributed tensor without a local one")
        try:
            shape, own = dtensors.read(held.get("_spec"))
        except FormatError as error:
            raise self._refused(f"a distributed tensor cannot be read: {error.args[0]}") from None
        if own is not None and own.shape != local.shape:
            raise self._refused(f"a distributed tensor has {local.shape} here, and its placements say {own.shape}")
        boxes = own.boxes() if own is not None else []
        if self._parts:  # what one rank has whole may be cut all the same, and the others have nothing
            return Part(local, shape, tuple(boxes))
        if not dtensors.whole(shape, boxes):
            raise FormatError(
                f"{self._what} has a part of a tensor {clip(shape)} that is dealt out over several ranks",
                hint="import the folder that has the files of all ranks, or save it with dcp.save",
            )
        return local

    def _tensor(self, made: Made) -> Loose:
        storage, first, *rest = made.args if len(made.args) > 1 else (None, None)
        if type(storage) is not _Storage or type(first) is not int or len(rest) < 2 or first < 0:
            raise self._refused("a tensor is made of something else than a storage")
        shape = _sizes(rest[0], self._what)
        strides = _sizes(rest[1], self._what)
        dtype = storage.dtype
        if made.name[1] == "_rebuild_tensor_v3" and len(rest) > 4:
            dtype = _dtype(rest[4])
        # Behind these come whether it is a view that negates or conjugates what is stored.
        bits = rest[-1] if len(rest) > 4 else None
        if dtype is None or dtype not in DTYPES or len(shape) != len(strides) or (isinstance(bits, dict) and bits):
            raise self._refused(f"a tensor of type {clip(dtype)} {clip(shape)} cannot be read")
        entry = self._entries.get(f"{self._top}data/{storage.key}")
        if entry is None:
            raise self._refused(f"the storage {quote(storage.key)} is missing")
        itemsize = DTYPES[dtype].itemsize
        tile = Tile((0,) * len(shape), shape, strides, 0, entry[0] + first * itemsize)
        if (first + tile.extent) * itemsize > entry[1]:
            raise self._refused(f"a tensor {clip(shape)} reaches out of its storage of {entry[1]} bytes")
        distinct = math.prod(size for size, stride in zip(shape, strides, strict=True) if stride or not size)
        if distinct * itemsize > entry[1]:
            raise self._refused(f"a tensor {clip(shape)} has more elements than its storage of {entry[1]} bytes")
        place = (self._source, entry[0], first, dtype, shape, strides)
        return Loose(dtype, shape, (tile,), (self._source,), place)

    def _refused(self, why: str) -> FormatError:
        return FormatError(f"{self._what}: {why}")


def _dtype(value: object) -> str | None:
    return value.name[1] if type(value) is Global and value.name[0] == "torch" else None


def _sizes(value: object, what: str) -> tuple[int, ...]:
    if type(value) is Made and value.name == ("torch", "Size") and value.args:
        value = value.args[0]
    if type(value) not in (tuple, list) or len(cast("tuple[object]", value)) > MAX_RANK:
        raise FormatError(f"{what}: a shape that is none")
    sizes = cast("tuple[int, ...]", tuple(cast("tuple[object]", value)))
    if not all(type(size) is int and 0 <= size <= MAX_BYTES for size in sizes):
        raise FormatError(f"{what}: the shape {clip(sizes)} is none")
    return sizes
