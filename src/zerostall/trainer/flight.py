"""One snapshot being captured: from `save` until its image is whole and known to be untorn."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.core.reading import Memory, Placed
    from zerostall.trainer.captures import Taken
    from zerostall.trainer.saving import Saving
    from zerostall.wire import messages as m


@dataclass(slots=True, kw_only=True)
class Flight:
    """The guard (training thread) and the sealer (its own thread) both come to it; whoever is first looks for tears.

    Attributes:
        taken: the image being captured; the version counters of its sources were read when that began.
        wish: what the agent is told beside the record.
        thread: the one that saves.
        landed: whether the agent has been told how it ended; the sealer's.
        late: tensors that the guard found changed although the sealer had not: the sealed image cannot be trusted.
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
    late: list[str] = field(default_factory=list)
    _held: list[Memory] = field(default_factory=list)
    _torn: list[str] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def protect(self, freeze_bytes: int, left: Sequence[Placed] = (), kept: Sequence[Placed] = ()) -> float:
        """Return when no source is read any more; the seconds that took. The optimizer may go on then.

        But for those that it leaves as they are or keeps elsewhere: see `zerostall.core.reading`.

        Training thread. Looks for tears even where the sealer has looked: torch counts a version up at the *end* of an
        operation, so that one which was under way then is seen only now.
        """
        start = time.perf_counter()
        self._held = [memory for _, memory in (*left, *kept)]
        self.taken.protect(
            freeze_bytes, [place for place, _ in left], [(place, memory.data_ptr()) for place, memory in kept]
        )
        self.look()
        return time.perf_counter() - start

    def look(self) -> list[str]:
        """Names of tensors that have changed since `save`. Whoever looks first, the sealer must know."""
        with self._lock:
            moved = [self.taken.layout.entries[index].name for index in self.taken.sources.moved()]
            if self._torn is None:
                self._torn = moved
            elif moved and not self._torn:
                self.late = moved
            return moved

    def torn(self) -> list[str]:
        """The finding that counts for the seal: the guard's if it was first, else the one of now."""
        with self._lock:
            if self._torn is not None:
                return self._torn
        self.look()
        assert self._torn is not None
        return self._torn
