"""Memory that counts no longer when a save has just taken a slot of it: that save is skipped, and training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

import zerostall
from training import tensors
from zerostall.trainer.memory import Shelf


@pytest.mark.usefixtures("own_agent")
def test_a_save_whose_memory_goes_while_it_begins_is_skipped(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(shelf: Shelf) -> int | None:
        slot = taken(shelf)
        shelf.forget()  # by the thread that listens to the agent: the next one takes nothing over
        return slot

    taken = Shelf.take
    with zerostall.Checkpointer(where, state=tensors(1, 50), when_busy="wait", rng=False) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        with monkeypatch.context() as patch:
            patch.setattr(Shelf, "take", take)
            assert "gone" in ckpt.save(2).skipped
        ckpt.save(3).wait()
