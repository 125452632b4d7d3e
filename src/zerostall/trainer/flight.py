"""One snapshot being captured: from `save` until its image is whole and known to be untorn."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall.trainer.tears import Tears

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.core.reading import Memory, Placed
    from zerostall.trainer.captures import Taken
    from zerostall.trainer.saving import Saving
    from zerostall.wire import messages as m


@dataclass(slots=True, kw_only=True)
class Flight:
    """The guard (training thread) and the sealer (its own thread) both come to it, and look for tears.

    Attributes:
        taken: the image being captured; the version counters of its sources were read when that began.
        wish: what the agent is told beside the record.
        thread: the one that saves.
        landed: whether the agent has been told how it ended; the sealer's.
        followers: what the agent is told right after that.
    """

    run: str
    rank: int
    world: int
    step: int
    taken: Taken
    saving: Saving
    metric: float | None
    created: float
    wish: m.Sealed
    thread: int = field(default_factory=threading.get_ident)
    begun: float = field(default_factory=time.perf_counter)
    landed: bool = False
    followers: list[m.Message] = field(default_factory=list)
    tears: Tears = field(init=False)
    _held: list[Memory] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tears = Tears(self.taken.changed, thread=self.thread)

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
