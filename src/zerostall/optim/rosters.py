"""Which tensors a step works on. They are gathered anew only when some object is not the one of the step before."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

from zerostall import native
from zerostall.optim.batches import Batch, sort
from zerostall.optim.lists import PLAIN, Lists, local, locals_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

Group = dict[str, Any]

_gradient, _dtype = attrgetter("grad"), attrgetter("dtype")


class Roster:
    """The tensors of one parameter group that take part in a step.

    Attributes:
        lists: with the gradients of this step, while it lasts.
        gradients: of these, what is here.
        batches: what kernels update.
        rest: places of what they cannot.
    """

    def __init__(self, group: Group, lists: Lists) -> None:
        self.group = group
        self.lists = lists
        self._everyone: list[Tensor] = group["params"]
        self._setting = _setting(group)
        self._present = [one is not None for one in map(_gradient, self._everyone)]
        self._types, self._dtypes = list(map(type, lists.gradients)), list(map(_dtype, lists.gradients))
        self.gradients = locals_of(lists.gradients)
        tensors = chain(lists.parameters, lists.steps, lists.all_moments())
        self._sharded = [one for one in tensors if type(one) not in PLAIN]
        self._shards = list(map(local, self._sharded))
        self.batches: list[Batch] = []
        self.rest = list(range(len(lists.parameters)))
        if group["fused"]:
            self.batches, self.rest = sort(lists)

    def follow(self) -> bool:
        """Take the gradients that there are now. False: another thing has changed too."""
        gradients = list(map(_gradient, self._everyone))
        present = [one is not None for one in gradients]
        if present != self._present or self._everyone is not self.group["params"]:
            return False
        if len(self._types) != len(gradients):
            gradients = [one for one in gradients if one is not None]
        if list(map(type, gradients)) != self._types or list(map(_dtype, gradients)) != self._dtypes:
            return False
        if self._setting != _setting(self.group) or not all(map(is_, map(local, self._sharded), self._shards)):
            return False
        self.lists.gradients = gradients
        self.gradients = locals_of(gradients)
        return all(batch.still(self.lists) for batch in self.batches)

    def let_go(self) -> None:
        """Whoever sets gradients to None frees them."""
        self.lists.gradients = []
        self.gradients = []


class Rosters:
    """Of one optimizer."""

    def __init__(self) -> None:
        self._rosters: list[Roster] = []
        self._state: object = None
        self._watch: native.Watch | None = None
        self._recorded: list[Batch] = []

    def of(self, optimizer: torch.optim.Optimizer, gather: Callable[[Group], Lists]) -> list[Roster]:
        """Those of this step. `gather` makes the lists of a group, and state that is not there yet."""
        if self._watch is None or self._state is not optimizer.state or not self._watch.same():
            self._forget(self._rosters)
            self._rosters = [Roster(group, gather(group)) for group in optimizer.param_groups]
            self._watch_over(optimizer)
            return self._rosters
        for number, roster in enumerate(self._rosters):
            if not roster.follow():
                self._forget([roster])
                self._rosters[number] = Roster(roster.group, gather(roster.group))
        if not self._watch.same():
            self._watch_over(optimizer)
        return self._rosters

    def _watch_over(self, optimizer: torch.optim.Optimizer) -> None:
        self._state = optimizer.state
        states = [state for state in optimizer.state.values() if isinstance(state, dict)]
        lists = [group["params"] for group in optimizer.param_groups]
        self._watch = native.Watch([optimizer.param_groups, *lists, optimizer.state, *states])

    def _forget(self, rosters: list[Roster]) -> None:
        """A graph's replays go on reading what is told to the kernels of the batches that it has seen."""
        self._recorded += [batch for roster in rosters for batch in roster.batches if batch.table.recorded]


def _setting(group: Group) -> list[object]:
    """What it depends on which tensors are there, and who updates them."""
    return [group.get(name) for name in ("amsgrad", "capturable", "dampening", "fused", "momentum")]
