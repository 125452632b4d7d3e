"""An image that is being captured, as those see it who wait for it, look for tears in it and seal it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from zerostall import native
from zerostall.core.layout import Layout
from zerostall.trainer.devices import Devices
from zerostall.trainer.finite import FiniteCheck
from zerostall.trainer.memory import Memory
from zerostall.trainer.source_checks import SourceChecks
from zerostall.trainer.state import Values
from zerostall.trainer.state.proving import Proof
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


_NONE_LEFT = Values({}, [], None)


class Taken(msgspec.Struct, eq=False):
    """An image that is being captured; the values are of the same instant. `capture.start()` begins it."""

    slot: int
    layout: Layout
    capture: native.Capture
    sources: native.Tensors
    values: Values
    devices: Devices
    memory: Memory
    finite: FiniteCheck | None
    checks: SourceChecks
    stowed: m.Stowed | None = None
    peer: native.Peer | None = None  # must stay open while it is captured into
    proof: Proof | None = None  # must succeed before this is sealed
    broken: bool = False  # an optimizer that kept what is captured elsewhere was interrupted

    def ghosts(self) -> list[str]:
        """Names of tensors of which other bytes arrived than their device held; only once the capture is done.

        What was stowed has not arrived yet: the vault is told what the device held.
        """
        if self.stowed is not None:
            self.stowed = msgspec.structs.replace(self.stowed, samples=tuple(self.capture.samples()))
            return []
        return self.checks.offenders(self.capture, self.layout)

    def not_finite(self) -> list[str]:
        """Names of tensors that must be finite and are not; only once the capture is done."""
        return self.finite.offenders(self.memory.address(self.slot)) if self.finite is not None else []

    def changed(self, *, exchanged: bool) -> list[str]:
        """Names of tensors that were written to since this began; with `exchanged`, also of those whose memory was."""
        return [self.layout.entries[index].name for index in self.sources.moved(exchanged=exchanged)]

    def let_go_of_values(self) -> None:
        """They have been encoded. Parts know the user's objects, which may know who saves them."""
        self.values = _NONE_LEFT

    def reads(self, storage: torch.UntypedStorage) -> bool:
        """Whether something in that memory is captured."""
        return self.sources.any_within(storage.data_ptr(), storage.nbytes())

    def protect(self, freeze_bytes: int, left: Sequence[int], kept: Sequence[tuple[int, int]]) -> native.Protection:
        """Return when no source is read any more, or by nothing that the streams of this thread do not wait for."""
        if self.proof is not None:
            self.proof.await_read()
        return self.capture.protect(freeze_bytes=freeze_bytes, streams=self.devices.now(), left=left, kept=kept)
