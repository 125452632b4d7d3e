"""A snapshot of which other bytes arrived than a device held is thrown away, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zerostall
from zerostall import native
from zerostall.core.layout import Layout
from zerostall.errors import GhostError, TornError
from zerostall.trainer.source_checks import SourceChecks

pytestmark = pytest.mark.usefixtures("own_agent")


def test_a_ghost_is_dirty_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ghosts: list[str] = []

    def offenders(_checks: SourceChecks, _capture: native.Capture, layout: Layout) -> list[str]:
        return [entry.name for entry in layout.entries if entry.name in ghosts]

    monkeypatch.setattr(SourceChecks, "offenders", offenders)
    state = {"weight": torch.ones(5000), "bias": torch.zeros(7)}
    with zerostall.Checkpointer(tmp_path, rng=False, when_busy="wait", state=state) as ckpt:
        ckpt.save(1).wait("host")
        ghosts.append("state.weight")
        with pytest.raises(GhostError, match=r"step 2: other bytes arrived than the device held at save: state"):
            ckpt.save(2).wait("host")
        assert ckpt.stats.dirty == 1
        assert ckpt.restore() == 1
        ghosts.clear()
        ckpt.save(2).wait("host")
    assert issubclass(GhostError, TornError)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_what_is_no_share_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(ValueError, match="source_checks="):
        zerostall.Checkpointer(tmp_path, source_checks=share, state={"a": torch.ones(3)})


def test_state_in_host_memory_has_nothing_to_compare(tmp_path: Path) -> None:
    with zerostall.Checkpointer(tmp_path, source_checks=1, state={"a": torch.ones(3000)}) as ckpt:
        ckpt.save(1).wait("host")
        assert ckpt.stats.chunks_compared == 0
