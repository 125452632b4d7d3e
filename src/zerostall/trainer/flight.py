"""One snapshot being captured: from `save` until its image is whole and known to be untorn."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.candidates import Past
from zerostall.core.reading import Memory
from zerostall.core.roll import Save
from zerostall.trainer.saving import Saving
from zerostall.trainer.taken import Taken
from zerostall.trainer.tears import Tears

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.core.reading import Placed


class Wish(msgspec.Struct, frozen=True):
    """What the agent is to do with an image; see `Checkpointer.save`."""

    metric: float | None
    pin: bool
    replace: bool
    aside: tuple[Past, ...]


class Flight(msgspec.Struct, eq=False):
    """The guard (training thread) and the sealer (its own thread) both come to it, and look for tears.

    Attributes:
        name: of the save, the same on every rank.
        taken: the image being captured; the version counters of its sources were read when that began.
        wish: what the agent is told of it.
        begun: when `save` was called, by `time.perf_counter()`.
        thread: the one that saves.
        tears: what is known of them.
        landed: whether the agent has been told how it ended; the sealer's.
        held: memory that must stay while it is read.
    """

    name: Save
    taken: Taken
    saving: Saving
    wish: Wish
    begun: float
    thread: int
    tears: Tears
    landed: bool = False
    held: list[Memory] | None = None

    @property
    def step(self) -> int:
        return self.name.step

    def protect(
        self, freeze_bytes: int, left: Sequence[Placed] = (), kept: Sequence[Placed] = ()
    ) -> tuple[float, list[str]]:
        """Return when no source is read any more; the seconds that took, and late tears. The optimizer may go on then.

        But for those that it leaves as they are or keeps elsewhere: see `zerostall.core.reading`.

        Training thread.
        """
        start = time.perf_counter()
        self.held = [memory for _, memory in (*left, *kept)]
        self.taken.protect(
            freeze_bytes, [place for place, _ in left], [(place, memory.data_ptr()) for place, memory in kept]
        )
        late = self.tears.look()
        return time.perf_counter() - start, late
