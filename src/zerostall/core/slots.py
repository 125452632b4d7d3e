"""Which slot of a rank's host memory may be captured into next: a pure table.

A rank owns a few equal slots. The trainer captures only into a slot that was *granted* to it, and gives it back by
sealing (or discarding) it; so the trainer and the agent never touch one slot at the same time, and need no lock across
processes.

    free ──grant──▶ granted ──seal──▶ sealed ──grant──▶ granted (its old image is gone)
                       └────discard──▶ free

A granted slot may be *filling* before it is sealed: a vault of the agent brings the rest of its image, and the trainer
is granted another one meanwhile.

A slot whose step is saved anew is *outdone*, if it was clean: nobody finds it, and it is free when the new image is
clean, too, or sealed again when that one comes to nothing.

A sealed slot is not granted while it is the newest, while somebody reads it (`hold`), or while it was promised to a
slower tier (`promise`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from zerostall.errors import CapacityError


class Phase(Enum):
    free = "free"
    granted = "granted"
    filling = "filling"
    sealed = "sealed"
    outdone = "outdone"


@dataclass(slots=True)
class Slot:
    """One place for one image."""

    index: int
    phase: Phase = Phase.free
    step: int = -1
    readers: int = 0
    promised: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """The slot to capture into, or None, and why."""

    index: int | None
    reason: str


@dataclass(slots=True)
class Slots:
    """The table of one segment. Not thread-safe: one owner drives it."""

    count: int
    table: list[Slot] = field(init=False)

    def __post_init__(self) -> None:
        if self.count < 2:
            raise CapacityError(
                f"slots={self.count}: capturing a new image needs a slot beside the newest sealed one",
                hint="use slots=2 or more",
            )
        self.table = [Slot(index) for index in range(self.count)]

    def sealed(self) -> list[Slot]:
        """Sealed slots by rising step."""
        return sorted((s for s in self.table if s.phase is Phase.sealed and s.step >= 0), key=lambda s: s.step)

    def at_step(self, step: int) -> Slot | None:
        """The sealed slot that holds `step`."""
        return next((s for s in self.table if s.phase is Phase.sealed and s.step == step), None)

    def outdone(self, step: int) -> Slot | None:
        """The slot that holds an image of `step` that was clean before the newest of that number was sealed."""
        return next((s for s in self.table if s.phase is Phase.outdone and s.step == step), None)

    def granted(self) -> Slot | None:
        return next((s for s in self.table if s.phase is Phase.granted), None)

    def grant(self, keep: frozenset[int] = frozenset(), spare: frozenset[int] = frozenset(), enough: int = 0) -> Grant:
        """Grant a slot: a free one, else the oldest sealed one that nobody needs.

        Args:
            keep: further steps that must stay (the newest step that is clean on every rank, say).
            spare: steps that stay while there are `enough` slots without them, or another can be had.
        """
        taken = self.granted()
        if taken is not None:
            return Grant(None, f"slot {taken.index} is granted already")
        for slot in self.table:
            if slot.phase is Phase.free:
                slot.phase = Phase.granted
                return Grant(slot.index, "free")
        older = self.sealed()[:-1]
        spared = [slot for slot in older if slot.step in spare]
        for slot in [slot for slot in older if slot not in spared] + spared:
            if slot in spared and self.count - len(spared) >= enough:
                break
            if slot.readers == 0 and not slot.promised and slot.step not in keep and not self.outdone(slot.step):
                replaced = slot.step
                slot.phase, slot.step = Phase.granted, -1
                return Grant(slot.index, f"replaces step {replaced}")
        return Grant(None, "every older image is being read or promised to a slower tier")

    def claim(self, index: int) -> None:
        """Grant this very slot: a trainer that kept the memory says what it has in it."""
        if not 0 <= index < len(self.table) or self.table[index].phase is not Phase.free or self.granted():
            raise ValueError(f"slot {index} cannot be claimed")
        self.table[index].phase = Phase.granted

    def fill(self, index: int) -> None:
        """The trainer is done with the granted slot; the agent brings the rest."""
        slot = self._taken_slot(index)
        if slot.phase is not Phase.granted:
            raise ValueError(f"slot {index} is {slot.phase.value}, not granted")
        slot.phase = Phase.filling

    def seal(self, index: int, step: int, *, outdo: bool = False) -> None:
        """The granted or filling slot now holds the whole image of `step`.

        An older image of the same step loses to this one; `outdo`: it stays until `settle` or `restore`.
        """
        slot = self._taken_slot(index)
        twin = self.at_step(step)
        if twin is not None and outdo:
            twin.phase, twin.promised = Phase.outdone, False
        elif twin is not None:
            self.forget(twin.index)
        slot.phase, slot.step, slot.promised = Phase.sealed, step, False

    def settle(self, step: int) -> None:
        """The image of `step` is clean: none that it has outdone is needed, nor older ones."""
        for slot in self.table:
            if slot.phase is Phase.outdone and slot.step <= step:
                self.forget(slot.index)

    def restore(self, step: int) -> Slot | None:
        """The newest image of `step` came to nothing: the one that it had outdone is sealed again, if there is one."""
        newest, slot = self.at_step(step), self.outdone(step)
        if newest is not None:
            self.forget(newest.index)
        if slot is not None:
            slot.phase = Phase.sealed
        return slot

    def discard(self, index: int) -> None:
        """The granted or filling slot holds nothing of use (a dirty capture, a dead trainer)."""
        self._taken_slot(index).phase = Phase.free

    def hold(self, index: int) -> None:
        """Somebody starts to read a sealed slot."""
        slot = self.table[index]
        if slot.phase is not Phase.sealed:
            raise ValueError(f"slot {index} is {slot.phase.value}, not sealed")
        slot.readers += 1

    def release(self, index: int) -> None:
        """A reader is through."""
        slot = self.table[index]
        if slot.readers == 0:
            raise ValueError(f"slot {index} has no reader")
        slot.readers -= 1
        if slot.readers == 0 and slot.step < 0:
            self.free(index)

    def forget(self, index: int) -> None:
        """Nobody may find this image any more; who reads it already reads on, and then the slot is free."""
        slot = self.table[index]
        slot.step, slot.promised = -1, False
        if slot.readers == 0:
            self.free(index)

    def promise(self, index: int, promised: bool = True) -> None:
        """Keep (or no longer keep) a sealed slot until a slower tier has it."""
        self.table[index].promised = promised

    def free(self, index: int) -> None:
        """Forget a sealed image."""
        slot = self.table[index]
        slot.phase, slot.step, slot.promised = Phase.free, -1, False

    def _taken_slot(self, index: int) -> Slot:
        if not 0 <= index < len(self.table):
            raise ValueError(f"no slot {index}: there are {len(self.table)}")
        slot = self.table[index]
        if slot.phase not in (Phase.granted, Phase.filling):
            raise ValueError(f"slot {index} is {slot.phase.value}, not granted")
        return slot
