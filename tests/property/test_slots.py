"""Whatever happens to a slot table: the newest image stays, readers keep theirs, one slot at most is granted."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zerostall.core.slots import Phase, Slots


class SlotLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(3)
        self.step = 0
        self.newest: int | None = None
        self.readers: list[tuple[int, int]] = []
        self.promised: set[int] = set()

    @rule()
    def grant(self) -> None:
        before = {slot.index: slot.step for slot in self.slots.sealed()}
        index = self.slots.grant().index
        if index in before:
            assert before[index] != self.newest
            assert before[index] not in self.promised
            assert all(index != held for held, _ in self.readers)

    @precondition(lambda self: self.slots.granted() is not None)
    @rule(discard=st.booleans())
    def finish(self, discard: bool) -> None:
        granted = self.slots.granted()
        assert granted is not None
        if discard:
            self.slots.discard(granted.index)
            return
        self.step += 1
        self.slots.seal(granted.index, self.step)
        self.newest = self.step

    @precondition(lambda self: bool(self.slots.sealed()))
    @rule(pick=st.integers(0, 10))
    def read(self, pick: int) -> None:
        sealed = self.slots.sealed()
        slot = sealed[pick % len(sealed)]
        self.slots.hold(slot.index)
        self.readers.append((slot.index, slot.step))

    @precondition(lambda self: bool(self.readers))
    @rule()
    def done_reading(self) -> None:
        index, _ = self.readers.pop()
        self.slots.release(index)

    @precondition(lambda self: bool(self.slots.sealed()))
    @rule(pick=st.integers(0, 10), promised=st.booleans())
    def promise(self, pick: int, promised: bool) -> None:
        sealed = self.slots.sealed()
        slot = sealed[pick % len(sealed)]
        self.slots.promise(slot.index, promised)
        (self.promised.add if promised else self.promised.discard)(slot.step)

    @invariant()
    def the_newest_image_is_there(self) -> None:
        assert self.newest is None or self.slots.at_step(self.newest) is not None

    @invariant()
    def readers_find_their_image(self) -> None:
        for index, step in self.readers:
            assert (self.slots.table[index].phase, self.slots.table[index].step) == (Phase.sealed, step)

    @invariant()
    def one_grant_at_most(self) -> None:
        assert sum(slot.phase is Phase.granted for slot in self.slots.table) <= 1


SlotLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestSlotLife = SlotLife.TestCase
