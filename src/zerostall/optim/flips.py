"""The other memory of an optimizer's tensors, and which snapshot may still read it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from zerostall.optim.lists import local
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from zerostall.core.reading import Claim, Reader
    from zerostall.optim.lists import Lists


@dataclass(slots=True)
class Spare:
    """Memory shaped like a tensor's own. `claim`: a snapshot may read it until that is over."""

    memory: Tensor
    claim: Claim | None = None

    def idle(self) -> bool:
        if self.claim is not None and self.claim.over():
            self.claim = None
        return self.claim is None


@dataclass(slots=True)
class Turn:
    """One step. What is in it has still to be brought in order, by whoever updates the tensor.

    Attributes:
        flipped: tensor → the memory it has left, which holds its bytes; its own holds nothing yet.
        kept: parameter → where its bytes of now must go before it is changed.
    """

    flipped: dict[Tensor, Tensor] = field(default_factory=dict)
    kept: dict[Tensor, Tensor] = field(default_factory=dict)

    def settle(self, tensors: Iterable[Tensor]) -> None:
        """Copy, for an update that knows nothing of flips."""
        if not self.flipped and not self.kept:
            return
        to: list[Tensor] = []
        of: list[Tensor] = []
        for tensor in tensors:
            if (old := self.flipped.pop(tensor, None)) is not None:
                to.append(tensor)
                of.append(old)
            if (aside := self.kept.pop(tensor, None)) is not None:
                to.append(aside)
                of.append(tensor)
        if to:
            torch._foreach_copy_(to, of)  # pyright: ignore[reportPrivateImportUsage]


class Flips:
    """Of one optimizer. At most `budget` bytes of other memory, kept for the next snapshot.

    A moment's *tensor* stays the same object for good; its memory is one of two. A parameter's memory never changes.
    """

    def __init__(self) -> None:
        self.reader: Reader | None = None
        self._budget = 0
        self._spares: dict[Tensor, Spare] = {}

    def ask(self, reader: Reader | None, budget: int) -> None:
        self.reader = reader
        self._budget = budget
        self._spares = {}

    @property
    def nbytes(self) -> int:
        """Bytes of other memory held now."""
        return sum(spare.memory.nbytes for spare in self._spares.values())

    def forget(self) -> None:
        """The optimizer's tensors are others from now on."""
        self._spares = {}

    @contextlib.contextmanager
    def turn(self, groups: Iterable[Lists]) -> Iterator[Turn]:
        """Wrap the updates of one step. Only moments of these groups may be flipped, only their parameters kept."""
        turn = Turn()
        reader = self.reader
        pending = reader.pending() if reader is not None else None
        if reader is None or pending is None:
            yield turn
            return
        chosen = self._choose(pending, list(groups)) if pending else []
        claim = reader.claim(
            [(place, tensor.data) for place, tensor, _, moves in chosen if moves],
            [(place, spare.memory) for place, _, spare, moves in chosen if not moves],
        )
        try:
            for _, tensor, spare, moves in chosen:
                spare.claim = claim
                if moves:
                    left, tensor.data = tensor.data, spare.memory
                    turn.flipped[tensor] = spare.memory = left
                else:
                    turn.kept[tensor] = spare.memory
            yield turn
        finally:
            # What nobody has updated, be it for an error, still has to be where the snapshot and training look for it.
            turn.settle([*turn.flipped, *turn.kept])
            claim.release()

    def _choose(
        self, pending: Mapping[tuple[int, int], int], groups: Iterable[Lists]
    ) -> list[tuple[int, Tensor, Spare, bool]]:
        """The tensors that are read last, as far as there is memory: place, tensor, other memory, whether it moves."""
        found = [
            (place, tensor, moves)
            for lists in groups
            for tensors, moves in ((lists.all_moments(), True), (lists.parameters, False))
            for tensor in map(local, tensors)
            if (place := pending.get((tensor.data_ptr(), tensor.nbytes))) is not None
        ]
        found.sort(key=lambda one: one[0], reverse=True)
        wanted = {tensor for _, tensor, _ in found}
        chosen: list[tuple[int, Tensor, Spare, bool]] = []
        for place, tensor, moves in found:
            spare = self._spares.get(tensor)
            if spare is None:
                spare = self._new_spare(tensor, wanted)
            if spare is None or not spare.idle():
                continue
            chosen.append((place, tensor, spare, moves))
        return chosen

    def _new_spare(self, tensor: Tensor, wanted: set[Tensor]) -> Spare | None:
        over = self.nbytes + tensor.nbytes - self._budget
        idle = [one for one, spare in self._spares.items() if one not in wanted and spare.idle()] if over > 0 else []
        if over > sum(one.nbytes for one in idle):
            return None
        for one in idle:
            if over > 0:
                over -= self._spares.pop(one).memory.nbytes
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
        spare = self._spares[tensor] = Spare(memory)
        return spare
