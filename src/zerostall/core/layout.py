"""Layouts: which tensors an image holds, and where in it each one lies.

An image is a valid safetensors file: a header padded to a multiple of 4096 bytes, then the tensors, those
with the largest elements first and by name among equals. So every tensor is aligned to its element size and
there are no holes.
A layout says all that needs saying about an image but its bytes, and its digest names it: two images with the
same digest have everything but their bytes in common.
"""

from __future__ import annotations

import hashlib
import math
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import safetensors
from zerostall.core.dtypes import DTYPES
from zerostall.core.envelope import VERSION, seal, unseal
from zerostall.core.safetensors import ALIGN, MAX_BYTES, MAX_HEADER
from zerostall.core.shards import Entry, Shard, View, place_problems, shard_problems, untiled, view_problems
from zerostall.errors import FormatError, StateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "ALIGN",
    "CHUNK",
    "MAX_FILE",
    "Entry",
    "Layout",
    "Shard",
    "View",
    "build",
    "decode",
    "encode",
    "fingerprint",
]

CHUNK = 16 << 20
"""Bytes of an image that are copied, checked and retried as one."""

MAX_FILE = 1 << 30
"""The largest layout file that is read, in bytes."""

_NO_DIGEST = "0" * 64
_LISTED = 20


class Layout(msgspec.Struct, frozen=True):
    """What an image holds and where.

    Attributes:
        entries: in the order of their bytes, without holes.
        views: by name.
        header: the image's first bytes, up to where its tensors begin; a function of the rest, so never of a
            step.
        nbytes: of the whole image.
        digest: SHA-256, hex, of the layout's canonical JSON (docs/format.md); covers all but the header.
    """

    entries: tuple[Entry, ...]
    views: tuple[View, ...]
    header: bytes
    nbytes: int
    digest: str


class _Row(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    # An entry in the file: of a whole tensor, the box is not written.
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    global_shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None


class _Body(msgspec.Struct, frozen=True):
    version: int
    nbytes: int
    entries: list[_Row]
    views: list[View]


_BODY = msgspec.json.Decoder(_Body)


def build(shards: Iterable[Shard], views: Iterable[View] = ()) -> Layout:
    """Lay out an image of these shards. The order they come in does not matter.

    About 7 µs a tensor. StateError names what cannot be stored: an unknown type, a box outside its tensor, a
    name that is there twice, a view outside its base, too much for one file.
    """
    boxes = sorted(shards, key=_order)
    named = tuple(sorted(views, key=lambda view: view.name))
    # Views are only looked at where all boxes are sound.
    problems = list(shard_problems(boxes)) or list(view_problems(named, boxes))
    if problems:
        _refuse(problems)
    sizes = [math.prod(box.shape) * DTYPES[box.dtype].itemsize for box in boxes]
    slots = _slots(boxes, sizes)
    begin = safetensors.data_start(_metadata(_NO_DIGEST), slots)
    nbytes = begin + sum(sizes)
    if begin > MAX_HEADER or nbytes > MAX_BYTES:
        _refuse([f"{len(boxes)} tensors of {nbytes - begin} bytes and a header of {begin}: too much for one file"])
    entries: list[Entry] = []
    offset = begin
    for box, size in zip(boxes, sizes, strict=True):
        shape, whole, start = tuple(box.shape), tuple(box.global_shape), tuple(box.start)
        entries.append(Entry(box.name, box.dtype, shape, whole, start, offset, size))
        offset += size
    digest = hashlib.sha256(_body(entries, named, nbytes)).hexdigest()
    return Layout(tuple(entries), named, safetensors.join(_metadata(digest), slots), nbytes, digest)


def encode(layout: Layout) -> bytes:
    """Return the layout's file."""
    return seal(_body(layout.entries, layout.views, layout.nbytes))


def decode(data: bytes, *, source: str = "layout") -> Layout:
    """Read a layout's file and check all of it.

    `source` is what messages call it. CorruptError where it is damaged, VersionError where it is of a newer
    format, FormatError where it contradicts itself.
    """
    body, digest = unseal(data, _BODY, source=source, limit=MAX_FILE)
    entries = tuple(
        Entry(
            row.name,
            row.dtype,
            row.shape,
            row.shape if row.global_shape is None else row.global_shape,
            (0,) * len(row.shape) if row.start is None else row.start,
            row.offset,
            row.nbytes,
        )
        for row in body.entries
    )
    views = tuple(body.views)
    # Later checks stand on earlier ones; each is only asked once those before it found nothing.
    problems = chain(shard_problems(entries), place_problems(entries, body.nbytes), view_problems(views, entries))
    if problem := next(problems, None):
        raise FormatError(f"{source}: {problem}")
    slots = _slots(entries, [entry.nbytes for entry in entries])
    begin = entries[0].offset if entries else body.nbytes
    if begin > MAX_HEADER or begin != safetensors.data_start(_metadata(digest), slots):
        raise FormatError(f"{source}: the tensors begin at byte {begin}, which is not where the header ends")
    return Layout(entries, views, safetensors.join(_metadata(digest), slots), body.nbytes, digest)


def fingerprint(layouts: Iterable[Layout]) -> str:
    """Return what tells one model from another: SHA-256 (hex) over all names, types and global shapes.

    It is the same for every way to shard the same tensors, as long as aliases stay aliases.
    """
    seen: set[tuple[str, str, tuple[int, ...]]] = set()
    for layout in layouts:
        seen.update((untiled(entry.name), entry.dtype, entry.global_shape) for entry in layout.entries)
        if layout.views:
            cut = {entry.name: entry for entry in layout.entries if entry.shape != entry.global_shape}
            for view in layout.views:
                # Of a tensor that is cut there are no views but other names for all of a box.
                shape = cut[view.base].global_shape if view.base in cut else view.shape
                seen.add((untiled(view.name), view.dtype, shape))
    return hashlib.sha256(msgspec.json.encode(sorted(seen))).hexdigest()


def _order(shard: Shard) -> tuple[int, str]:
    dtype = DTYPES.get(shard.dtype)
    return (-dtype.itemsize if dtype else 0, shard.name)


def _metadata(digest: str) -> bytes:
    # Some loaders refuse a file whose metadata does not name a framework.
    return msgspec.json.encode({"format": "pt", "zerostall.version": str(VERSION), "zerostall.layout": digest})


def _slots(boxes: Sequence[Shard | Entry], sizes: Sequence[int]) -> bytes:
    slots: dict[str, safetensors.Slot] = {}
    begin = 0
    for box, size in zip(boxes, sizes, strict=True):
        dtype = DTYPES[box.dtype]
        shape = (*box.shape, *dtype.trailing) if dtype.trailing else tuple(box.shape)
        slots[box.name] = safetensors.Slot(dtype.code, shape, (begin, begin + size))
        begin += size
    return msgspec.json.encode(slots)


def _body(entries: Sequence[Entry], views: Sequence[View], nbytes: int) -> bytes:
    return msgspec.json.encode(_Body(VERSION, nbytes, [_row(entry) for entry in entries], list(views)))


def _row(entry: Entry) -> _Row:
    if entry.shape == entry.global_shape:
        return _Row(entry.name, entry.dtype, entry.shape, entry.offset, entry.nbytes)
    box = (entry.global_shape, entry.start)
    return _Row(entry.name, entry.dtype, entry.shape, entry.offset, entry.nbytes, *box)


def _refuse(problems: Sequence[str]) -> None:
    more = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    raise StateError("this cannot be stored:\n  " + "\n  ".join(problems[:_LISTED]) + more)
