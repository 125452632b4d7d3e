"""The slots this trainer captures into: shared memory lent by the agent, and what is sealed in it.

The trainer keeps the mapping whatever becomes of the agent; a new agent takes the memory over with what it holds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from zerostall.errors import AgentError
from zerostall.wire import messages as m

if TYPE_CHECKING:
    import threading
    from collections.abc import Container

    from zerostall import native
    from zerostall.core.layout import Layout
    from zerostall.wire.notice import Notice


_REVOKED_KEPT = 64


@dataclass(slots=True)
class Memory:
    """One lease. `slot` is this trainer's: the next capture may go there, or one does already where it is `taken`.

    The link's thread grants it, training takes it, the sealer answers for it: each does so in one of the states alone,
    so that `take`, which is within `save`, needs no lock. All else is guarded by the checkpointer's condition.
    `busy_at`: address of the byte that `say` writes, 0 where there is none.
    """

    layout: Layout
    layout_bytes: bytes
    segment: native.Segment
    stride: int
    slots: int
    slot: int | None = None
    taken: bool = False
    notice: Notice | None = None
    begin: int = 0
    busy_at: int = 0

    def __post_init__(self) -> None:
        self.begin = self.segment.address
        if self.notice is not None:
            self.busy_at = self.begin + self.stride * self.slots

    def say(self, *, busy: bool) -> None:
        """Let the agent see whether something is being captured. The one who knows; needs no lock."""
        if self.notice is not None:
            self.notice.say(busy=busy)

    def address(self, slot: int) -> int:
        return self.begin + slot * self.stride

    def grant(self, slot: int) -> None:
        self.taken = False  # first: whoever sees the slot may take it
        self.slot = slot


class Shelf:
    """The lease of now, and the sealed images in it, as the agent would have to be told."""

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self._images: dict[int, tuple[int, m.Sealed]] = {}
        self._stowed: dict[int, tuple[float, int, m.Sealed]] = {}  # created, step: until they are drained
        self._revoked: deque[m.Revoked] = deque(maxlen=_REVOKED_KEPT)
        self._early_grant: m.Granted | None = None
        self._grant = m.Granted(slot=-1)
        self._lent = False  # the agent of now has lent what is not installed yet
        self.memory: Memory | None = None

    def install(self, memory: Memory) -> None:
        """A new lease; the grants that follow are for it.

        Raises:
            AgentError: the agent that lent it is gone, and the one of now knows nothing of it.
        """
        with self._condition:
            if not self._lent:
                raise AgentError("the agent died when it had lent memory; the next save borrows other memory")
            self._lent = False
            self.memory = memory
            self._images, self._stowed = {}, {}
            if (early := self._early_grant) is not None:
                self._grant, self._early_grant = early, None
                memory.grant(early.slot)
            self._condition.notify_all()

    def leased(self) -> None:
        """The agent has answered a lease: grants heard from now on are for the new memory, not installed yet."""
        with self._condition:
            self.memory = None
            self._early_grant = None
            self._lent = True

    def grant(self, grant: m.Granted) -> None:
        with self._condition:
            if self.memory is None:
                self._early_grant = grant
            else:
                self._images.pop(grant.slot, None)
                self._grant = grant
                self.memory.grant(grant.slot)
            self._condition.notify_all()

    @property
    def place(self) -> tuple[int, int]:
        """Locker and place that were granted with the slot that was taken last; locker 0 for none."""
        return self._grant.locker, self._grant.place

    def take(self) -> int | None:
        """The slot to capture into now, if one is granted. Of the threads that may ask, one at a time."""
        memory = self.memory
        if memory is None or memory.taken or (slot := memory.slot) is None:
            return None
        memory.taken = True
        return slot

    def put_back(self, slot: int) -> None:
        """The slot that was taken was not used after all."""
        with self._condition:
            if self.memory is not None:
                self.memory.grant(slot)
                self.memory.say(busy=False)

    def take_back(self) -> None:
        """A slot that was taken and came to nothing, for Ctrl-C came in between, can be taken again.

        Only while no flight is under way.
        """
        with self._condition:
            memory = self.memory
            if memory is not None and memory.taken and memory.slot is not None:
                memory.taken = False
                memory.say(busy=False)

    def ready(self) -> bool:
        """Is a slot granted? Caller holds the condition."""
        return self.memory is not None and self.memory.slot is not None and not self.memory.taken

    def forget(self) -> None:
        """The memory counts no longer. It stays mapped, for a capture may go on."""
        with self._condition:
            self.memory = None
            self._stowed = {}
            self._condition.notify_all()

    def sealed(self, step: int, image: m.Sealed) -> m.Sealed:
        """What the agent is to be told: the image with the grant that it was captured by."""
        with self._condition:
            image = msgspec.structs.replace(image, grant=self._answered(image.slot))
            if image.grant:
                self._images[image.slot] = (step, image)
            return image

    def stowed(self, step: int, created: float, image: m.Sealed) -> m.Sealed:
        """The image is whole, but for what a vault has still to bring to its slot; else as `sealed`."""
        with self._condition:
            image = msgspec.structs.replace(image, grant=self._answered(image.slot))
            if image.grant:
                self._stowed[image.slot] = created, step, image
            return image

    def drained(self, event: m.Drained) -> None:
        """A vault has brought the rest."""
        with self._condition:
            stowed = self._stowed.pop(event.slot, None)
            if stowed is not None and stowed[:2] == (event.created, event.step):
                image = msgspec.structs.replace(stowed[2], record=event.record, stowed=None)
                self._images[event.slot] = event.step, image
            self._condition.notify_all()

    def spoiled(self, step: int, created: float) -> None:
        """What was stowed of that save came to nothing."""
        with self._condition:
            self._stowed = {slot: s for slot, s in self._stowed.items() if s[:2] != (created, step)}
            self._condition.notify_all()

    def take_stowed(self) -> list[tuple[int, float]]:
        """Step and time of all that was stowed and not drained: it went with the agent."""
        with self._condition:
            gone, self._stowed = self._stowed, {}
            self._condition.notify_all()
            return [(step, created) for created, step, _ in gone.values()]

    def await_drained(self, timeout: float) -> bool:
        """Wait until nothing is stowed any more."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._stowed, timeout)

    def revoked(self, image: m.Revoked) -> None:
        """A step is dirty after all: no agent may take it over, and the next one must hear of it, too."""
        step = image.step
        with self._condition:
            if image not in self._revoked:  # it may be told twice, where Ctrl-C came in between
                self._revoked.append(image)
            self._images = {slot: image for slot, image in self._images.items() if image[0] != step}
            self._stowed = {slot: image for slot, image in self._stowed.items() if image[1] != step}

    def revocations(self) -> list[m.Revoked]:
        """For an agent that may not have heard them, where a connection broke: it may have the images still, or have
        them on disk.
        """
        with self._condition:
            return list(self._revoked)

    def discarded(self, slot: int) -> int:
        """What was captured there is worth nothing; the number of the grant that is given back."""
        with self._condition:
            return self._answered(slot)

    def _answered(self, slot: int) -> int:
        """The capture into that slot is over: the number of its grant; 0 if that counts no longer. Under the lock."""
        if self.memory is None or not self.memory.taken or self.memory.slot != slot:
            return 0
        self.memory.slot = None  # until now, nothing else was granted
        return self._grant.number

    def adoption(self, awaited: Container[int] = ()) -> tuple[m.Adopt, int] | None:
        """What an agent takes over. The slot in use (being captured into, or granted) stays this trainer's.

        `awaited`: steps that somebody waits for. The agent must know before it hears of any newer image.
        """
        with self._condition:
            self._lent = False
            memory = self.memory
            if memory is None:
                return None
            images = tuple(
                msgspec.structs.replace(image, promise=image.promise or step in awaited)
                for _, (step, image) in sorted(self._images.items())
            )
            adopt = m.Adopt(
                id=0,
                layout=memory.layout_bytes,
                begins=memory.layout.begins,
                slots=memory.slots,
                images=images,
                busy_slot=memory.slot,
                grant=self._grant.number,
                place=self.place if memory.slot is not None else (0, 0),
                stowed=tuple(
                    msgspec.structs.replace(image, promise=image.promise or step in awaited)
                    for _, (_, step, image) in sorted(self._stowed.items())
                ),
            )
            return adopt, memory.segment.fileno()
