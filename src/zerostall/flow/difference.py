"""How two steps differ, tensor by tensor and value by value, with a chunk of each in memory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall.core import leaves
from zerostall.core.contents import Content, contents
from zerostall.core.dtypes import DTYPES
from zerostall.flow.image_reader import ImageReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerostall.core.layout import Entry
    from zerostall.core.manifest import Manifest
    from zerostall.tiers.contract import RunTier, Stored

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A tensor that is in both steps and is not the same kind of thing: `float32 (3, 4)`, `bfloat16 (3, 4)`."""

    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor whose bytes differ; every bit counts, so 0.0 and -0.0 do."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed_elements: int


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A small value that differs, both as text; an empty text where it is not there."""

    name: str
    a: str
    b: str


@dataclass(slots=True)
class Difference:
    """How step `b` differs from step `a`.

    Attributes:
        only_a, only_b: names of tensors that are in one of both.
        reshaped: those with another type, shape or alias.
        changed: those with other bytes.
        equal: how many tensors are the same, bit for bit. Aliases of what was compared are not counted.
        values: small values that differ.
    """

    a: int
    b: int
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    reshaped: list[Reshaped] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)
    equal: int = 0
    values: list[ChangedValue] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_a or self.only_b or self.reshaped or self.changed or self.values)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two steps."""

    run: RunTier
    step: int
    manifest: Manifest

    @property
    def nbytes(self) -> int:
        """Of all ranks' images."""
        return sum(rank.nbytes for rank in self.manifest.ranks)

    def reader(self, rank: int) -> ImageReader:
        stored = self.run.open(self.step, rank)
        return ImageReader(self.run.bytes_of(self.step, rank, stored), stored)


def compare(a: Side, b: Side, count: Callable[[int], None]) -> Difference:
    """Compare rank by rank; `count` is told of bytes as they are read."""
    result = Difference(a.step, b.step)
    for rank in range(max(a.manifest.world, b.manifest.world)):
        with contextlib.ExitStack() as stack:
            one = stack.enter_context(a.reader(rank)) if rank < a.manifest.world else None
            other = stack.enter_context(b.reader(rank)) if rank < b.manifest.world else None
            label = f"rank {rank}: " if a.manifest.world > 1 or b.manifest.world > 1 else ""
            _compare_rank(one, other, result, label, count)
    return result


def _compare_rank(
    a: ImageReader | None, b: ImageReader | None, result: Difference, label: str, count: Callable[[int], None]
) -> None:
    found_a = {content.name: content for content in contents(a.stored.layout)} if a else {}
    found_b = {content.name: content for content in contents(b.stored.layout)} if b else {}
    result.only_a.extend(label + name for name in found_a if name not in found_b)
    result.only_b.extend(label + name for name in found_b if name not in found_a)
    same: list[Content] = []
    for name, content in found_a.items():
        other = found_b.get(name)
        if other is None:
            continue
        if _kind(content) != _kind(other):
            result.reshaped.append(Reshaped(label + name, describe(content), describe(other)))
        elif not content.alias_of:
            same.append(content)
    if a and b:
        same.sort(key=lambda content: content.entry.offset)
        for content in same:
            entry, other = content.entry, found_b[content.name].entry
            changed = sum(
                changed_elements(left, right, DTYPES[entry.dtype].itemsize)
                for left, right in _blocks(a, b, entry, other, count)
            )
            if changed:
                elements = entry.nbytes // DTYPES[entry.dtype].itemsize
                result.changed.append(Changed(label + content.name, content.dtype, content.shape, elements, changed))
            else:
                result.equal += 1
    result.values.extend(changed_values(a.stored if a else None, b.stored if b else None, label))


def describe(content: Content) -> str:
    """`float32 (3, 4)`, and what it is an alias of."""
    shape = f"({', '.join(map(str, content.shape))})"
    part = "part of " if content.view else ""
    alias = f", {part}{content.alias_of}" if content.alias_of else ""
    box = content.entry
    if not content.alias_of and box.shape != box.global_shape:
        whole = ", ".join(map(str, box.global_shape))
        alias = f" at ({', '.join(map(str, box.start))}) of ({whole})"
    return f"{content.dtype} {shape}{alias}"


def _kind(content: Content) -> tuple[object, ...]:
    box, view = content.entry, content.view
    strides = (view.strides, view.start) if view else None
    place = () if content.alias_of else (box.dtype, box.shape, box.global_shape, box.start)
    return (content.dtype, content.shape, content.alias_of, strides, place)


def _blocks(
    a: ImageReader, b: ImageReader, entry: Entry, other: Entry, count: Callable[[int], None]
) -> Iterator[tuple[bytearray, bytearray]]:
    """The bytes of two tensors of the same size, block by block."""
    for start in range(0, entry.nbytes, _BLOCK):
        size = min(_BLOCK, entry.nbytes - start)
        yield _block(a, entry.offset + start, size), _block(b, other.offset + start, size)
        count(2 * size)


def _block(reader: ImageReader, offset: int, nbytes: int) -> bytearray:
    block = bytearray()
    for piece in reader.read(offset, nbytes):
        block += piece
    return block


def changed_elements(a: bytes | bytearray, b: bytes | bytearray, itemsize: int) -> int:
    """How many elements of two equally long blocks differ.

    The blocks are taken as two large integers: what is left of their XOR is folded, element by element, into one byte
    each.
    """
    if a == b:
        return 0
    folded = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    width = 1
    while width < itemsize:
        folded |= folded >> 8 * width
        width *= 2
    # Bytes of the next element are shifted into all of an element's bytes but the lowest.
    lowest = folded.to_bytes(len(a), "little")[::itemsize]
    return len(lowest) - lowest.count(0)


def changed_values(a: Stored | None, b: Stored | None, label: str) -> Iterator[ChangedValue]:
    """The small values of two ranks that differ."""
    texts_a, texts_b = (
        {leaf.name: leaf.text for leaf in leaves.leaves(stored.record.values)} if stored else {} for stored in (a, b)
    )
    for name in dict.fromkeys([*texts_a, *texts_b]):
        left, right = texts_a.get(name, ""), texts_b.get(name, "")
        if left != right:
            yield ChangedValue(label + name, left, right)
