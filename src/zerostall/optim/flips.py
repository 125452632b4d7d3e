"""The other memory of an optimizer's tensors, and which snapshot may still read it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, TypeAlias

import torch

from zerostall.optim.lists import locals_of
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from zerostall.core.reading import Claim, Reader
    from zerostall.optim.lists import Lists

_nbytes, _place = attrgetter("nbytes"), itemgetter(0)

_Found: TypeAlias = "tuple[int, Tensor, bool]"
"""A place in the image, the tensor that is to be read, and whether it moves; else its bytes are kept aside."""


@dataclass(slots=True)
class Spare:
    """Memory shaped like a tensor's own. `claim`: a snapshot may read it until that is over."""

    tensor: Tensor
    memory: Tensor
    claim: Claim | None = None


@dataclass(slots=True)
class Turn:
    """One step. What is in it has still to be brought in order, by whoever updates the tensor.

    Keys are ids of tensors, whose own hash takes torch ten times as long.

    Attributes:
        flipped: tensor → the memory it has left, which holds its bytes; its own holds nothing yet.
        kept: parameter → where its bytes of now must go before it is changed.
    """

    flipped: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[int, Tensor] = field(default_factory=dict)

    def settle(self, tensors: Iterable[Tensor]) -> None:
        """Copy, for an update that knows nothing of flips."""
        if not self.flipped and not self.kept:
            return
        to: list[Tensor] = []
        of: list[Tensor] = []
        for tensor in tensors:
            if (old := self.flipped.pop(id(tensor), None)) is not None:
                to.append(tensor)
                of.append(old)
            if (aside := self.kept.pop(id(tensor), None)) is not None:
                to.append(aside)
                of.append(tensor)
        if to:
            torch._foreach_copy_(to, of)  # pyright: ignore[reportPrivateImportUsage]


class Flips:
    """Of one optimizer. At most `budget` bytes of other memory, kept for the next snapshot.

    A moment's *tensor* stays the same object for good; its memory is one of two. A parameter's memory never changes.

    Attributes:
        nbytes: bytes of other memory held now.
    """

    def __init__(self) -> None:
        self.reader: Reader | None = None
        self.nbytes = 0
        self._budget = 0
        self._spares: dict[int, Spare] = {}  # by the tensor's id

    def ask(self, reader: Reader | None, budget: int) -> None:
        self.reader = reader
        self._budget = budget
        self.forget()

    def forget(self) -> None:
        """The optimizer's tensors are others from now on."""
        self._spares = {}
        self.nbytes = 0

    @contextlib.contextmanager
    def turn(self, groups: Iterable[Lists]) -> Iterator[Turn]:
        """Wrap the updates of one step. Only moments of these groups may be flipped, only their parameters kept."""
        turn = Turn()
        reader = self.reader
        pending = reader.pending() if reader is not None else None
        if reader is None or pending is None:
            yield turn
            return
        chosen = self._choose(pending, groups) if pending else []
        left = [(place, tensor.data) for (place, tensor, moves), _ in chosen if moves]
        claim = reader.claim(left, [(place, spare.memory) for (place, _, moves), spare in chosen if not moves])
        whole = False
        try:
            leaving = iter(left)
            for (_, tensor, moves), spare in chosen:
                spare.claim = claim
                if moves:
                    tensor.data, (_, spare.memory) = spare.memory, next(leaving)
                    turn.flipped[id(tensor)] = spare.memory
                else:
                    turn.kept[id(tensor)] = spare.memory
            whole = True
            yield turn
        finally:
            # What nobody has updated, be it for an error, still has to be where the snapshot and training look for it.
            turn.settle(tensor for (_, tensor, _), _ in chosen)
            if whole:  # else Ctrl-C came: who was asked sees that nobody has released it
                claim.release()

    def _choose(self, pending: Mapping[tuple[int, int], int], groups: Iterable[Lists]) -> list[tuple[_Found, Spare]]:
        """The tensors that are read last, as far as there is memory."""
        found = _pending_of(pending, groups)
        self._see_what_is_over()
        chosen: list[tuple[_Found, Spare]] = []
        unwanted: list[Spare] | None = None
        for one in found:
            _, tensor, _ = one
            spare = self._spares.get(id(tensor))
            if spare is None:
                over = self.nbytes + tensor.nbytes - self._budget
                if over > 0:
                    unwanted = self._unwanted(found) if unwanted is None else unwanted
                    if not self._make_room(over, unwanted):
                        continue
                spare = self._new_spare(tensor)
            if spare is not None and spare.claim is None:
                chosen.append((one, spare))
        return chosen

    def _see_what_is_over(self) -> None:
        claims = {id(spare.claim): spare.claim for spare in self._spares.values() if spare.claim is not None}
        over = {key for key, claim in claims.items() if claim.over()}
        for spare in self._spares.values() if over else ():
            if id(spare.claim) in over:
                spare.claim = None

    def _unwanted(self, found: list[_Found]) -> list[Spare]:
        wanted = {id(tensor) for _, tensor, _ in found}
        return [spare for key, spare in self._spares.items() if key not in wanted and spare.claim is None]

    def _make_room(self, nbytes: int, unwanted: list[Spare]) -> bool:
        if nbytes > sum(spare.memory.nbytes for spare in unwanted):
            return False
        while nbytes > 0:
            spare = unwanted.pop(0)
            del self._spares[id(spare.tensor)]
            nbytes -= spare.memory.nbytes
            self.nbytes -= spare.memory.nbytes
        return True

    def _new_spare(self, tensor: Tensor) -> Spare | None:
        try:
            memory = torch.empty_like(tensor, requires_grad=False)
        except torch.OutOfMemoryError as error:
            say_once(
                "no-flip-memory",
                "%s has no %d bytes to spare for policy 'flip' (%s): the guard waits for what cannot be flipped",
                tensor.device,
                tensor.nbytes,
                error,
            )
            return None
        if memory.stride() != tensor.stride():
            return None  # it does not fill its memory; read at the guard, as with every other optimizer
        spare = self._spares[id(tensor)] = Spare(tensor, memory)
        self.nbytes += memory.nbytes
        return spare


def _pending_of(pending: Mapping[tuple[int, int], int], groups: Iterable[Lists]) -> list[_Found]:
    """What is read last comes first."""
    found: list[_Found] = []
    for lists in groups:
        for tensors, moves in ((list(lists.all_moments()), True), (lists.parameters, False)):
            here = locals_of(tensors)
            places = map(pending.get, zip(map(torch.Tensor.data_ptr, here), map(_nbytes, here), strict=True))
            found += [one for one in zip(places, here, repeat(moves), strict=False) if one[0] is not None]  # pyright: ignore[reportAssignmentType]
    found.sort(key=_place, reverse=True)
    return found
