"""Saving and restoring with a real agent: steps, order, busyness, tears, rewinds, errors."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import zerostall
import zerostall.trainer.sealer
from hand import wait_until
from zerostall import telemetry
from zerostall.core import manifest
from zerostall.errors import (
    MismatchError,
    NonFiniteError,
    ReplacedError,
    RunBusyError,
    RunMismatchError,
    SnapshotNotFoundError,
    StateError,
    StepExistsError,
    StorageError,
    TornError,
    WaitTimeoutError,
)
from zerostall.trainer.tears import Tears
from zerostall.wire import messages as m
from zerostall.wire import rendezvous

pytestmark = pytest.mark.usefixtures("own_agent")

BIG = 3_000_000  # floats: more than one chunk is in flight, and the copy takes a while


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "run"


def tensors(step: int, size: int = 5000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), float(step)), "n": torch.tensor(step)}


def training(size: int = 512) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    width = model[0].in_features
    x = torch.randn(8, width)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def agent_report(folder: Path) -> m.Report:
    channel = rendezvous.connect(folder)
    assert channel is not None
    channel.socket.settimeout(30)
    channel.send(m.Status(id=1))
    ((report, _),) = channel.receive()
    channel.close()
    assert isinstance(report, m.Report)
    return report


def saved(where: Path) -> list[int]:
    return [snapshot.step for snapshot in zerostall.snapshots(where)]


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


def test_values_that_grow_beyond_a_record(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first save it is said at once; later it costs that save, and not the ones after it."""
    monkeypatch.setattr(manifest, "MAX_VALUES", 50_000)  # the generators' states alone take some
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


# ------------------------------------------------------------------------------------------------------- tears


def change(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


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


def test_a_change_that_the_seal_could_not_see_revokes_the_snapshot(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is over and sealed in an instant; the change comes after, but before any guard or second look."""
    monkeypatch.setattr(Tears, "look_again", lambda tears: False)
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
            with pytest.raises(TornError, match=r"model\.weight"):
                saving.wait("host")
        else:
            saving.wait("disk")
        assert ckpt.stats.dirty == seen
    wait_until(lambda: saved(where) == ([] if seen else [1]), 60)


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


def test_an_unreported_tear_is_raised_by_close(where: Path) -> None:
    model = nn.Linear(2000, 2000, bias=False)
    ckpt = zerostall.Checkpointer(where, guard="manual", model=model)
    ckpt.restore()
    ckpt.save(1)
    change(model.weight)
    with pytest.raises(TornError):
        ckpt.close()
    ckpt.close()


# ------------------------------------------------------------------------------------------------ busyness (C4, C12)


def test_wait_brings_every_step_to_disk(where: Path) -> None:
    state = tensors(0)
    with zerostall.Checkpointer(where, keep=100, when_busy="wait", state=state) as ckpt:
        ckpt.restore()
        for step in range(1, 16):
            state["w"].fill_(step)
            ckpt.save(step)
        assert ckpt.stats.skipped == 0
    assert saved(where) == list(range(1, 16))
    for step in (1, 7, 15):
        assert (zerostall.load(where, step)["state"]["w"] == step).all()


def test_skip_counts_and_says_so_and_the_newest_gets_to_disk(where: Path) -> None:
    state = {"w": torch.zeros(BIG)}
    with zerostall.Checkpointer(where, state=state) as ckpt:
        ckpt.restore()
        savings = [ckpt.save(step) for step in range(1, 30)]
        skipped = [s for s in savings if s.skipped]
        assert ckpt.stats.skipped == len(skipped) > 0
        with pytest.raises(ReplacedError, match="skipped"):
            skipped[0].wait()
        newest = max(s.step for s in savings if not s.skipped)
    assert saved(where)[-1] == newest


def test_a_last_save_that_was_skipped_is_said(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    ckpt = zerostall.Checkpointer(where, state={"w": torch.zeros(BIG)})
    ckpt.restore()
    step = 0
    while not ckpt.save(step).skipped:
        step += 1
    ckpt.close()
    assert f"the last save, of step {step}, was skipped" in caplog.text


def test_a_waited_for_step_is_not_replaced_by_newer_ones(where: Path) -> None:
    state = {"w": torch.zeros(BIG)}
    with zerostall.Checkpointer(where, keep=100, state=state) as ckpt:
        ckpt.restore()
        for step in range(1, 6):
            state["w"].fill_(step)
            ckpt.save(step, when_busy="wait").wait("disk")
            assert saved(where)[-1] == step


def test_the_disk_rests_between_writes_unless_somebody_waits(where: Path) -> None:
    state = tensors(0)
    with zerostall.Checkpointer(where, keep=100, disk_interval=1000, state=state) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait("disk")
        for step in (2, 3, 4):
            state["w"].fill_(step)
            ckpt.save(step, when_busy="wait").wait("host")
        ckpt.save(5, when_busy="wait").wait("disk")
        ckpt.save(6, when_busy="wait", pin=True)
        ckpt.save(7, when_busy="wait").wait("host")
        deadline = time.monotonic() + 60
        while saved(where)[-1] != 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        ckpt.save(8, when_busy="wait").wait("host")
        assert saved(where) == [1, 5, 6]
    assert saved(where) == [1, 5, 6, 8]


def test_what_was_resting_goes_to_disk_when_the_trainer_dies(where: Path) -> None:
    script = SCRIPT.replace(
        "ckpt.save(9)", "ckpt.save(8).wait(); ckpt.save(9, when_busy='wait').wait('host'); os._exit(0)"
    )
    script = script.replace("state=state", "state=state, disk_interval=1000")
    subprocess.run([sys.executable, "-c", script, str(where)], capture_output=True, timeout=100)
    deadline = time.monotonic() + 60
    while saved(where)[-1] != 9 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert saved(where) == [8, 9]


def test_a_wait_has_a_deadline(where: Path, own_agent: Path) -> None:
    with zerostall.Checkpointer(where, state=tensors(0)) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()
        pid = agent_report(own_agent).pid
        os.kill(pid, signal.SIGSTOP)  # so that nothing gets to disk meanwhile, however long this thread sleeps
        try:
            saving = ckpt.save(2)
            for timeout in (0.0, 0.1):
                with pytest.raises(WaitTimeoutError):
                    saving.wait(timeout=timeout)
        finally:
            os.kill(pid, signal.SIGCONT)
        saving.wait(timeout=60)


def test_memory_does_not_grow_with_the_number_of_saves(where: Path) -> None:
    """What was staged for a save and kept by something until the next one adds up to the node's memory."""
    state = {"w": torch.zeros(8 << 20), "log": []}
    myself = psutil.Process()

    def own() -> int:
        return myself.memory_info().rss - myself.memory_info().shared  # the segment is the agent's

    with zerostall.Checkpointer(where, keep=1, when_busy="wait", state=state) as ckpt:
        ckpt.restore()
        held = []
        for step in range(30):
            state["w"].fill_(step)
            ckpt.save(step).wait("host")
            held.append(own())
        ckpt.restore()
        held.append(own())
    assert max(held[4:]) - held[3] < state["w"].nbytes / 2


# ------------------------------------------------------------------------------------------------ steps (B)


def test_steps_are_numbers_and_only_numbers(where: Path) -> None:
    with zerostall.Checkpointer(where, state=tensors(0)) as ckpt:
        ckpt.restore()
        for wrong in (-1, True, 1.5, "7", None):
            with pytest.raises((ValueError, TypeError)):
                ckpt.save(wrong)
        ckpt.save(torch.tensor(3)).wait()
    assert saved(where) == [3]


def test_step_zero_is_a_step(where: Path) -> None:
    state = tensors(0)
    with zerostall.Checkpointer(where, state=state) as ckpt:
        assert ckpt.restore() == 0
        state["w"].fill_(5)
        ckpt.save(0).wait()
        state["w"].fill_(6)
        assert ckpt.restore(0) == 0
        assert (state["w"] == 5).all()


def test_the_same_step_again(where: Path) -> None:
    state = tensors(1)
    with zerostall.Checkpointer(where, state=state) as ckpt:
        ckpt.restore()
        ckpt.save(100).wait()
        with pytest.raises(StepExistsError, match="100"):
            ckpt.save(100)
        assert ckpt.save(100, if_exists="skip").skipped
        state["w"].fill_(2)
        ckpt.save(100, if_exists="replace").wait()
        with pytest.raises(StepExistsError, match="behind"):
            ckpt.save(99)
    assert (zerostall.load(where, 100)["state"]["w"] == 2).all()
    assert saved(where) == [100]


def test_keep_counts_by_number_not_by_name_or_time(where: Path) -> None:
    with zerostall.Checkpointer(where, keep=3, when_busy="wait", state=tensors(0)) as ckpt:
        ckpt.restore()
        for step in (8, 9, 10, 99, 100, 9900, 10000):
            ckpt.save(step)
    assert saved(where) == [100, 9900, 10000]
    for folder in where.glob("step-*"):
        os.utime(folder, (1, 1))
    with zerostall.Checkpointer(where, keep=3, when_busy="wait", state=tensors(0)) as ckpt:
        ckpt.restore()
        ckpt.save(10001)
    assert saved(where) == [9900, 10000, 10001]


def test_pinned_every_and_best_steps_stay(where: Path) -> None:
    keep = zerostall.Keep(last=1, every=5, best=1)
    with zerostall.Checkpointer(where, keep=keep, when_busy="wait", state=tensors(0)) as ckpt:
        ckpt.restore()
        for step, loss in ((1, 9.0), (2, 1.0), (3, 8.0), (4, 7.0), (5, 6.0), (6, 5.0), (7, 4.0)):
            ckpt.save(step, metric=loss, pin=step == 3)
    assert saved(where) == [2, 3, 5, 7]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(where: Path, keep: int) -> None:
    with pytest.raises(ValueError, match="keep"):
        zerostall.Checkpointer(where, keep=keep, state=tensors(0))


def test_going_back_sets_the_future_aside(where: Path) -> None:
    state = tensors(0)
    with zerostall.Checkpointer(where, keep=2, when_busy="wait", state=state) as ckpt:
        ckpt.restore()
        for step in (400, 5000):
            state["w"].fill_(step)
            ckpt.save(step)
    with zerostall.Checkpointer(where, keep=2, when_busy="wait", state=state) as ckpt:
        assert ckpt.restore(400) == 400
        state["w"].fill_(500)
        ckpt.save(500)
    assert saved(where) == [400, 500]
    with zerostall.Checkpointer(where, keep=2, state=state) as ckpt:
        assert ckpt.restore() == 500


def test_a_folder_with_snapshots_is_not_overwritten_unread(where: Path) -> None:
    with zerostall.Checkpointer(where, state=tensors(0)) as ckpt:
        ckpt.restore()
        ckpt.save(50).wait()
    with zerostall.Checkpointer(where, state=tensors(0)) as ckpt:
        with pytest.raises(StepExistsError, match="restore"):
            ckpt.save(60)
    assert saved(where) == [50]


def test_another_run_is_an_error_that_names_both(where: Path) -> None:
    with zerostall.Checkpointer(where, run="A", state=tensors(0)) as ckpt:
        ckpt.restore()
        ckpt.save(50).wait()
    with pytest.raises(RunMismatchError, match=r"'A'.*'B'"):
        zerostall.Checkpointer(where, run="B", state=tensors(0))


def test_another_model_is_an_error_and_nothing_is_written(where: Path) -> None:
    with zerostall.Checkpointer(where, model=nn.Linear(4, 4)) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()
    other = nn.Linear(4, 5)
    before = other.weight.clone()
    with zerostall.Checkpointer(where, model=other) as ckpt:
        with pytest.raises(MismatchError, match=r"model\.weight"):
            ckpt.restore()
    assert torch.equal(other.weight, before)


@pytest.mark.parametrize("name", ["a b", "w=[1]", "*glob?", "übung-模型", "x'y", "-dash", "%20", "#1", "a" * 200])
def test_any_folder_name_works(tmp_path: Path, name: str) -> None:
    odd = {
        "val/loss=0.1": torch.ones(2),
        "..": torch.ones(3),
        "a/b": torch.ones(1),
        "é\n": torch.ones(4),
        "": torch.ones(5),
    }
    with zerostall.Checkpointer(tmp_path / name, when_busy="wait", keep=2, state=odd) as ckpt:
        ckpt.restore()
        for step in (1, 2, 3):
            ckpt.save(step)
        assert ckpt.restore() == 3
    assert saved(tmp_path / name) == [2, 3]
    assert [p.name for p in tmp_path.iterdir()] == [name]


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
    with zerostall.Checkpointer(where, state=tensors(0)):
        with pytest.raises(RunBusyError, match="in this very process") as caught:
            zerostall.Checkpointer(where, state=tensors(0))
        assert "close()" in caught.value.hint


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

SCRIPT = """
import os, sys, threading, torch, zerostall
state = {"w": torch.full((2_000_000,), 9.0)}
ckpt = zerostall.Checkpointer(sys.argv[1], state=state)
ckpt.restore()
ckpt.save(9)
"""


@pytest.mark.parametrize(
    "ending", ["pass", "raise ValueError('on purpose')", "sys.exit(3)", "threading.Thread(target=len, daemon=True)"]
)
def test_however_a_script_ends_its_last_save_is_there(where: Path, ending: str) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT + ending, str(where)], capture_output=True, timeout=100)
    assert saved(where) == [9]


def test_a_hard_exit_may_lose_the_last_save_and_corrupts_nothing(where: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT + "os._exit(0)", str(where)], capture_output=True, timeout=100)
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
    assert set(threading.enumerate()) == before


def test_a_closed_checkpointer_says_so(where: Path) -> None:
    ckpt = zerostall.Checkpointer(where, state=tensors(1))
    ckpt.close()
    with pytest.raises(ValueError, match="closed"):
        ckpt.save(1)
    with pytest.raises(ValueError, match="closed"):
        ckpt.restore()
