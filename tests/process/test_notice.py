"""A trainer says that it is being read from, exactly while it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zerostall
from zerostall.trainer.sealer import Sealer


@pytest.mark.usefixtures("own_agent")
def test_from_the_save_until_the_last_byte_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    finish = Sealer._finish

    def finished(self: Sealer, flight) -> None:
        notice = flight.taken.memory.notice
        said.append(notice.busy)
        finish(self, flight)
        said.append(notice.busy)

    monkeypatch.setattr(Sealer, "_finish", finished)
    with zerostall.Checkpointer(tmp_path / "run", slots=2, state={"t": torch.arange(100_000)}) as ckpt:
        ckpt.save(1).wait("host", timeout=60)
        assert ckpt._shelf.memory is not None and ckpt._shelf.memory.notice is not None
        assert not ckpt._shelf.memory.notice.busy
        ckpt.save(2, when_busy="wait").wait("host", timeout=60)
    assert said == [True, False] * 2
