"""From the lists of a step to kernel launches: one for all tensors of a group that are of the same types."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import torch

from zerostall.optim.lists import Lists, local
from zerostall.optim.tables import INTERPRETED, Table
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from torch import Tensor

    from zerostall.optim.flips import Turn

_FLOATS = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


@dataclass(frozen=True, slots=True)
class Kind:
    """What the tensors of one launch have in common."""

    device: torch.device
    parameter: torch.dtype
    gradient: torch.dtype
    moment: torch.dtype


class Batch:
    """The tensors of one launch, the same ones from step to step but for the gradients.

    The table's columns: sizes, parameters, gradients, where parameters are kept, steps, and for each kind of moment
    where it is read and where it is written.
    """

    def __init__(self, kind: Kind, places: list[int], lists: Lists) -> None:
        mine = lists.pick(places)
        self.kind = kind
        self.places = places
        self.parameters = list(map(local, mine.parameters))
        self.moments = [list(map(local, tensors)) for tensors in mine.moments]
        self.steps = list(map(local, mine.steps))
        self.table = Table(kind.device, [parameter.numel() for parameter in self.parameters])
        written = chain(mine.parameters, mine.all_moments(), self.parameters, *self.moments)
        self._written = list({id(tensor): tensor for tensor in written}.values())

    def point(self, lists: Lists, turn: Turn) -> list[tuple[Tensor, Tensor]]:
        """Bring the table up to date for a step that flips and keeps as `turn` says.

        Returns:
            Gradients that do not lie in memory as their parameters do, with copies that do; the kernel takes these.
        """
        gradients: list[int] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for place, parameter in zip(self.places, self.parameters, strict=True):
            gradient = local(lists.gradients[place])
            if gradient.stride() != parameter.stride():
                straight = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
                copies.append((gradient, straight))
                gradient = straight
            gradients.append(gradient.data_ptr())
        nowhere = [0] * self.table.rows
        kept = [turn.kept.get(one) for one in self.parameters] if turn.kept else []
        columns = [
            _addresses(self.parameters),
            gradients,
            [aside.data_ptr() if aside is not None else 0 for aside in kept] or nowhere,
            _addresses(self.steps) or nowhere,
        ]
        for tensors in self.moments:
            into = _addresses(tensors)
            left = [turn.flipped.get(one, one) for one in tensors] if turn.flipped else []
            columns += [_addresses(left) or into, into]
        self.table.point(columns)
        return copies

    def written(self, turn: Turn) -> None:
        """Tell the turn, and torch, which counts only the changes that its own operations make."""
        for tensors, waiting in ((self.parameters, turn.kept), *((one, turn.flipped) for one in self.moments)):
            for tensor in tensors if waiting else ():
                waiting.pop(tensor, None)
        torch.autograd.graph.increment_version(self._written)


class Batches:
    """Of one optimizer. They are remembered, and sorted anew when a group's tensors are others."""

    def __init__(self) -> None:
        self._sorted: dict[int, tuple[list[int], list[Batch], list[int]]] = {}

    def of(self, group: int, lists: Lists) -> tuple[list[Batch], Lists]:
        """The batches of a group's tensors, and those that no kernel can take."""
        if not lists.parameters:
            return [], lists
        # The batches keep their tensors alive, so that no other can come to have the same id.
        identity = [*map(id, chain(lists.parameters, lists.all_moments(), lists.steps))]
        identity += [id(gradient.dtype) for gradient in lists.gradients]
        known = self._sorted.get(group)
        if known is None or known[0] != identity:
            known = self._sorted[group] = (identity, *_sort(lists))
        return known[1], lists.pick(known[2]) if known[2] else Lists()


def _sort(lists: Lists) -> tuple[list[Batch], list[int]]:
    kinds: dict[Kind, list[int]] = {}
    rest: list[int] = []
    for place in range(len(lists.parameters)):
        kind = _kind(lists, place)
        (rest if kind is None else kinds.setdefault(kind, [])).append(place)
    return [Batch(kind, places, lists) for kind, places in kinds.items()], rest


def split(lists: Lists) -> tuple[Lists, Lists]:
    """Those that torch's fused kernels treat right, and those whose memory they would walk in the wrong order."""
    right: list[int] = []
    wrong: list[int] = []
    for place, parameter in enumerate(lists.parameters):
        stride = parameter.stride()
        others = [lists.gradients[place], *(tensors[place] for tensors in lists.moments)]
        alike = all(one.stride() == stride for one in others) and _fills_its_memory(parameter.shape, stride)
        (right if alike else wrong).append(place)
    return lists.pick(right) if wrong else lists, lists.pick(wrong)


def _kind(lists: Lists, place: int) -> Kind | None:
    """What a tensor and its like are launched as; None where no kernel can take it."""
    parameter, gradient = local(lists.parameters[place]), local(lists.gradients[place])
    moments = [local(tensors[place]) for tensors in lists.moments]
    steps = [local(lists.steps[place])] if lists.steps else []
    kind = Kind(parameter.device, parameter.dtype, gradient.dtype, moments[0].dtype)
    stride = parameter.stride()
    fits = (
        has_kernels(kind.device)
        and {parameter.dtype, gradient.dtype, kind.moment} <= _FLOATS
        and all(one.dtype == kind.moment and one.stride() == stride for one in moments)
        and all(one.device == kind.device for one in (gradient, *moments, *steps))
        and all(one.dtype == torch.float32 for one in steps)
        and _fills_its_memory(parameter.shape, stride)
    )
    return kind if fits else None


@lru_cache(maxsize=4096)
def _fills_its_memory(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether elements lie side by side in some order, so that two such tensors match when walked from end to end."""
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride() == stride


def _addresses(tensors: list[Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def has_kernels(device: torch.device) -> bool:
    """Whether our kernels run there; where a CUDA device has none for want of Triton, that is said once."""
    if device.type == "cpu":
        return INTERPRETED
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    say_once("no-triton", "Triton is not installed: zerostall.optim uses torch's own kernels, and a flip costs a copy")
    return False
