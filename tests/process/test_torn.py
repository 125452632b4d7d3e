"""What changes while it is read, or is not what it should be: such a snapshot is thrown away, by name."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import zerostall
import zerostall.trainer.sealer
from hand import wait_until
from training import change, saved
from zerostall.errors import (
    NonFiniteError,
    TornError,
)
from zerostall.trainer.tears import Tears

pytestmark = pytest.mark.usefixtures("own_agent")


@pytest.fixture
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this thread sleeps between a save and a change, the change is one that is looked for."""
    monkeypatch.setattr(Tears, "look_again", lambda tears: False)


@pytest.mark.usefixtures("no_second_look")
def test_a_tensor_changed_behind_the_guard_makes_the_snapshot_dirty_by_name(where: Path) -> None:
    model = nn.Linear(2000, 2000, bias=False)
    with zerostall.Checkpointer(where, guard="manual", model=model) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()
        saving = ckpt.save(2)
        change(model.weight)  # no guard
        with pytest.raises(TornError, match=r"model\.weight"):
            saving.wait()
        assert (ckpt.stats.dirty, saving.tiers) == (1, frozenset())
        with ckpt.guard():
            change(model.weight)
        saving = ckpt.save(2, when_busy="wait")
        with ckpt.guard():
            change(model.weight)
        saving.wait()
        change(model.weight)  # it has been waited for
        ckpt.save(3, when_busy="wait").wait()
    assert saved(where) == [1, 2, 3]


@pytest.mark.usefixtures("no_second_look")
def test_a_change_that_the_seal_could_not_see_revokes_the_snapshot(where: Path) -> None:
    """The copy is over and sealed in an instant; the change comes after, but before any guard or second look."""
    model = nn.Linear(50, 50, bias=False)
    with zerostall.Checkpointer(where, guard="manual", model=model) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()
        saving = ckpt.save(2)
        deadline = time.monotonic() + 60
        while "disk" not in saving.tiers and time.monotonic() < deadline:
            time.sleep(0.01)
        change(model.weight)
        with ckpt.guard():
            pass
        with pytest.raises(TornError, match=r"model\.weight"):
            saving.wait("host")
        ckpt.save(3, when_busy="wait").wait()
    assert saved(where) == [1, 3]


@pytest.mark.parametrize("seen", [False, True])
def test_a_second_look_is_the_last(where: Path, monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    """It comes by itself, once nothing can be under way. What changes then is no tear, on disk or not."""
    model = nn.Linear(50, 50, bias=False)
    may_look, looked = threading.Event(), threading.Event()

    def look_again(tears: Tears, original=Tears.look_again) -> bool:
        if may_look.is_set() and original(tears):
            looked.set()
        return looked.is_set()

    monkeypatch.setattr(Tears, "look_again", look_again)
    monkeypatch.setattr(zerostall.trainer.sealer, "GRACE", 0.01)
    with zerostall.Checkpointer(where, guard="manual", model=model) as ckpt:
        ckpt.restore()
        saving = ckpt.save(1)
        wait_until(lambda: "host" in saving.tiers, 60)
        if seen:
            change(model.weight)
        may_look.set()
        assert looked.wait(60)
        change(model.weight)
        with ckpt.guard():
            pass
        if seen:
            wait_until(lambda: not saving.tiers, 60)  # the sealer has looked, and says so a moment later
            with pytest.raises(TornError, match=r"model\.weight"):
                saving.wait("host")
        else:
            saving.wait("disk")
        assert ckpt.stats.dirty == seen
    wait_until(lambda: saved(where) == ([] if seen else [1]), 60)


def test_a_state_that_diverged_pushes_no_good_step_out(where: Path) -> None:
    state = {"w": torch.ones(5000), "mask": torch.full((3,), float("-inf"))}
    with zerostall.Checkpointer(
        where, keep=1, when_busy="wait", require_finite=["*", "!state.mask"], state=state
    ) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()
        state["w"][4000] = float("nan")
        bad = ckpt.save(2)
        for tier in ("host", "disk"):
            with pytest.raises(NonFiniteError, match=r"step 2: NaN or infinity in state\.w"):
                bad.wait(tier)
        assert saved(where) == [1]
        state["w"].zero_()
        assert ckpt.restore() == 1
        assert (state["w"] == 1).all()
        ckpt.save(2).wait()  # the number is free again
        state["w"][0] = float("inf")
        ckpt.save(3)
        with pytest.raises(NonFiniteError, match="step 3"):
            ckpt.close()  # nobody had been told
    assert saved(where) == [2]


@pytest.mark.usefixtures("no_second_look")
def test_an_unreported_tear_is_raised_by_close(where: Path) -> None:
    model = nn.Linear(2000, 2000, bias=False)
    ckpt = zerostall.Checkpointer(where, guard="manual", model=model)
    ckpt.restore()
    ckpt.save(1)
    change(model.weight)
    with pytest.raises(TornError):
        ckpt.close()
    ckpt.close()
