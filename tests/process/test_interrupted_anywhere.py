"""Ctrl-C between any two calls of a save, or of the making of a Checkpointer: what comes after gets through."""

from __future__ import annotations

import gc
import signal
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import zerostall
from hand import wait_until
from interrupt import SAVE, Interrupt
from standin.training import Trainer, expected, save
from training import change, saved, tensors
from zerostall.errors import RunBusyError, TornError
from zerostall.trainer import captures
from zerostall.trainer.tears import Tears
from zerostall.wire import messages as m

pytestmark = pytest.mark.usefixtures("own_agent")

_BEGIN = {f"{name}.py" for name in ("checkpointer", "estate", "preemption", "sealer")}
_MAKE = _BEGIN | {f"{name}.py" for name in ("guard", "joining", "link", "mappings", "saves")}
_LIMIT = 5000
Start = Callable[..., Trainer]


@pytest.mark.parametrize("anew", [False, True])
def test_a_save_interrupted_anywhere_costs_no_later_one(
    where: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    """`anew`: the state is surveyed by the very save that is interrupted."""
    monkeypatch.setattr(captures, "_BUSY_SECONDS", 60.0)
    monkeypatch.setattr(captures, "_SAID_SECONDS", 5.0)
    state = tensors(1, 50)
    with zerostall.Checkpointer(where, state=state, when_busy="wait", rng=False) as ckpt:
        ckpt.restore()
        step, place, found = 1, 0, True
        ckpt.save(step)
        while found and place < _LIMIT:
            place += 1
            taking = ckpt._saves._captures
            taking._guard.settle()
            if anew:
                taking._survey = taking._rest = None
            interrupt = Interrupt(SAVE, place)
            found = interrupt.run(lambda step=step: ckpt.save(step + 1))
            assert _free(ckpt._condition), interrupt.where
            assert _free(taking._sealer._told), interrupt.where
            step += 2
            change(state["w"])
            ckpt.save(step)
        assert 30 < place < _LIMIT
        ckpt.save(step + 1).wait()
        kept = state["w"].clone()
        change(state["w"])
        assert ckpt.restore() == step + 1
        assert (state["w"] == kept).all()


def test_a_slot_of_an_interrupted_save_is_free_once_no_device_writes_to_it(start_on_stand_in: Start) -> None:
    trainer = start_on_stand_in()
    save(trainer, 1)
    step, place, found = 1, 0, True
    while found and place < _LIMIT:
        step, place = step + 2, place + 1
        trainer.ask("fill", step % 250)
        answer = trainer.ask("interrupt", step, place)
        found = answer["found"]
        assert not answer["written"], answer["where"]
        trainer.ask("fill", (step + 1) % 250)
        assert trainer.ask("save", step + 1) == ""
        assert trainer.ask("wait", step + 1, "host") == ""
    assert 30 < place < _LIMIT
    assert trainer.ask("restore") == step + 1
    assert trainer.ask("digest") == expected((step + 1) % 250)
    trainer.close()


def test_a_guard_interrupted_anywhere_costs_no_later_save(where: Path) -> None:
    """Where all has been read, and it looks for tears alone: what it does that for is the same for all saves."""
    state = tensors(1, 50)
    with zerostall.Checkpointer(where, state=state, when_busy="wait", rng=False) as ckpt:
        saves = ckpt._saves
        step, place, found = 0, 0, True
        while found and place < _LIMIT:
            step, place = step + 1, place + 1
            ckpt.save(step)
            assert saves.guard.flight is not None
            saves.guard.flight.taken.capture.wait(None)
            interrupt = Interrupt(SAVE, place)
            found = interrupt.run(saves.guard.protect)
            assert _free(saves._looking), interrupt.where
            change(state["w"])
        assert 5 < place < _LIMIT
        ckpt.save(step + 1).wait()


def test_a_late_tear_is_told_wherever_its_telling_is_interrupted(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next guard: the image was sealed, and whoever restores it must hear of it."""
    monkeypatch.setattr(Tears, "look_again", lambda tears: False)
    model = torch.nn.Linear(50, 50, bias=False)
    with zerostall.Checkpointer(where, guard="manual", model=model, when_busy="wait", rng=False) as ckpt:
        told: list[tuple[int, float]] = []

        def tell(message: m.Message, tell=ckpt._link.tell, **options: float | None) -> None:
            tell(message, **options)
            if isinstance(message, m.Revoked):
                told.append((message.step, message.created))

        monkeypatch.setattr(ckpt._link, "tell", tell)
        place, found = 0, True
        while found and place < _LIMIT:
            place += 1
            saving = ckpt.save(7)  # the number is free again each time
            wait_until(lambda saving=saving: "host" in saving.tiers, pause=0.001)
            change(model.weight)
            interrupt = Interrupt(SAVE, place)
            found = interrupt.run(ckpt._saves.guard.protect)
            ckpt._saves.let_go()
            with ckpt.guard():
                pass
            with pytest.raises(TornError, match=r"model\.weight"):
                saving.wait("host", timeout=60)
            assert (saving.step, saving.created) in told, interrupt.where
            assert ckpt.stats.dirty == place, interrupt.where
        assert 30 < place < _LIMIT
        ckpt.save(8).wait()
    assert saved(where) == [8]


def _free(condition: threading.Condition | threading.Lock) -> bool:
    """Whether other threads can have it."""
    got: list[bool] = []

    def ask() -> None:
        if condition.acquire(timeout=60):
            got.append(True)
            condition.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return bool(got)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("files", [_BEGIN, pytest.param(_MAKE, marks=pytest.mark.long)], ids=["begin", "make"])
def test_a_making_interrupted_anywhere_leaves_nothing(where: Path, files: set[str]) -> None:
    """Neither a thread, nor a signal's handler, nor the run's folder in somebody's hands."""
    state, model = tensors(1, 50), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    deadline = time.monotonic() + 60
    before = signal.getsignal(signal.SIGUSR1)
    with zerostall.Checkpointer(where, state=state, optimizer=optimizer) as ckpt:
        ckpt.save(1)  # the next ones are lent its memory
    place, found = 0, True
    while found and place < _LIMIT:
        place += 1
        interrupt = Interrupt(files, place)
        made: list[zerostall.Checkpointer] = []
        make = partial(zerostall.Checkpointer, where, preempt=("SIGUSR1",), state=state, optimizer=optimizer)
        try:
            found = interrupt.run(lambda make=make, made=made: made.append(make()))
        except RunBusyError:  # the agent hears a moment later that the connection before is gone
            assert time.monotonic() < deadline, "the run is busy for ever"
            place -= 1
            continue
        deadline = time.monotonic() + 60
        while made:
            made.pop().close()
        wait_until(lambda: not _threads(), pause=0.001)
        assert signal.getsignal(signal.SIGUSR1) is before, interrupt.where
    assert 30 < place < _LIMIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # sockets that a function had just made, and not returned
        gc.collect()


def _threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.is_alive() and one.name.startswith("zerostall")]
