"""Policies "flip" and "auto" with a real agent: training goes on while a snapshot is read, and neither notices."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostall
from interrupt import Interrupt
from zerostall import native, optim, telemetry
from zerostall.errors import StateError, TornError
from zerostall.trainer import sealer
from zerostall.trainer.flight import Flight

pytestmark = pytest.mark.usefixtures("own_agent")

WIDTH, LAYERS = 1024, 5  # 60 MB of state in 4 chunks, which one thread reads in some 20 ms
MOST = 60


@pytest.fixture(autouse=True)
def one_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSTALL_COPY_THREADS", "1")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_said", {})


def weights() -> nn.ParameterList:
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator)) for _ in range(LAYERS))


def give_gradients(model: nn.Module, number: int) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().mul(1 / number)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        found += [parameter.detach(), *(optimizer.state[parameter][key] for key in sorted(optimizer.state[parameter]))]
    return found


def clones(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in state_of(model, optimizer)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def train_with_snapshots(
    ckpt: zerostall.Checkpointer, model: nn.Module, optimizer: optim.AdamW, *, flips: int, first: int = 1
) -> dict[int, list[torch.Tensor]]:
    """Steps, each begun right after a save, until so many of them have flipped; what was saved by step.

    How much is still to be read by the time of a step is up to the machine.
    """
    saved = {}
    moments = [optimizer.state[parameter]["exp_avg_sq"] for parameter in model.parameters()]
    for number in range(first, first + MOST):
        give_gradients(model, number + 1)
        saved[number] = clones(model, optimizer)
        before = [moment.data_ptr() for moment in moments]
        saving = ckpt.save(number)
        optimizer.step()
        flips -= before != [moment.data_ptr() for moment in moments]
        give_gradients(model, 1)
        optimizer.step()  # while it may still be read
        saving.wait("host", timeout=60)
        if flips <= 0:
            return saved
    pytest.fail(f"after {MOST} saves {flips} flips are still missing")


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "foreach": True}], ids=str)
def test_a_snapshot_is_read_while_steps_are_taken(tmp_path: Path, options: dict[str, Any]) -> None:
    model = weights()
    optimizer = optim.AdamW(model.parameters(), **options)
    give_gradients(model, 1)
    optimizer.step()
    plain_model = copy.deepcopy(model)
    plain = optim.AdamW(plain_model.parameters(), **options)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    objects = [state for parameter in model.parameters() for state in optimizer.state[parameter].values()]
    with zerostall.Checkpointer(
        tmp_path, policy="flip", keep=MOST, when_busy="wait", model=model, optimizer=optimizer
    ) as ckpt:
        saved = train_with_snapshots(ckpt, model, optimizer, flips=2)
        assert ckpt.stats.policy == "flip" and ckpt.stats.dirty == 0
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    now = [state for parameter in model.parameters() for state in optimizer.state[parameter].values()]
    assert all(one is other for one, other in zip(now, objects, strict=True))
    for number in saved:
        give_gradients(plain_model, number + 1)
        plain.step()
        give_gradients(plain_model, 1)
        plain.step()
    assert_same(state_of(model, optimizer), state_of(plain_model, plain))
    with zerostall.Checkpointer(tmp_path, keep=MOST, model=plain_model, optimizer=plain) as ckpt:
        for number, expected in saved.items():
            assert ckpt.restore(number) == number
            assert_same(state_of(plain_model, plain), expected)


class Held:
    """A capture of which no thread begins to read anything before it is told to."""

    def __init__(self, capture: native.Capture) -> None:
        self.go = capture.start
        self._capture = capture

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)

    def start(self) -> None:
        pass


def test_a_step_interrupted_anywhere_costs_its_snapshot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes between two calls: also before the optimizer knows what it has claimed."""
    monkeypatch.setattr(sealer, "TOLD_SECONDS", 5.0)
    model = weights()
    optimizer = optim.AdamW(model.parameters())
    give_gradients(model, 1)
    optimizer.step()
    dirty = clean = 0
    with zerostall.Checkpointer(
        tmp_path, policy="flip", keep=2, when_busy="wait", model=model, optimizer=optimizer
    ) as ckpt:
        guard = ckpt._saves.guard
        number, place, found = 0, 0, True
        while found and place < 1000:
            number, place = number + 1, place + 1
            give_gradients(model, number + 1)
            expected = clones(model, optimizer)
            with monkeypatch.context() as patch:
                patch.setattr(guard, "watch", lambda flight, watch=guard.watch: watch(held(flight)))
                saving = ckpt.save(number)
            assert guard.flight is not None
            reading = guard.flight.taken.capture
            interrupt = Interrupt({"flips.py", "guard.py"}, place)
            found = interrupt.run(optimizer.step)
            give_gradients(model, 1)
            optimizer.step()
            reading.go()  # type: ignore[attr-defined]
            try:
                saving.wait("host", timeout=60)
            except (StateError, TornError):
                dirty += 1
                continue
            clean += 1
            assert ckpt.restore(number) == number
            assert_same(state_of(model, optimizer), expected)
        assert dirty and clean and 30 < place < 1000
        ckpt.save(number + 1).wait(timeout=60)


def held(flight: Flight) -> Flight:
    flight.taken.capture = Held(flight.taken.capture)  # type: ignore[assignment]
    return flight


def test_restoring_in_a_run_that_flips(tmp_path: Path) -> None:
    model = weights()
    optimizer = optim.AdamW(model.parameters())
    give_gradients(model, 1)
    optimizer.step()
    with zerostall.Checkpointer(
        tmp_path, policy="flip", keep=MOST, when_busy="wait", model=model, optimizer=optimizer
    ) as ckpt:
        saved = train_with_snapshots(ckpt, model, optimizer, flips=1)
        newest = max(saved)
        give_gradients(model, 3)
        assert ckpt.restore(newest) == newest
        assert_same(state_of(model, optimizer), saved[newest])
        again = train_with_snapshots(ckpt, model, optimizer, flips=1, first=newest + 1)
    with zerostall.Checkpointer(tmp_path, keep=MOST, model=model, optimizer=optimizer) as ckpt:
        for number, expected in again.items():
            assert ckpt.restore(number) == number
            assert_same(state_of(model, optimizer), expected)


def test_other_optimizers_are_guarded_as_ever_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = weights()
    ours = optim.AdamW(list(model.parameters())[:3])
    other = torch.optim.SGD(list(model.parameters())[3:], lr=0.1, momentum=0.9)
    optimizers = {"ours": ours, "other": other}

    def step(number: int) -> None:
        give_gradients(model, number)
        ours.step()
        other.step()

    def everything() -> list[torch.Tensor]:
        states = [*ours.state.items(), *other.state.items()]
        return [part.detach().clone() for parameter, state in states for part in (parameter, *state.values())]

    step(1)
    with caplog.at_level(logging.INFO, "zerostall"):
        ckpt = zerostall.Checkpointer(tmp_path, policy="flip", keep=9, when_busy="wait", model=model, **optimizers)
    assert "torch.optim.sgd.SGD does not (it cannot; zerostall.optim has some that can)" in caplog.text
    saved = {}
    with ckpt:
        for number in range(1, 5):
            saved[number] = everything()
            ckpt.save(number)
            step(number)
            step(number)
    with zerostall.Checkpointer(tmp_path, keep=9, model=model, **optimizers) as ckpt:
        for number, expected in saved.items():
            assert ckpt.restore(number) == number
            assert_same(everything(), expected)


def test_a_second_checkpointer_takes_the_place_of_a_closed_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = weights()
    optimizer = optim.AdamW(model.parameters())
    give_gradients(model, 1)
    optimizer.step()
    with caplog.at_level(logging.INFO, "zerostall"):
        with zerostall.Checkpointer(tmp_path / "1", policy="flip", model=model, optimizer=optimizer):
            with zerostall.Checkpointer(tmp_path / "2", policy="flip", model=model, optimizer=optimizer) as second:
                assert "AdamW does not (it flips for another checkpointer already)" in caplog.text
                expected = clones(model, optimizer)
                second.save(1)
                optimizer.step()
        caplog.clear()
        with zerostall.Checkpointer(tmp_path / "2", policy="flip", model=model, optimizer=optimizer) as second:
            assert "does not" not in caplog.text
            assert second.restore() == 1
            assert_same(state_of(model, optimizer), expected)


def test_auto_chooses_by_what_was_measured_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = weights()
    optimizer = torch.optim.AdamW(model.parameters())
    give_gradients(model, 1)
    optimizer.step()
    with (
        caplog.at_level(logging.INFO, "zerostall"),
        zerostall.Checkpointer(
            tmp_path, policy="auto", freeze_bytes=64 << 20, keep=9, when_busy="wait", model=model, optimizer=optimizer
        ) as ckpt,
    ):
        stats = ckpt.stats
        expected = {}
        # What a slow reader and a fast training, or the other way round, would have left in the counters.
        for number, (drain, free, policy) in enumerate([(9.0, 0.1, "freeze"), (0.1, 9.0, "overlap")], start=1):

            def measured(saving: zerostall.Saving, drain: float = drain, free: float = free) -> None:
                """What was really measured of it is not what the next save goes by."""
                optimizer.step()
                saving.wait("host", timeout=60)
                stats.record_drain(drain)
                stats.record_guard(0.0, free)

            measured(ckpt.save(2 * number))
            expected[2 * number + 1] = clones(model, optimizer)
            measured(ckpt.save(2 * number + 1))
            assert stats.policy == policy and "the optimizer comes" in stats.policy_reason
    assert "policy 'auto' goes from overlap to freeze: about" in caplog.text
    assert "policy 'auto' goes from freeze to overlap: reading takes 0.1 s" in caplog.text
    with zerostall.Checkpointer(tmp_path, keep=9, model=model, optimizer=optimizer) as ckpt:
        for number, saved in expected.items():
            assert ckpt.restore(number) == number
            assert_same(state_of(model, optimizer), saved)
