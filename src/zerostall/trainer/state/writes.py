"""From "this stored tensor goes to that tensor" to memory that is written once, and copies made afterwards.

The bytes of an entry land in one target, in parallel, in any order. So no two targets may overlap: one that overlaps
another is copied after all has landed; one that is the very memory of another is only compared, and a difference told.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from zerostall.core.layout import Entry, View
from zerostall.trainer.state import tensors
from zerostall.trainer.state.aliasing import contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zerostall.trainer.state.stored import StoredState
    from zerostall.trainer.state.tensors import Geometry, Holder

EXPANDED = "the target is expanded or overlaps itself: several of its elements share one place in memory"


@dataclass(slots=True)
class Writes:
    """What is written where.

    Attributes:
        targets: index of an entry -> where its bytes go, in parallel.
        copies: what is copied out of the image afterwards, one after the other.
        shared: stored separately, but the target's memory is that of another: (what is stored, the target).
        refused: name -> why its target cannot be written.
    """

    targets: dict[int, Holder] = field(default_factory=dict)
    copies: list[tuple[View, Holder]] = field(default_factory=list)
    shared: list[tuple[View, Holder]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def as_tensor(holder: Holder) -> torch.Tensor:
    """Return the tensor over the same memory (of a distributed one: what is here), without its gradient history."""
    holder = tensors.own(holder)
    return holder.detach() if isinstance(holder, torch.Tensor) else torch.from_numpy(holder)


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements as a type of that size which torch can copy, compare and move, bit for bit."""
    return tensor.detach().view(_SAME_SIZE[tensor.element_size()])


def copy_into(target: Holder, source: torch.Tensor) -> None:
    """Copy one tensor over another of its type, whatever their strides and devices, without a trace in autograd."""
    with torch.no_grad():
        as_bits(as_tensor(target)).copy_(as_bits(source))


def as_bytes(image: memoryview) -> torch.Tensor:
    """Return an image's bytes as a tensor over the same memory. It is only read, so it may be read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(image, dtype=torch.uint8)


def view_of(base: torch.Tensor, view: View) -> torch.Tensor:
    """Return the part of a contiguous base's elements that a view names; a copy only where it is not aligned."""
    data = base.view(-1).view(torch.uint8)
    dtype = tensors.torch_dtype(view.dtype)
    if 0 in view.shape:
        return torch.empty(view.shape, dtype=dtype, device=base.device)
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)) + 1
    run = data[view.start : view.start + reach * dtype.itemsize]
    if run.data_ptr() % dtype.itemsize or run.storage_offset() % dtype.itemsize:
        run = run.clone()
    return run.view(dtype).as_strided(view.shape, view.strides)


def entry_view(entry: Entry) -> View:
    """Return the view that is all of an entry."""
    return View(entry.name, entry.name, entry.dtype, entry.shape, contiguous_strides(entry.shape), 0)


def read_view(stored: StoredState, image: torch.Tensor, view: View) -> torch.Tensor:
    """Return what a view names in an image (its bytes as a uint8 tensor), without a copy where it is aligned."""
    entry = stored.layout.entries[stored.entries[view.base]]
    return view_of(image[entry.offset : entry.offset + entry.nbytes], view)


def plan(stored: StoredState, pairs: Iterable[tuple[str, Holder]], places: Mapping[int, Geometry]) -> Writes:
    """Decide how each pair (stored name, target of its shape and type) is written.

    `places`: where targets are, by their ids, so far as that is known.
    """
    writes = Writes()
    aliases: list[tuple[View, Holder]] = []
    for name, target in pairs:
        holder = tensors.own(target)
        view = stored.views.get(name)
        if view is not None:
            aliases.append((view, holder))
            continue
        index = stored.entries[name]
        if index in writes.targets:  # two names were renamed to one
            aliases.append((entry_view(stored.layout.entries[index]), holder))
        elif repeats(holder):
            writes.refused[name] = EXPANDED
        else:
            writes.targets[index] = holder
    for view, holder in aliases:
        _plan_view(stored, view, holder, writes)
    _part_overlaps(stored, writes, places)
    return writes


def repeats(holder: Holder) -> bool:
    """Return whether several elements of a target share one place in memory."""
    holder = tensors.own(holder)
    contiguous = holder.is_contiguous() if isinstance(holder, torch.Tensor) else holder.flags.c_contiguous
    return not contiguous and tensors.geometry(holder).overlaps


def _plan_view(stored: StoredState, view: View, holder: Holder, writes: Writes) -> None:
    index = stored.entries[view.base]
    entry = stored.layout.entries[index]
    if repeats(holder):
        distinct = once(view, holder)
        if distinct is None:
            writes.refused[view.name] = EXPANDED
            return
        view, holder = narrowed(view), distinct
    target = writes.targets.get(index)
    if target is None and is_whole(view, entry):
        writes.targets[index] = holder
    elif target is None or not _is_alias(view, holder, entry, target):
        writes.copies.append((view, holder))


def _is_alias(view: View, holder: Holder, entry: Entry, target: Holder) -> bool:
    """Return whether `holder` is, in the target's memory, what `view` is in the stored base."""
    ours, base = tensors.geometry(holder), tensors.geometry(target)
    if ours == base:
        return is_whole(view, entry)
    if ours.storage != base.storage or not base.contiguous or ours.start != base.start + view.start:
        return False
    return all(
        size == 1 or mine == other for size, mine, other in zip(view.shape, ours.strides, view.strides, strict=True)
    )


def is_whole(view: View, entry: Entry) -> bool:
    """Return whether a view is all of its base, under another name."""
    return (view.dtype, view.shape, view.strides, view.start) == (
        entry.dtype,
        entry.shape,
        contiguous_strides(entry.shape),
        0,
    )


def once(view: View, holder: Holder) -> Holder | None:
    """Return the distinct elements of a target that has some several times, if what is stored has them likewise."""
    strides = tensors.geometry(holder).strides
    mine = [size > 1 and stride == 0 for size, stride in zip(holder.shape, strides, strict=True)]
    theirs = [size > 1 and stride == 0 for size, stride in zip(view.shape, view.strides, strict=True)]
    if mine != theirs:
        return None
    distinct = tensors.distinct(holder)
    return distinct if strides == view.strides or not tensors.geometry(distinct).overlaps else None


def narrowed(view: View) -> View:
    """Return the view of an expanded view's distinct elements."""
    shape = tuple(1 if stride == 0 else size for size, stride in zip(view.shape, view.strides, strict=True))
    strides = contiguous_strides(shape)
    mended = tuple(mine if stride == 0 else stride for mine, stride in zip(strides, view.strides, strict=True))
    return View(view.name, view.base, view.dtype, shape, mended, view.start)


def overlaps(placed: Iterable[tuple[Geometry, int]]) -> dict[int, bool]:
    """Which targets, by number, lie over another; and whether the other covers all of it, so that it is only compared.

    No two of the rest do. In the order in which they are to be copied.
    """
    found: dict[int, bool] = {}
    first: dict[int, tuple[Geometry, int]] = {}
    groups: dict[int, list[tuple[Geometry, int]]] = {}  # seldom is memory that of several
    for one in placed:
        where = one[0]
        if 0 not in where.shape and (other := first.setdefault(where.storage, one)) is not one:
            groups.setdefault(where.storage, [other]).append(one)
    for group in groups.values():
        group.sort(key=lambda item: (item[0].start, -item[0].stop))
        widest: Geometry | None = None
        for where, number in group:
            if widest is None or where.start >= widest.stop:
                widest = where
                continue
            found[number] = where == widest or (widest.contiguous and where.stop <= widest.stop)
            if not found[number] and where.stop > widest.stop:
                widest = where
    return found


def _part_overlaps(stored: StoredState, writes: Writes, places: Mapping[int, Geometry]) -> None:
    """Take every target that overlaps another out of those written in parallel."""
    placed = zip(tensors.geometries(writes.targets.values(), places), writes.targets, strict=True)
    for index, covered in overlaps(placed).items():
        pair = (entry_view(stored.layout.entries[index]), writes.targets.pop(index))
        (writes.shared if covered else writes.copies).append(pair)


def contradiction(name: str) -> str:
    """What the user is told of a tensor that another one decides."""
    return f"{name} was stored with other bytes than the tensor whose memory it shares here"


def alike(target: Holder, source: torch.Tensor) -> bool:
    """Return whether two tensors of one type have the same bits."""
    return torch.equal(_comparable(as_tensor(target)), _comparable(source))


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits as integers: the largest type that can be copied so is complex, and no NaN equals itself."""
    bits = as_bits(tensor).cpu()
    return torch.view_as_real(bits).view(torch.int64) if bits.is_complex() else bits


def contradictions(stored: StoredState, writes: Writes, image: torch.Tensor) -> list[str]:
    """Name what was stored separately, with other bytes, for targets that share their memory."""
    return [view.name for view, holder in writes.shared if not alike(holder, read_view(stored, image, view))]
