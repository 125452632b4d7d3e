"""Distributed tensors as the rest of the package sees them: how they are cut, and which boxes of them are here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
import torch

from zerostall.core.boxes import Box
from zerostall.core.cuts import FLAT, Cut, Held, Run, held
from zerostall.core.own import unnamed_owner
from zerostall.errors import StateError
from zerostall.trainer.state import tensors
from zerostall.trainer.state.flat import FlatShard

if TYPE_CHECKING:
    from zerostall.trainer.state.tensors import Holder


class Sharding(msgspec.Struct, frozen=True):
    """How a tensor is dealt out, and where this rank stands. `indexes` is None where it is not among the ranks.

    `axes` tells, the same on every rank, which dimensions of which mesh make the cuts; `ahead` is that of a flat cut.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    indexes: tuple[int, ...] | None = ()
    axes: tuple[int, ...] = ()
    ahead: int = 0

    def held(self) -> Held | Run:
        """What of it this rank has."""
        if self.indexes is None:
            return held((0,) * len(self.shape), (), ())
        return held(self.shape, self.cuts, self.indexes, self.ahead)


def sharding(name: str, holder: Holder) -> Sharding:
    """Read how a tensor is dealt out; one that is not distributed is whole.

    StateError where what is here is not what its placements say.
    """
    shape = tuple(holder.shape)
    if not tensors.is_distributed(holder):
        return Sharding(shape)
    if isinstance(holder, FlatShard):
        return _flat(name, holder)
    mesh, placements = holder.device_mesh, holder.placements  # type: ignore[union-attr]
    coordinate = mesh.get_coordinate()
    own = tuple(tensors.own(holder).shape)
    if coordinate is None:
        return Sharding(shape, indexes=None)
    cuts: list[Cut] = []
    indexes: list[int] = []
    axes: list[int] = [*mesh.shape, -1]
    for number, placement in enumerate(placements):
        if mesh.size(number) == 1 or placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise StateError(f"{name} is a distributed tensor with the unknown placement {placement}")
        strips = int(getattr(placement, "split_factor", 1))
        cuts.append(Cut(dim % len(shape), mesh.size(number), strips))
        indexes.append(coordinate[number])
        axes.append(number)
    found = Sharding(shape, tuple(cuts), tuple(indexes), tuple(axes) if cuts else ())
    if found.held().shape != own:
        raise StateError(
            f"{name} has {own} of {shape} here; its placements {placements} say {found.held().shape}",
            hint="tensors that are dealt out in unequal parts must follow torch.chunk, as distribute_tensor does",
        )
    return found


def holders_of(holder: Holder) -> str:
    """Name the ranks that hold a tensor together of which each has a part; '' where all of it is here."""
    if not tensors.is_distributed(holder):
        return ""
    if isinstance(holder, FlatShard):
        ranks = holder.place.over
    else:
        mesh, placements = holder.device_mesh, holder.placements  # type: ignore[union-attr]
        cut = any(mesh.size(n) > 1 and not placement.is_replicate() for n, placement in enumerate(placements))
        ranks = tuple(mesh.mesh.flatten().tolist()) if cut else ()
    return unnamed_owner(ranks, sys.modules["torch.distributed"].get_world_size()) if ranks else ""


def _flat(name: str, holder: FlatShard) -> Sharding:
    place = holder.place
    if place.ranks == 1:
        return Sharding(tuple(holder.shape))
    cut = Cut(FLAT, place.ranks, place.each)
    found = Sharding(tuple(holder.shape), (cut,), (place.rank,), (FLAT, place.ranks), place.ahead)
    if found.held().shape != tuple(tensors.own(holder).shape):
        raise StateError(
            f"{name} has {holder.here} elements here; FSDP says that it has {found.held().shape[0]}",
            hint="report it, with the version of torch",
        )
    return found


def window(own: Holder, box: Box, at: Box) -> Holder:
    """Return the view of a rank's own tensor that is a box of the whole one; `at`: where it lies in the own."""
    part = tensors.part_of(own, at)
    return part.reshape(box.shape) if isinstance(part, torch.Tensor) and at.shape != box.shape else part


def parts(name: str, holder: Holder) -> list[tuple[Box, Holder]]:
    """Return the boxes of a tensor that are here, each with the view of this rank's memory that is it."""
    own = tensors.own(holder)
    if isinstance(own, torch.Tensor):
        own = own.detach()
    if not tensors.is_distributed(holder):
        return [(Box.whole(holder.shape), own)]
    return [(box, window(own, box, at)) for box, at in sharding(name, holder).held().boxes()]
