"""What a layout is made of: boxes of tensors, views into them, and what may be wrong with either."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.dtypes import DTYPES
from zerostall.core.quoting import clip, dims, quote
from zerostall.core.safetensors import MAX_BYTES, MAX_RANK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_NAME = 65_535
"""The longest name a tensor may have, in characters."""

DISTINCT = "[=distinct]"
"""Suffix of the entry that holds an expanded tensor's distinct elements. No user's name ends so, for behind `[=`
stands the JSON of a key.
"""

_TILE = re.compile(r"\[=box [0-9]+\]\Z")
_RESERVED = "__metadata__"


class Shard(msgspec.Struct, frozen=True, gc=False):
    """The box of a global tensor that a rank holds. A whole tensor is the box that begins at zeros and is all
    of it.

    Attributes:
        name: a path as `core.names` writes it, unique in the layout.
        dtype: torch's name of the type.
        shape: of the box.
        global_shape: of the whole tensor; as many dimensions.
        start: where in the whole tensor the box begins.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    start: tuple[int, ...]

    @staticmethod
    def whole(name: str, dtype: str, shape: Sequence[int]) -> Shard:
        """Return the shard of a rank that holds all of a tensor."""
        sizes = tuple(shape)
        return Shard(name, dtype, sizes, sizes, (0,) * len(sizes))


def tile_name(name: str, number: int) -> str:
    """Return what the entry of one of several boxes of a tensor is called; the first has the tensor's own name."""
    return f"{name}[=box {number}]" if number else name


def untiled(name: str) -> str:
    """Return the name of the tensor that an entry, or a view of it, is a box of."""
    return _TILE.sub("", name) if name.endswith("]") else name


class View(msgspec.Struct, frozen=True, gc=False):
    """Another name for a part of an entry, whose bytes are stored once.

    Attributes:
        name: unique among entries and views.
        base: the entry's name.
        dtype: torch's name of the type, maybe not the base's.
        shape: of this tensor.
        strides: in elements of this tensor's type, none negative.
        start: where it begins, in bytes into the base.
    """

    name: str
    base: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A shard and its place: `offset` bytes from the image's first byte (not from its data), `nbytes`
    long.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    offset: int
    nbytes: int


def shard_problems(shards: Sequence[Shard | Entry]) -> Iterator[str]:
    """Yield what is wrong with each, in words: its name, type, box, and names that are there twice."""
    seen: set[str] = set()
    for shard in shards:
        problem = _name_problem(shard.name, seen) or _box_problem(shard)
        if problem:
            yield f"{quote(shard.name)}: {problem}"


def place_problems(entries: Sequence[Entry], nbytes: int) -> Iterator[str]:
    """Yield where entries, whose boxes are sound, do not follow each other without a hole up to byte
    `nbytes`.
    """
    if not 0 <= nbytes <= MAX_BYTES:
        yield f"an image cannot have {clip(nbytes)} bytes"
        return
    at = entries[0].offset if entries else nbytes
    if at < 0:
        yield "the first tensor begins before the image"
    for entry in entries:
        itemsize = DTYPES[entry.dtype].itemsize
        if entry.nbytes != math.prod(entry.shape) * itemsize:
            yield f"{quote(entry.name)}: {clip(entry.nbytes)} bytes are not what its shape and type make"
            return
        if entry.offset != at or at % itemsize:
            yield f"{quote(entry.name)} begins at byte {clip(entry.offset)}, not at {at} or not aligned"
            return
        at += entry.nbytes
    if at != nbytes:
        yield f"the tensors end at byte {clip(at)}, the image at {nbytes}"


def view_problems(views: Sequence[View], entries: Sequence[Shard | Entry]) -> Iterator[str]:
    """Yield what is wrong with each view into entries whose boxes are sound."""
    if not views:
        return
    bases = {entry.name: entry for entry in entries}
    seen = set(bases)
    for view in views:
        problem = _name_problem(view.name, seen) or _view_problem(view, bases.get(view.base))
        if problem:
            yield f"{quote(view.name)}: {problem}"


def _name_problem(name: str, seen: set[str]) -> str:
    if name in seen:
        return "this name is there twice"
    seen.add(name)
    if not name or len(name) > MAX_NAME:
        return f"a name has from 1 to {MAX_NAME} characters"
    if name == _RESERVED:
        return "safetensors keeps this name for itself"
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            return "this name is no valid Unicode"
    return ""


def _sizes_problem(sizes: Sequence[int]) -> str:
    for size in sizes:
        if type(size) is not int or not 0 <= size <= MAX_BYTES:
            return f"{dims(sizes)} has a size that is no integer from 0 to {MAX_BYTES}"
    if len(sizes) > MAX_RANK:
        return f"{len(sizes)} dimensions, more than {MAX_RANK}"
    return ""


def _box_problem(shard: Shard | Entry) -> str:
    if shard.dtype not in DTYPES:
        return f"tensors of type {clip(shard.dtype)} cannot be stored"
    problem = _sizes_problem(shard.shape)
    if problem:
        return problem
    if shard.shape == shard.global_shape and not any(shard.start) and len(shard.start) == len(shard.shape):
        return ""
    problem = _sizes_problem(shard.global_shape) or _sizes_problem(shard.start)
    if problem:
        return problem
    if not len(shard.shape) == len(shard.global_shape) == len(shard.start):
        return "box, whole and start do not have the same number of dimensions"
    for size, total, begin in zip(shard.shape, shard.global_shape, shard.start, strict=True):
        if begin + size > total:
            box = f"{dims(shard.shape)} at {dims(shard.start)}"
            return f"the box {box} reaches out of the whole {dims(shard.global_shape)}"
    return ""


def _view_problem(view: View, base: Shard | Entry | None) -> str:
    if base is None:
        return f"it looks into {quote(view.base)}, which is no tensor of this layout"
    dtype = DTYPES.get(view.dtype)
    if dtype is None:
        return f"tensors of type {clip(view.dtype)} cannot be stored"
    problem = _sizes_problem(view.shape) or _sizes_problem(view.strides) or _sizes_problem((view.start,))
    if problem:
        return problem
    if len(view.shape) != len(view.strides):
        return "shape and strides do not have the same number of dimensions"
    extent = 0
    if 0 not in view.shape:
        last = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
        extent = (last + 1) * dtype.itemsize
    if view.start + extent > math.prod(base.shape) * DTYPES[base.dtype].itemsize:
        return f"it reaches out of {quote(view.base)}"
    return ""
