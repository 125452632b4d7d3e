"""zerostall itself, as a peer among the others."""

from __future__ import annotations

from pathlib import Path

import torch

import zerostall
from benchmarks.peers.contract import Training, state_of, tensors_in
from zerostall.config import Policy

PATIENCE = 300.0
FREEZE_BYTES = 6 << 30


class Zerostall:
    """zerostall with one of its policies; every accepted save lands in memory that outlives the trainer.

    Args:
        disk_interval: seconds from one write to disk to the next; what is persisted goes at once.
        peer: by way of another GPU's memory.
    """

    fsyncs = True
    outlives = "memory"

    def __init__(
        self,
        training: Training,
        folder: Path,
        *,
        policy: Policy,
        disk_interval: float = 5.0,
        slots: int = 3,
        peer: bool = False,
    ) -> None:
        self.training = training
        self.checkpointer = zerostall.Checkpointer(
            folder,
            keep=1,
            policy=policy,
            slots=slots,
            freeze_bytes=FREEZE_BYTES,
            disk_interval=disk_interval,
            peer=peer,
            model=training.model,
            optimizer=training.optimizer,
        )
        self.last: zerostall.Saving | None = None
        self.skipped = 0

    def save(self, step: int) -> None:
        self._accepted(self.checkpointer.save(step))

    def persist(self, step: int) -> None:
        self._accepted(self.checkpointer.save(step, when_busy="wait"))

    def _accepted(self, saving: zerostall.Saving) -> None:
        if saving.skipped:
            self.skipped += 1
        else:
            self.last = saving

    def before_update(self) -> None: ...

    def staged(self) -> None:
        """Until it is sealed, which is a little later than its last byte has left the device."""
        if self.last is not None:
            self.last.wait("host", timeout=PATIENCE)

    def drain(self) -> None:
        if self.last is not None:
            self.last.wait("disk", timeout=PATIENCE)
            self.last = None

    def make_room(self) -> None: ...

    def load(self) -> dict[str, torch.Tensor]:
        self.checkpointer.restore()  # in place
        return tensors_in(state_of(self.training))

    def close(self) -> None:
        self.checkpointer.close()
