"""One snapshot being captured: from `save` until its image is whole and known to be untorn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from zerostall import native
from zerostall.trainer.saving import Saving
from zerostall.trainer.state import Values


@dataclass(slots=True)
class Flight:
    """The guard (training thread) and the sealer (its own thread) both come to it; whoever is first looks for tears.

    Attributes:
        slot: where the image goes.
        tensors: its sources; their version counters were read when the capture began.
        name_of: image entry index → name of the tensor.
    """

    step: int
    slot: int
    layout: str
    capture: native.Capture
    tensors: native.Tensors
    name_of: Callable[[int], str]
    values: Values
    saving: Saving
    metric: float | None
    promise: bool
    replace: bool
    pin: bool
    created: float
    landed: threading.Event = field(default_factory=threading.Event)
    _torn: list[str] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def protect(self, freeze_bytes: int) -> float:
        """Return when no source is read any more; the seconds that took. The optimizer may go on then."""
        start = time.perf_counter()
        self.capture.protect(freeze_bytes=freeze_bytes)
        self.torn()
        return time.perf_counter() - start

    def torn(self) -> list[str]:
        """Names of tensors that changed between `save` and the end of reading them. Looked at once."""
        with self._lock:
            if self._torn is None:
                self._torn = [self.name_of(index) for index in self.tensors.moved()]
            return self._torn
