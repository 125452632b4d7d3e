"""What a step of one parameter group works on."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


@dataclass(slots=True)
class Lists:
    """In parallel: the parameters that have gradients, and what belongs to them. `steps` may be empty."""

    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    moments: tuple[list[Tensor], ...] = ()
    steps: list[Tensor] = field(default_factory=list)

    def all_moments(self) -> Iterable[Tensor]:
        return chain.from_iterable(self.moments)

    def pick(self, places: Sequence[int]) -> Lists:
        """Those at some places."""

        def at(tensors: list[Tensor]) -> list[Tensor]:
            return [tensors[place] for place in places] if tensors else []

        return Lists(at(self.parameters), at(self.gradients), tuple(map(at, self.moments)), at(self.steps))


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that is here; any other tensor itself."""
    if type(tensor) in PLAIN:
        return tensor
    # Not to_local(), which makes a new tensor at each call where this is a parameter.
    inner = getattr(tensor, "_local_tensor", None)
    return inner if isinstance(inner, torch.Tensor) else tensor


def locals_of(tensors: list[Tensor]) -> list[Tensor]:
    return tensors if PLAIN.issuperset(map(type, tensors)) else list(map(local, tensors))
