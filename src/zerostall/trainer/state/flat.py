"""FSDP's first version: parameters lie one behind the other in a flat parameter, of which each rank has a stretch.

What a rank has of a parameter is a run of its elements. It is read where it lies, in the rank's shard of the flat
parameter, and so is what optimizers keep of it; nothing is gathered. Optimizers hold the flat parameters themselves, or
with `use_orig_params` the original ones, each of which is a view of the run that is here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

FLAT_PARAMETER = "_flat_param"
"""Under this name it is registered in a module that is wrapped."""


class Place(NamedTuple):
    """Where a parameter is in a flat one.

    Attributes:
        ranks: over which that is divided, equally; `rank`: which of them this is; `over`: their numbers in the job.
        each: elements that a rank has of the flat one.
        ahead: elements before the parameter in the flat one.
    """

    ranks: int
    rank: int
    each: int
    ahead: int
    over: tuple[int, ...] = ()


class FlatShard(torch.Tensor):
    """A parameter, or what an optimizer keeps of it, of which a run of elements is here. It computes nothing.

    Attributes:
        source: what is in the program's hands: the flat parameter, an original one, or a tensor of a state.
        first: the run's first element in the source.
        place: where it is in the flat parameter.
    """

    source: torch.Tensor
    first: int
    place: Place
    _local_tensor: torch.Tensor

    @staticmethod
    def __new__(cls, source: torch.Tensor, shape: torch.Size, first: int, count: int, place: Place) -> FlatShard:
        made: FlatShard = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=source.dtype, device=source.device, requires_grad=source.requires_grad
        )
        made.source = source
        made.first = first
        made.place = place
        # A detached view stays where it is while the source has other memory, and counts the source's changes.
        made._local_tensor = source.detach().view(-1)[first : first + count]
        if place.ranks == 1:
            made._local_tensor = made._local_tensor.view(shape)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise TypeError(f"a run of a tensor's elements stands for it; {func} cannot be computed with it")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FlatShard({tuple(self.shape)}, {self.place})"

    @property
    def here(self) -> int:
        """Elements that this rank has."""
        return self._local_tensor.numel()

    def alike(self, value: torch.Tensor) -> bool:
        """Whether a tensor of an optimizer's state has an element for each of the source."""
        return value.shape == self.source.shape

    def of(self, value: torch.Tensor) -> FlatShard:
        """What of such a tensor belongs to this parameter."""
        return FlatShard(value, self.shape, self.first, self.here, self.place)


class UnfitError(Exception):
    """A flat parameter that cannot be stored as it is; says why."""


def members_of(flats: Mapping[int, list[FlatShard]], params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What an optimizer holds, with the parameters in the place of flat ones, which are known by their ids."""
    if not flats:
        return list(params)
    return [member for param in params for member in flats.get(id(param), (param,))]


def shards(wrapper: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor, FlatShard]]:
    """Yield (module, name in it, what optimizers hold, the shard) of each parameter that this wrapper has flattened.

    Of tied parameters each name has the same shard. None come of wrappers that leave their parameters as they were.
    UnfitError where they are in use, or of a kind that cannot be told apart.
    """
    handle: Any = getattr(wrapper, "_handle", None)
    if handle is None or (handle._use_orig_params and not handle.uses_sharded_strategy):
        return  # original parameters, all of each
    flat: Any = handle.flat_param
    _reshard(wrapper, handle, flat)
    distributed = sys.modules["torch.distributed"]
    ranks = handle.world_size if handle.uses_sharded_strategy else 1
    over = tuple(distributed.get_process_group_ranks(handle.process_group)) if ranks > 1 else ()
    each = int(flat.numel())
    found: dict[tuple[int, str], tuple[torch.Tensor, FlatShard]] = {}
    every = zip(_offsets(flat), flat._param_infos, flat._shard_param_infos, flat._shapes, strict=True)
    for number, (ahead, (name, module, _), shard, shape) in enumerate(every):
        if not flat._contiguities[number]:
            raise UnfitError(f"{flat._fqns[number]} is not contiguous, so its elements are not in their order")
        if flat._param_extensions[number] is not None:
            raise UnfitError(f"{flat._fqns[number]} is distributed in another way, too")
        place = Place(ranks, handle.rank if ranks > 1 else 0, each, ahead, over)
        first, count = (shard.offset_in_shard, shard.numel_in_shard) if shard.in_shard else (0, 0)
        held: torch.Tensor = flat
        if handle._use_orig_params:
            held, first = flat._params[number], 0
            if count and held.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
                raise UnfitError(f"{flat._fqns[number]} has other memory than FSDP gave it: let it make a forward")
        found[id(module), name] = (held, FlatShard(held, shape, first, count, place))
        yield module, name, *found[id(module), name]
    for name, module, _, first_name, first_module, _ in flat._shared_param_infos:
        yield module, name, *found[id(first_module), first_name]


def _reshard(wrapper: nn.Module, handle: Any, flat: Any) -> None:
    """Have the shard in the flat parameter's place: after an evaluation the outermost wrapper's is still gathered."""
    local = getattr(flat, "_local_shard", None)
    if local is None or (flat.data_ptr() == local.data_ptr() and not handle._skipped_use_sharded_views):
        return
    if handle._training_state.name != "IDLE":
        raise UnfitError("is in the middle of a forward, a backward or summon_full_params: save between steps")
    sys.modules["torch.distributed.fsdp._runtime_utils"]._reshard(wrapper, handle, True)


def _offsets(flat: Any) -> list[int]:
    """Where each parameter begins in the flat one; some have padding before them."""
    found: list[int] = []
    at = 0
    for count, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            found.append(at)
        at += count
    return found
