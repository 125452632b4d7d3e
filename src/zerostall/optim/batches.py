"""From the lists of a step to kernel launches: one for all tensors of a group that are of the same types."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import torch

from zerostall.optim.lists import Lists, local, locals_of
from zerostall.optim.tables import GRADIENT, INTERPRETED, KEPT, MOMENTS, PARAMETER, STEP, Table
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """The tensors of one launch, the same ones from step to step but for the gradients."""

    def __init__(self, kind: Kind, places: list[int], lists: Lists) -> None:
        mine = lists.pick(places)
        self.kind = kind
        self.parameters = locals_of(mine.parameters)
        self.moments = [locals_of(tensors) for tensors in mine.moments]
        self.table = Table(kind.device, [parameter.numel() for parameter in self.parameters])
        self._places = places
        self._all = len(places) == len(lists.parameters)
        self._tensors = [*self.parameters, *locals_of(mine.steps), *chain.from_iterable(self.moments)]
        self._ids = list(map(id, self.parameters)), [list(map(id, tensors)) for tensors in self.moments]
        self._straight = all(map(torch.Tensor.is_contiguous, self.parameters))
        self._addresses: list[int] = []
        self._apart = False  # whether somewhere the table has a kept parameter, or a moment read elsewhere
        changed = chain(mine.parameters, mine.steps, mine.all_moments(), self._tensors)
        self._changed = list({id(tensor): tensor for tensor in changed}.values())

    def still(self, lists: Lists) -> bool:
        """Whether this is still a batch. Tensors may have moved, but not become others in type or in memory's order."""
        if _addresses(self._tensors) != self._addresses:
            self._addresses = []
            return all(_kind(lists, place) == self.kind for place in self._places)
        return True

    def point(self, gradients: list[Tensor], turn: Turn) -> list[tuple[Tensor, Tensor]]:
        """Bring the table up to date for a step that flips and keeps as `turn` says.

        Args:
            gradients: of all tensors of the group.

        Returns:
            Gradients that do not lie in memory as their parameters do, with copies that do; the kernel takes these.
        """
        mine = gradients if self._all else [gradients[place] for place in self._places]
        copies: list[tuple[Tensor, Tensor]] = []
        if not (self._straight and all(map(torch.Tensor.is_contiguous, mine))):
            mine = [self._ordered(parameter, one, copies) for parameter, one in zip(self.parameters, mine, strict=True)]
        self.table.put(GRADIENT, _addresses(mine))
        apart = bool(turn.flipped or turn.kept)
        if apart or self._apart or not self._addresses:
            self._addresses = _addresses(self._tensors)
            self._point_at_state(turn)
            self._apart = apart
        self.table.upload()
        return copies

    @staticmethod
    def _ordered(parameter: Tensor, gradient: Tensor, copies: list[tuple[Tensor, Tensor]]) -> Tensor:
        if gradient.stride() == parameter.stride():
            return gradient
        copy = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
        copies.append((gradient, copy))
        return copy

    def _point_at_state(self, turn: Turn) -> None:
        rows, table = self.table.rows, self.table
        table.put(PARAMETER, self._addresses[:rows])
        ids, moment_ids = self._ids
        kept = map(turn.kept.get, ids) if turn.kept else ()
        table.put(KEPT, [aside.data_ptr() if aside is not None else 0 for aside in kept] or [0] * rows)
        at = len(self._tensors) - rows * len(self.moments)
        if at > rows:
            table.put(STEP, self._addresses[rows:at])
        for number, tensors in enumerate(self.moments):
            into = self._addresses[at : at + rows]
            left = list(map(turn.flipped.get, moment_ids[number], tensors)) if turn.flipped else []
            table.put(MOMENTS + 2 * number, _addresses(left) or into)
            table.put(MOMENTS + 2 * number + 1, into)
            at += rows

    def written(self, turn: Turn) -> None:
        """Tell the turn, and torch, which counts only the changes that its own operations make."""
        ids, moment_ids = self._ids
        for keys, waiting in ((ids, turn.kept), *((keys, turn.flipped) for keys in moment_ids)):
            for key in keys if waiting else ():
                waiting.pop(key, None)
        torch.autograd.graph.increment_version(self._changed)


def sort(lists: Lists) -> tuple[list[Batch], list[int]]:
    """The batches of a group's tensors, and the places of those that no kernel can take."""
    places: dict[Kind, list[int]] = {}
    rest: list[int] = []
    for place in range(len(lists.parameters)):
        kind = _kind(lists, place)
        if kind is None:
            rest.append(place)
        else:
            places.setdefault(kind, []).append(place)
    return [Batch(kind, mine, lists) for kind, mine in places.items()], rest


def split(lists: Lists, is_right: Callable[[Tensor], bool]) -> tuple[Lists, Lists]:
    """Those that torch's fused kernels treat right, and those that they do not, or whose memory they would walk in the
    wrong order."""
    right: list[int] = []
    wrong: list[int] = []
    for place, parameter in enumerate(lists.parameters):
        stride = parameter.stride()
        others = [lists.gradients[place], *(tensors[place] for tensors in lists.moments)]
        alike = all(one.stride() == stride for one in others) and _fills_its_memory(parameter.shape, stride)
        (right if alike and is_right(parameter) else wrong).append(place)
    return lists.pick(right) if wrong else lists, lists.pick(wrong)


def _kind(lists: Lists, place: int) -> Kind | None:
    """What a tensor and its like are launched as; None where no kernel can take it."""
    if not lists.moments:
        return None
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
