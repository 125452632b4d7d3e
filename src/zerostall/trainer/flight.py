"""One snapshot being captured: from `save` until its image is whole and known to be untorn."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from zerostall.trainer.tears import Tears

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.core.candidates import Past
    from zerostall.core.reading import Memory, Placed
    from zerostall.core.roll import Save
    from zerostall.trainer.captures import Taken
    from zerostall.trainer.saving import Saving


class Wish(NamedTuple):
    """What the agent is to do with an image; see `Checkpointer.save`."""

    metric: float | None
    pin: bool
    replace: bool
    aside: tuple[Past, ...]


class Flight:
    """The guard (training thread) and the sealer (its own thread) both come to it, and look for tears.

    Attributes:
        name: of the save, the same on every rank.
        taken: the image being captured; the version counters of its sources were read when that began.
        wish: what the agent is told of it.
        begun: when `save` was called, by `time.perf_counter()`.
        thread: the one that saves.
        landed: whether the agent has been told how it ended; the sealer's.
    """

    __slots__ = ("_held", "begun", "landed", "name", "saving", "taken", "tears", "thread", "wish")

    def __init__(self, name: Save, taken: Taken, saving: Saving, wish: Wish, begun: float) -> None:
        self.name = name
        self.taken = taken
        self.saving = saving
        self.wish = wish
        self.begun = begun
        self.thread = threading.get_ident()
        self.landed = False
        self.tears = Tears(taken.changed, self.thread)
        self._held: list[Memory] | None = None

    @property
    def step(self) -> int:
        return self.name.step

    def protect(self, freeze_bytes: int, left: Sequence[Placed] = (), kept: Sequence[Placed] = ()) -> float:
        """Return when no source is read any more; the seconds that took. The optimizer may go on then.

        But for those that it leaves as they are or keeps elsewhere: see `zerostall.core.reading`.

        Training thread.
        """
        start = time.perf_counter()
        self._held = [memory for _, memory in (*left, *kept)]
        self.taken.protect(
            freeze_bytes, [place for place, _ in left], [(place, memory.data_ptr()) for place, memory in kept]
        )
        self.tears.look()
        return time.perf_counter() - start
