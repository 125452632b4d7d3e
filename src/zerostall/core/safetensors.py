"""Headers of safetensors files, our own and anyone's.

A file is the header's length (8 bytes, little endian), the header (JSON, padded with spaces), and the
tensors' bytes, which leave no hole. Our own headers are padded so that the tensors begin at a multiple of
4096, where direct I/O and device copies are at ease; in other people's files a tensor may begin anywhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.dtypes import CODES
from zerostall.core.quoting import clip, dims, quote
from zerostall.errors import CorruptError, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIGN = 4096
"""Where tensors begin in our own files: at a multiple of this many bytes."""

MAX_HEADER = 100_000_000
"""The longest header readers of this format take."""

MAX_RANK = 64
"""The most dimensions a tensor may have, as in torch."""

MAX_BYTES = 2**63 - 1
"""The largest file there may be."""

_METADATA = "__metadata__"


class Slot(msgspec.Struct, frozen=True, gc=False):
    """What a header says of one tensor; `data_offsets` (begin, end) are counted from the end of the
    header.
    """

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor in a file: torch's data type and shape, and its place counted from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(msgspec.Struct, frozen=True):
    """A header that was read: tensors in the order of their bytes, and what else it says."""

    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]
    nbytes: int


_SLOTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SLOT = msgspec.json.Decoder(Slot)
_TEXTS = msgspec.json.Decoder(dict[str, str] | None)
_PLAIN = msgspec.json.Decoder(dict[str, Slot])


def data_start(metadata: bytes, slots: bytes, align: int = ALIGN) -> int:
    """Return how many bytes `join` makes of these two."""
    return -(-(8 + len(_merge(metadata, slots))) // align) * align


def _merge(metadata: bytes, slots: bytes) -> bytes:
    return b"".join((b'{"__metadata__":', metadata, b"," if len(slots) > 2 else b"", slots[1:]))


def join(metadata: bytes, slots: bytes, align: int = ALIGN) -> bytes:
    """Return a header of two JSON objects: its metadata (text to text), and name to Slot. Linear."""
    text = _merge(metadata, slots)
    nbytes = -(-(8 + len(text)) // align) * align
    return (nbytes - 8).to_bytes(8, "little") + text.ljust(nbytes - 8)


def encode(slots: Mapping[str, Slot], metadata: Mapping[str, str], align: int = ALIGN) -> bytes:
    """Return a file's header, its length in front and padded, so that data begins at a multiple of `align`
    bytes.

    The slots must be those of a whole file, in the order of their bytes, without holes.
    """
    return join(msgspec.json.encode(metadata), msgspec.json.encode(slots), align)


def header_nbytes(prefix: bytes, nbytes: int) -> int:
    """Return where the tensors begin in a file of `nbytes` bytes, from its first 8 bytes.

    CorruptError where the file ends before that, FormatError where no reader would take such a header.
    """
    if len(prefix) < 8 or nbytes < 8:
        raise CorruptError(f"a safetensors file begins with 8 bytes, this one has {min(len(prefix), nbytes)}")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER:
        raise FormatError(f"a header of {length} bytes: more than {MAX_HEADER}, so this is no safetensors file")
    if 8 + length > nbytes:
        raise CorruptError(f"the header ends at byte {8 + length}, the file at {nbytes}")
    return 8 + length


def decode(header: bytes, nbytes: int) -> Header:
    """Read the header of a file of `nbytes` bytes; `header` is its first `header_nbytes` bytes.

    The data may begin anywhere, and tensors may be aligned to nothing. FormatError for a tensor of unknown
    type, out of bounds, overlapping another, or of a size that is not its shape's, and for bytes that belong
    to no tensor.
    """
    begin = header_nbytes(header, nbytes)
    if len(header) < begin:
        raise CorruptError(f"the header has {begin} bytes, only {len(header)} are here")
    text = header[8:begin]
    if text[:1] != b"{":
        raise FormatError("a safetensors header begins with {")
    try:
        metadata, slots = _parse(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(f"a safetensors header that cannot be read: {clip(error)}") from None
    tensors: list[Tensor] = []
    end = 0
    for name, slot in sorted(slots.items(), key=lambda item: item[1].data_offsets):
        first, last = slot.data_offsets
        dtype, shape, size = _meaning(name, slot)
        if first != end:
            what = "overlaps another tensor" if first < end else "leaves a hole before it"
            raise FormatError(f"tensor {quote(name)} at bytes {first}..{last} {what}")
        if last - first != size:
            raise FormatError(f"tensor {quote(name)} has {last - first} bytes, its shape and type make {size}")
        tensors.append(Tensor(name, dtype, shape, begin + first, size))
        end = last
    if begin + end > nbytes:
        raise CorruptError(f"the tensors end at byte {begin + end}, the file at {nbytes}")
    if begin + end < nbytes:
        raise FormatError(f"{nbytes - begin - end} bytes behind the last tensor belong to none")
    return Header(tuple(tensors), metadata, begin)


def _parse(text: bytes) -> tuple[dict[str, str], dict[str, Slot]]:
    parts = _SLOTS.decode(text)
    metadata = parts.pop(_METADATA, None)
    texts = _TEXTS.decode(metadata) if metadata is not None else None
    return texts or {}, {name: _SLOT.decode(raw) for name, raw in parts.items()}


def _meaning(name: str, slot: Slot) -> tuple[str, tuple[int, ...], int]:
    dtype = CODES.get(slot.dtype)
    if dtype is None:
        raise FormatError(f"tensor {quote(name)} is of type {quote(slot.dtype)}, which is unknown here")
    shape = slot.shape
    if len(shape) > MAX_RANK or (shape and not 0 <= min(shape) <= max(shape) <= MAX_BYTES):
        raise FormatError(f"tensor {quote(name)} cannot have the shape {dims(shape)}")
    if slot.dtype == "F4":
        if not shape or shape[-1] % 2:
            raise FormatError(f"tensor {quote(name)} of type F4 needs an even last dimension, not {dims(shape)}")
        shape = (*shape[:-1], shape[-1] // 2)
    return dtype.name, shape, math.prod(shape) * dtype.itemsize
