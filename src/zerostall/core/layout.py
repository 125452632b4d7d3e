"""Layouts: which tensors an image holds, and where in it each one lies.

An image is a valid safetensors file: a header padded to a multiple of 4096 bytes, then the tensors, those
with the largest elements first and by name among equals. So every tensor is aligned to its element size and
there are no holes.
A layout says all that needs saying about an image but its bytes, and its digest names it: two images with the
same digest have everything but their bytes in common, and where in their tensors their boxes begin (`core.begins`).
"""

from __future__ import annotations

import hashlib
import math
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import begins as at
from zerostall.core import safetensors
from zerostall.core.dtypes import DTYPES
from zerostall.core.envelope import FIRST, seal, unseal
from zerostall.core.own import is_own, own_problems
from zerostall.core.quoting import quote
from zerostall.core.safetensors import ALIGN, MAX_BYTES, MAX_HEADER
from zerostall.core.shards import Entry, Shard, View, place_problems, shard_problems, untiled, view_problems
from zerostall.errors import FormatError, StateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
    "moved",
]

CHUNK = 16 << 20
"""Bytes of an image that are copied, checked and retried as one."""

MAX_FILE = 1 << 30
"""The largest layout file that is read, in bytes."""

SECOND = 2
"""The format version in which layouts say which boxes begin alike, and not where; of tensors that are cut alone."""

THIRD = 3
"""The format version in which layouts say of tensors that they are their rank's own, and not which rank's."""

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
        digest: SHA-256, hex, of the layout's canonical JSON (docs/format.md); covers all but the header and the begins.
        begins: where boxes begin. Other ranks' layouts may have the same digest and other begins.
        numbers: for each entry the numbers of its begins; empty in version 1, whose files say begins outright.
        version: of the format its file is in.
    """

    entries: tuple[Entry, ...]
    views: tuple[View, ...]
    header: bytes
    nbytes: int
    digest: str
    begins: tuple[int, ...] = ()
    numbers: tuple[tuple[int, ...], ...] = ()
    version: int = FIRST

    def same(self, other: Layout) -> bool:
        """Whether images of both have everything but their bytes in common."""
        return self.digest == other.digest and self.begins == other.begins


class _Row(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    # An entry in the file: of a whole tensor, the box is not written. `start` in version 1, `begins` since version 2.
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    global_shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None
    begins: tuple[int, ...] = ()


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
    problems = list(shard_problems(boxes)) or list(view_problems(named, boxes)) or list(own_problems(boxes, named))
    if problems:
        _refuse(problems)
    sizes = [math.prod(box.shape) * DTYPES[box.dtype].itemsize for box in boxes]
    slots = _slots(boxes, sizes)
    begin = safetensors.data_start(_metadata(_NO_DIGEST, FIRST), slots)
    nbytes = begin + sum(sizes)
    if begin > MAX_HEADER or nbytes > MAX_BYTES:
        _refuse([f"{len(boxes)} tensors of {nbytes - begin} bytes and a header of {begin}: too much for one file"])
    entries: list[Entry] = []
    offset = begin
    for box, size in zip(boxes, sizes, strict=True):
        shape, whole, start = tuple(box.shape), tuple(box.global_shape), tuple(box.start)
        entries.append(Entry(box.name, box.dtype, shape, whole, start, offset, size))
        offset += size
    numbers, begins = at.numbered(entries)
    version = THIRD if any(is_own(entry.name) for entry in entries) else SECOND if begins else FIRST
    digest = hashlib.sha256(_body(version, entries, numbers, named, nbytes)).hexdigest()
    header = safetensors.join(_metadata(digest, version), slots)
    return Layout(tuple(entries), named, header, nbytes, digest, begins, numbers if version > FIRST else (), version)


def encode(layout: Layout) -> bytes:
    """Return the layout's file; the same for all begins."""
    return seal(_body(layout.version, layout.entries, layout.numbers, layout.views, layout.nbytes))


def decode(data: bytes, begins: Sequence[int] = (), *, source: str = "layout") -> Layout:
    """Read a layout's file, with the begins of one of its ranks, and check all of it.

    `source` is what messages call it. CorruptError where it is damaged, VersionError where it is of a newer
    format, FormatError where it contradicts itself or its boxes need other begins.
    """
    body, digest = unseal(data, _BODY, source=source, limit=MAX_FILE, newest=THIRD)
    numbers = () if body.version == FIRST else tuple(row.begins for row in body.entries)
    if problem := next(_number_problems(body.entries, numbers), None):
        raise FormatError(f"{source}: {problem}")
    at.insist(numbers, begins, source)
    entries = tuple(
        Entry(row.name, row.dtype, row.shape, *_box(row, body.version, begins), row.offset, row.nbytes)
        for row in body.entries
    )
    views = tuple(body.views)
    # Later checks stand on earlier ones; each is only asked once those before it found nothing.
    problems = chain(shard_problems(entries), place_problems(entries, body.nbytes), view_problems(views, entries))
    if body.version >= THIRD:
        problems = chain(problems, own_problems(entries, views))
    if problem := next(problems, None):
        raise FormatError(f"{source}: {problem}")
    slots = _slots(entries, [entry.nbytes for entry in entries])
    begin = entries[0].offset if entries else body.nbytes
    metadata = _metadata(digest, body.version)
    if begin > MAX_HEADER or begin != safetensors.data_start(metadata, slots):
        raise FormatError(f"{source}: the tensors begin at byte {begin}, which is not where the header ends")
    header = safetensors.join(metadata, slots)
    return Layout(entries, views, header, body.nbytes, digest, tuple(begins), numbers, body.version)


def moved(layout: Layout, begins: Sequence[int], *, source: str = "layout") -> Layout:
    """Return the layout of the rank that has these begins. FormatError where they are not such as its boxes need."""
    if tuple(begins) == layout.begins:
        return layout
    at.insist(layout.numbers, begins, source)
    entries = tuple(
        _entry_at(entry, mine, begins) if mine else entry
        for entry, mine in zip(layout.entries, layout.numbers, strict=True)
    )
    if problem := next(shard_problems(entries), None):
        raise FormatError(f"{source}: {problem}")
    return msgspec.structs.replace(layout, entries=entries, begins=tuple(begins))


def _entry_at(entry: Entry, numbers: Sequence[int], begins: Sequence[int]) -> Entry:
    start = at.start_of(entry.shape, entry.global_shape, numbers, begins)
    return Entry(entry.name, entry.dtype, entry.shape, entry.global_shape, start, entry.offset, entry.nbytes)


def _number_problems(rows: Sequence[_Row], numbers: Sequence[tuple[int, ...]]) -> Iterator[str]:
    for row, mine in zip(rows, numbers, strict=bool(numbers)):
        whole = row.shape if row.global_shape is None else row.global_shape
        cut = sum(size != total for size, total in zip(row.shape, whole, strict=False))
        if len(mine) != cut or any(number < 0 for number in mine):
            yield f"{quote(row.name)}: a box that is cut in {cut} dimensions has as many begins, numbered from 0 on"


def _box(row: _Row, version: int, begins: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The whole tensor's shape, and where the box begins."""
    if row.global_shape is None:
        return row.shape, (0,) * len(row.shape) if row.start is None or version > FIRST else row.start
    if version == FIRST:
        return row.global_shape, (0,) * len(row.shape) if row.start is None else row.start
    if len(row.global_shape) != len(row.shape):
        return row.global_shape, ()  # which is refused with all other boxes that are none
    return row.global_shape, at.start_of(row.shape, row.global_shape, row.begins, begins)


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


def _metadata(digest: str, version: int) -> bytes:
    # Some loaders refuse a file whose metadata does not name a framework.
    return msgspec.json.encode({"format": "pt", "zerostall.version": str(version), "zerostall.layout": digest})


def _slots(boxes: Sequence[Shard | Entry], sizes: Sequence[int]) -> bytes:
    slots: dict[str, safetensors.Slot] = {}
    begin = 0
    for box, size in zip(boxes, sizes, strict=True):
        dtype = DTYPES[box.dtype]
        shape = (*box.shape, *dtype.trailing) if dtype.trailing else tuple(box.shape)
        slots[box.name] = safetensors.Slot(dtype.code, shape, (begin, begin + size))
        begin += size
    return msgspec.json.encode(slots)


def _body(
    version: int,
    entries: Sequence[Entry],
    numbers: Sequence[tuple[int, ...]],
    views: Sequence[View],
    nbytes: int,
) -> bytes:
    if version == FIRST:
        rows = [_row(entry) for entry in entries]
    else:
        rows = [_numbered_row(entry, mine) for entry, mine in zip(entries, numbers, strict=True)]
    return msgspec.json.encode(_Body(version, nbytes, rows, list(views)))


def _row(entry: Entry) -> _Row:
    if entry.shape == entry.global_shape:
        return _Row(entry.name, entry.dtype, entry.shape, entry.offset, entry.nbytes)
    box = (entry.global_shape, entry.start)
    return _Row(entry.name, entry.dtype, entry.shape, entry.offset, entry.nbytes, *box)


def _numbered_row(entry: Entry, numbers: tuple[int, ...]) -> _Row:
    whole = None if entry.shape == entry.global_shape else entry.global_shape
    return _Row(entry.name, entry.dtype, entry.shape, entry.offset, entry.nbytes, whole, None, numbers)


def _refuse(problems: Sequence[str]) -> None:
    more = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    raise StateError("this cannot be stored:\n  " + "\n  ".join(problems[:_LISTED]) + more)
