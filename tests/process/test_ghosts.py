"""A snapshot of which other bytes arrived than a device held is thrown away, by name; devices are played."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zerostall
from hand import wait_until
from standin.training import SIZES, Trainer, expected
from zerostall import native
from zerostall.core.layout import CHUNK, Layout
from zerostall.errors import GhostError, TornError
from zerostall.trainer.source_checks import SourceChecks

pytestmark = pytest.mark.usefixtures("own_agent")

Start = Callable[..., Trainer]
CHUNKS = -(-4 * sum(SIZES) // CHUNK)


def test_nothing_is_told_where_all_is_in_order(start_on_stand_in: Start) -> None:
    trainer = start_on_stand_in(source_checks=1.0)
    for step in range(1, 4):
        trainer.ask("fill", step, 20_000)  # still running at save
        trainer.ask("save", step, {"when_busy": "wait"})
        trainer.ask("guard")
        trainer.ask("fill", 100 + step)
        assert trainer.ask("wait", step, "host") == ""
    stats = trainer.ask("stats")
    assert (stats["dirty"], stats["chunks_compared"]) == (0, 3 * CHUNKS)
    assert trainer.ask("restore") == 3
    assert trainer.ask("digest") == expected(3)


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_without_the_order_a_snapshot_is_dirty(start_on_stand_in: Start, share: float) -> None:
    trainer = start_on_stand_in({"ZEROSTALL_WITHOUT": "order"}, source_checks=share)
    stream = trainer.ask("stream")
    trainer.ask("fake", "hold", stream)  # a long kernel
    trainer.ask("fill", 2)
    trainer.ask("save", 2)
    # Waited for when the device was tried, and now by the sealer: all has arrived.
    wait_until(lambda: trainer.ask("fake", "count", "cuEventSynchronize") >= 2)
    trainer.ask("fake", "release")
    told = trainer.ask("wait", 2, "host")
    assert told.startswith("GhostError: step 2: other bytes arrived than the device held at save: t0")
    assert trainer.ask("stats")["dirty"] == 1
    assert trainer.ask("restore") == 0


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
