"""Saving and restoring with a real agent: the loop, one instant, the nearest tier, lost agents, the end."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import forked
import zerostall
from hand import agent_report
from training import SCRIPT, saved, tensors, train_step, training
from zerostall import telemetry
from zerostall.core import soundness
from zerostall.errors import (
    RunBusyError,
    SnapshotNotFoundError,
    StateError,
    StorageError,
)
from zerostall.trainer import captures
from zerostall.trainer.memory import Shelf
from zerostall.wire import messages as m

pytestmark = pytest.mark.usefixtures("own_agent")

BIG = 3_000_000  # floats: more than one chunk is in flight, and the copy takes a while


# ---------------------------------------------------------------------------------------------------- the loop


def test_training_goes_on_bit_for_bit(where: Path) -> None:
    reference, optimizer = training()
    for step in range(10):
        train_step(reference, optimizer, step)
    model, optimizer = training()
    with zerostall.Checkpointer(where, model=model, optimizer=optimizer) as ckpt:
        assert ckpt.restore() == 0
        for step in range(6):
            train_step(model, optimizer, step)
            ckpt.save(step + 1, when_busy="wait")
    model, optimizer = training()
    with zerostall.Checkpointer(where, model=model, optimizer=optimizer) as ckpt:
        start = ckpt.restore()
        assert start == 6
        for step in range(start, 10):
            train_step(model, optimizer, step)
            ckpt.save(step + 1, when_busy="wait")
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("policy", ["overlap", "freeze"])
def test_the_optimizer_never_changes_what_is_still_being_read(where: Path, policy) -> None:
    """Steps follow saves at once, so most chunks are pending when the guard is reached."""
    model, optimizer = training(1500)
    state: dict[int, list[torch.Tensor]] = {}
    with zerostall.Checkpointer(
        where, policy=policy, when_busy="wait", keep=100, model=model, optimizer=optimizer
    ) as ckpt:
        ckpt.restore()
        for step in range(1, 7):
            train_step(model, optimizer, step)
            state[step] = [p.detach().clone() for p in model.parameters()]
            ckpt.save(step)
            optimizer.step()  # no gradients: but the guard runs, and then everything changes
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1000.0)
        assert ckpt.stats.dirty == 0
    for step, expected in state.items():
        loaded = zerostall.load(where, step)["model"]
        for (name, p), want in zip(model.named_parameters(), expected, strict=True):
            assert torch.equal(loaded[name], want), (step, p.shape)


def test_freeze_takes_no_more_than_its_budget(where: Path) -> None:
    model, optimizer = training(1500)
    with zerostall.Checkpointer(
        where, policy="freeze", freeze_bytes=1 << 20, when_busy="wait", model=model, optimizer=optimizer
    ) as ckpt:
        ckpt.restore()
        for step in range(1, 4):
            train_step(model, optimizer, step)
            ckpt.save(step)
        assert ckpt.stats.dirty == 0


# ------------------------------------------------------------------------------------------- one instant (C1, B2)


def test_what_changes_right_after_save_does_not_leak_in(where: Path) -> None:
    state = {
        "w": torch.rand(BIG),
        "step": torch.tensor(1.0),
        "py": [1, {"n": 1}],
        "np": __import__("numpy").ones(1000),
    }
    w = state["w"].clone()
    with zerostall.Checkpointer(where, state=state) as ckpt:
        ckpt.restore()
        saving = ckpt.save(10)
        state["w"].zero_()
        state["step"] += 1
        state["py"][1]["n"] = 2
        state["np"][:] = 9
        saving.wait()
    loaded = zerostall.load(where, 10)["state"]
    assert torch.equal(loaded["w"], w)
    assert (loaded["step"].item(), loaded["py"], loaded["np"].tolist()) == (1.0, [1, {"n": 1}], [1.0] * 1000)


def test_buffers_and_random_numbers_are_those_of_the_save(where: Path) -> None:
    model = nn.BatchNorm1d(50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zerostall.Checkpointer(where, model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        mean = model.running_mean.clone()
        saving = ckpt.save(1)
        drawn = torch.rand(3)
        model(torch.rand(8, 50))
        saving.wait()
        ckpt.restore(1)
        assert torch.equal(model.running_mean, mean)
        assert torch.equal(torch.rand(3), drawn)


def test_new_storage_behind_a_parameter_is_seen(where: Path) -> None:
    model, optimizer = training(64)
    with zerostall.Checkpointer(where, keep=10, when_busy="wait", model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        for step in range(1, 5):
            with ckpt.guard():
                for p in model.parameters():
                    p.data = torch.full_like(p, float(step))
            ckpt.save(step)
    for step in range(1, 5):
        assert all((t == step).all() for t in zerostall.load(where, step)["model"].values())


def test_a_parameter_that_leaves_its_memory_while_it_is_read(where: Path) -> None:
    """As `model.to(...)` does; large memory is unmapped at once, and reading it would end the process."""
    parameter = nn.Parameter(torch.zeros(BIG))
    optimizer = torch.optim.SGD([parameter])
    with zerostall.Checkpointer(where, keep=10, when_busy="wait", model={"p": parameter}, optimizer=optimizer) as ckpt:
        ckpt.restore()
        for step in range(1, 6):
            after = torch.full((BIG,), float(step))
            ckpt.save(step)
            parameter.data = after
            del after
    for step in range(1, 6):
        assert (zerostall.load(where, step)["model"]["p"] == step - 1).all()


def test_the_first_save_waits_for_the_agents_first_grant(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late it comes: that an older snapshot is on its way is no reason, for there is none."""
    grants: list[threading.Timer] = []
    grant = Shelf.grant

    def late(self: Shelf, granted: m.Granted) -> None:
        grants.append(threading.Timer(0.3 if not grants else 0.0, grant, (self, granted)))
        grants[-1].start()

    monkeypatch.setattr(Shelf, "grant", late)
    monkeypatch.setattr(captures, "_SAID_SECONDS", 0.01)
    with zerostall.Checkpointer(where, when_busy="skip", state={"w": torch.ones(5)}) as ckpt:
        assert not ckpt.save(1).skipped
    for timer in grants:
        timer.join()


def test_values_that_grow_beyond_a_record(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first save it is said at once; later it costs that save, and not the ones after it."""
    monkeypatch.setattr(soundness, "MAX_VALUES", 50_000)  # the generators' states alone take some
    state = {"w": torch.ones(5), "log": ["x" * 60_000], "few": {"n": 1}}
    with zerostall.Checkpointer(where, when_busy="wait", few=state.pop("few"), state=state) as ckpt:
        ckpt.restore()
        with pytest.raises(StateError, match="state most"):
            ckpt.save(1)
        state["log"][0] = "x"
        ckpt.save(1).wait()
        state["log"][0] = "x" * 60_000
        with pytest.raises(StateError, match="a record holds up to 50000"):
            ckpt.save(2).wait()
        state["log"][0] = "y"
        ckpt.save(3).wait()
    assert saved(where) == [1, 3]


def test_a_state_that_grows_and_shrinks_is_followed(where: Path) -> None:
    state: dict[str, object] = {"a": torch.ones(10)}
    with zerostall.Checkpointer(where, keep=10, when_busy="wait", state=state) as ckpt:
        ckpt.restore()
        shapes = [{"a": torch.ones(10)}, {"a": torch.ones(100_000), "b": torch.ones(3)}, {"b": torch.ones(3)}, {}]
        for step, shape in enumerate(shapes):
            state.clear()
            state.update(shape)
            ckpt.save(step)
    for step, shape in enumerate(shapes):
        loaded = zerostall.load(where, step).get("state", {})
        assert {name: tuple(t.shape) for name, t in loaded.items()} == {n: tuple(t.shape) for n, t in shape.items()}


def test_adapters_over_a_frozen_base(where: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        made = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)).requires_grad_(False)
        made.add_module("lora", nn.Linear(300, 2))
        return made

    trained = model()
    optimizer = torch.optim.AdamW(trained.lora.parameters())
    with zerostall.Checkpointer(where, frozen="leave", model=trained, optimizer=optimizer) as ckpt:
        ckpt.restore()
        trained.lora(torch.ones(300)).sum().backward()
        optimizer.step()
        ckpt.save(1).wait()
    (snapshot,) = zerostall.snapshots(where)
    assert snapshot.nbytes < 3 * sum(p.nbytes for p in trained.lora.parameters()) + 8192
    for options, restoring in (({"frozen": "leave"}, {}), ({}, {"strict": "stored"})):
        again = model()
        optimizer = torch.optim.AdamW(again.lora.parameters())
        with zerostall.Checkpointer(where, model=again, optimizer=optimizer, **options) as ckpt:
            assert ckpt.restore(**restoring) == 1
        assert all(torch.equal(one, other) for one, other in zip(again.parameters(), trained.parameters(), strict=True))
    with torch.device("meta"):
        empty = model()
    with zerostall.Checkpointer(where, only="model.lora.*", model=empty) as ckpt:
        assert ckpt.restore(meta_to="cpu") == 1
    assert torch.equal(empty.lora.weight, trained.lora.weight)
    assert empty[0].weight.is_meta  # nobody had anything to fill it with


# ---------------------------------------------------------------------------------------------------- restoring


def test_fallbacks_are_counted_and_told_to_the_agent(where: Path, own_agent: Path) -> None:
    text = f"something goes the slower way in {where}"
    for _ in range(3):
        telemetry.say_once(str(where), "something goes the slower way in %s", where)
    with zerostall.Checkpointer(where, state=tensors(1)) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait("host")
        (rank,) = agent_report(own_agent).ranks
        assert [fallback.count for fallback in rank.fallbacks if fallback.text == text] == [3]


def test_nothing_saved_is_said(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zerostall")
    with zerostall.Checkpointer(where, state=tensors(0)) as ckpt:
        assert ckpt.restore() == 0
        assert "nothing is saved" in caplog.text
        with pytest.raises(SnapshotNotFoundError):
            ckpt.restore(required=True)
        with pytest.raises(SnapshotNotFoundError, match="7"):
            ckpt.restore(7)


def test_the_nearest_tier_is_used(where: Path, own_agent: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zerostall")
    with zerostall.Checkpointer(where, state=tensors(1)) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()
    with zerostall.Checkpointer(where, state=tensors(0)) as ckpt:
        ckpt.restore()
    assert "step 1 in host" in caplog.text
    os.kill(agent_report(own_agent).pid, signal.SIGKILL)
    with zerostall.Checkpointer(where, state=tensors(0)) as ckpt:
        ckpt.restore()
    assert "step 1 in disk" in caplog.text


def test_a_second_trainer_is_refused_while_the_first_lives(where: Path) -> None:
    with zerostall.Checkpointer(where, state=tensors(0)) as ckpt:
        assert repr(ckpt) == f"<Checkpointer of {where}: no step yet, 0 saves>"
        with pytest.raises(RunBusyError, match="in this very process") as caught:
            zerostall.Checkpointer(where, state=tensors(0))
        assert "close()" in caught.value.hint
    assert repr(ckpt) == f"<Checkpointer of {where}: closed>"
    assert "not open" in repr(zerostall.Checkpointer.__new__(zerostall.Checkpointer))


def test_a_close_that_failed_has_closed(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = zerostall.Checkpointer(where, state=tensors(0))
    first.restore()
    first.save(1)

    def fail(*_: object) -> None:
        raise StorageError("the disk refused")

    monkeypatch.setattr(first._ledger, "raise_unreported", fail)
    with pytest.raises(StorageError, match="refused"):
        first.close()
    with zerostall.Checkpointer(where, state=tensors(0)) as second:
        assert second.restore() == 1


def test_no_state_is_told(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    with zerostall.Checkpointer(where):
        assert "no state was handed over" in caplog.text and "model=model" in caplog.text


# ------------------------------------------------------------------------------------------------ the agent dies


def test_training_goes_on_when_the_agent_dies_and_nothing_is_lost(where: Path, own_agent: Path) -> None:
    state = tensors(0)
    with zerostall.Checkpointer(where, keep=100, when_busy="wait", state=state) as ckpt:
        ckpt.restore()
        for step in range(1, 10):
            state["w"].fill_(step)
            ckpt.save(step)
            if step in (3, 6):
                os.kill(agent_report(own_agent).pid, signal.SIGKILL)
        ckpt.save(10).wait()
        assert ckpt.stats.agent_restarts == 2
    steps = saved(where)
    assert steps[-1] == 10
    for step in steps[:-1]:
        assert (zerostall.load(where, step)["state"]["w"] == step).all()


def test_an_unwritable_disk_is_reported_and_costs_neither_training_nor_the_last_step(where: Path) -> None:
    state = tensors(0)
    ckpt = zerostall.Checkpointer(where, state=state)
    ckpt.restore()
    ckpt.save(1).wait()
    blocker = where / "step-000000000002"
    blocker.write_text("in the way")
    with pytest.raises(StorageError, match="step-000000000002"):
        ckpt.save(2).wait()
    assert saved(where) == [1]
    saving = ckpt.save(3)
    saving.wait("host")
    blocker.unlink()
    saving.wait("disk")
    ckpt.close()
    assert saved(where) == [1, 3]


# -------------------------------------------------------------------------------------------------- the end (C11)


@pytest.mark.parametrize(
    "ending", ["pass", "raise ValueError('on purpose')", "sys.exit(3)", "threading.Thread(target=len, daemon=True)"]
)
def test_however_a_script_ends_its_last_save_is_there(where: Path, ending: str) -> None:
    forked.python("-c", SCRIPT + ending, where)
    assert saved(where) == [9]


def test_a_hard_exit_may_lose_the_last_save_and_corrupts_nothing(where: Path) -> None:
    forked.python("-c", SCRIPT + "os._exit(0)", where)
    state = {"w": torch.zeros(2_000_000)}
    with zerostall.Checkpointer(where, state=state) as ckpt:
        assert ckpt.restore() in (0, 9)
        assert set(state["w"].tolist()) <= {0.0, 9.0} and len(set(state["w"].tolist())) == 1


def test_a_forked_child_leaves_the_parents_checkpointer_alone(where: Path) -> None:
    with zerostall.Checkpointer(where, state=tensors(1)) as ckpt:
        ckpt.restore()
        ckpt.save(1, when_busy="wait").wait()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        ckpt.save(2, when_busy="wait").wait()
    assert saved(where) == [1, 2]


def test_threads_have_names_and_go_away(where: Path) -> None:
    before = set(threading.enumerate())
    with zerostall.Checkpointer(where, state=tensors(1)) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        new = set(threading.enumerate()) - before
        assert all(thread.name.startswith("zerostall") for thread in new)
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_a_closed_checkpointer_says_so(where: Path) -> None:
    ckpt = zerostall.Checkpointer(where, state=tensors(1))
    ckpt.close()
    with pytest.raises(ValueError, match="closed"):
        ckpt.save(1)
    with pytest.raises(ValueError, match="closed"):
        ckpt.restore()
