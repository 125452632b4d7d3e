"""A checkpointer that nobody holds any more and that was not closed: it lets go of all, wherever it is collected."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zerostall
from training import change, saved, tensors, train_step, training
from zerostall.trainer import estate

pytestmark = pytest.mark.usefixtures("own_agent")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def threads() -> list[str]:
    """One whose start was interrupted is listed for ever by Python 3.11, and does nothing."""
    return [one.name for one in threading.enumerate() if one.is_alive() and one.name.startswith("zerostall")]


def test_what_a_dropped_one_has_taken_is_given_back(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = training()
    ckpt = zerostall.Checkpointer(where, model=model, optimizer=optimizer)
    line = sys._getframe().f_lineno - 1
    due = ckpt.every(steps=1)
    ckpt.restore()
    train_step(model, optimizer, 1)
    assert due(1)
    saving = ckpt.save(1)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gone = weakref.ref(ckpt)
    with caplog.at_level(logging.WARNING, "zerostall"):
        del ckpt
        assert gone() is None  # though what it has made is still held
        train_step(model, optimizer, 2)  # the guard is there for as long as something is read
        until(lambda: not threads())
    assert f"{__file__}:{line}: the Checkpointer of {where} was dropped without close()" in caplog.text
    assert "disk" in saving.tiers and saved(where) == [1]
    for name, tensor in zerostall.load(where, 1)["model"].items():
        assert torch.equal(tensor, expected[name])
    train_step(model, optimizer, 3)  # through hooks that guard nothing


def test_the_warning_is_pythons_own(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[object, ...]] = []
    monkeypatch.setattr(estate.warnings, "warn_explicit", lambda *said: heard.append(said))
    zerostall.Checkpointer(where, state=tensors(1))
    until(lambda: not threads())
    ((text, kind, filename, _),) = heard
    assert kind is ResourceWarning and filename == __file__ and "was dropped without close()" in str(text)


def test_a_closed_one_is_not_warned_of(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    monkeypatch.setattr(estate.warnings, "warn_explicit", lambda *said: heard.append(said))
    with zerostall.Checkpointer(where, state=tensors(1)) as ckpt:
        ckpt.restore()
    del ckpt
    until(lambda: not threads())
    assert heard == []


def test_another_one_of_the_folder_waits_for_the_one_that_was_dropped(where: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(where)
    state = tensors(0)
    for step in range(1, 6):
        ckpt = zerostall.Checkpointer(where if step % 2 else tmp_path / "link", state=state)
        assert ckpt.restore() == step - 1
        change(state["w"])
        ckpt.save(step)
        del ckpt
    with zerostall.Checkpointer(where, state=state) as ckpt:
        assert ckpt.restore() == 5


class Held:
    """State that knows who saves it."""

    ckpt: zerostall.Checkpointer

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to do."""


def test_one_that_its_own_state_knows_is_collected(where: Path) -> None:
    held = Held()
    held.ckpt = zerostall.Checkpointer(where, held=held)
    held.ckpt.restore()
    held.ckpt.save(1)
    gone = weakref.ref(held)
    del held
    until(lambda: gc.collect() >= 0 and gone() is None)  # not before its last save is sealed
    until(lambda: not threads())
    assert saved(where) == [1]


def test_it_may_be_collected_with_any_lock_held(where: Path) -> None:
    """The collector runs wherever memory is taken, in the middle of our own code, too."""
    ckpt = zerostall.Checkpointer(where, state=tensors(1))
    ckpt.restore()
    ckpt.save(1)
    locks = [ckpt._condition, ckpt._link._lock, ckpt._saves._sealer._told, ckpt._pace._lock, estate._Heir._lock]
    locks += [handler.lock for handler in logging.getLogger().handlers if handler.lock is not None]
    box = [ckpt]
    del ckpt

    def collect() -> None:
        for lock in locks:
            lock.acquire()
        box.clear()
        for lock in locks:
            lock.release()

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    collector.join(60)
    assert not collector.is_alive()
    until(lambda: not threads())
    assert saved(where) == [1]


def test_a_forked_child_that_drops_it_takes_nothing_from_its_parent(where: Path) -> None:
    ckpt = zerostall.Checkpointer(where, state=tensors(1))
    ckpt.restore()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del ckpt
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    ckpt.save(1).wait()
    ckpt.close()
    assert saved(where) == [1]


ENDS = """
import sys, torch, zerostall

def train(kept):
    ckpt = zerostall.Checkpointer(sys.argv[1] + kept, state={"w": torch.ones(1000)}, disk_interval=3600)
    ckpt.restore()
    ckpt.save(1)
    return ckpt

dropped = train("/dropped")
del dropped
kept = train("/kept")
"""


def test_an_interpreter_that_ends_waits_for_them(tmp_path: Path, own_agent: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert saved(tmp_path / "dropped") == [1] and saved(tmp_path / "kept") == [1]
    assert "was dropped without close()" in done.stderr


def test_one_that_could_not_be_made_leaves_nothing(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no more threads")

    with monkeypatch.context() as patch:
        patch.setattr("zerostall.trainer.checkpointer.Saves", fails)
        with pytest.raises(RuntimeError, match="no more threads"):
            zerostall.Checkpointer(where, state=tensors(1))
    with zerostall.Checkpointer(where, state=tensors(1)) as ckpt:
        ckpt.restore()
