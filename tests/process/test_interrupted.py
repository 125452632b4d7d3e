"""Ctrl-C, callers in each other's way, and arguments that make no sense: none of it costs a later save."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

import zerostall
from training import change, saved, tensors, train_step, training
from zerostall.errors import AgentError, CapabilityError, StepExistsError, StorageError
from zerostall.trainer import link
from zerostall.wire import channel, rendezvous
from zerostall.wire import messages as m

pytestmark = pytest.mark.usefixtures("own_agent")


@pytest.mark.parametrize("part", ["_ledger.accept", "guard.watch", "_sealer.seal"])
def test_an_interrupted_save_gives_its_slot_back(where: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    model, optimizer = training(64)
    with zerostall.Checkpointer(where, model=model, optimizer=optimizer, when_busy="wait") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        owner, name = part.split(".")

        def interrupt(*_: object) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(getattr(ckpt._saves, owner), name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(2)
        for step in range(3, 6):
            train_step(model, optimizer, step)
            ckpt.save(step)
        ckpt.save(6).wait()
    assert saved(where)[-1] == 6


@pytest.mark.parametrize("answered", [False, True])
def test_a_message_that_was_interrupted_is_not_sent_twice(
    where: Path, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """`answered`: the agent's answer is there before the interrupt."""
    state = tensors(1)
    with zerostall.Checkpointer(where, state=state, when_busy="wait") as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()
        channel = ckpt._link._channel
        deadline = time.monotonic() + 60

        def interrupted() -> None:
            monkeypatch.undo()
            channel.socket.sendmsg([channel._outbox[0][0]])
            if answered:
                while ckpt._link._waiting:
                    assert time.monotonic() < deadline, "there was no answer"
                    time.sleep(0.01)
            raise KeyboardInterrupt

        monkeypatch.setattr(channel, "flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.restore()
        while ckpt._link._channel is channel:
            assert time.monotonic() < deadline, "no other conversation was begun"
            time.sleep(0.01)
        change(state["w"])
        ckpt.save(2).wait()
        change(state["w"])
        assert ckpt.restore() == 2
        assert (state["w"] == 2).all()


@pytest.mark.parametrize("first", [False, True], ids=["the answer", "the interrupt"])
def test_an_answer_that_nobody_waits_for_any_more_is_let_go_of(
    where: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Beside it comes a descriptor of memory, which is held for as long as that is open."""
    came, interrupted = threading.Event(), threading.Event()
    held: list[list[int]] = []
    dropped: list[list[int]] = []

    class Interrupted(Future[link.Answer]):
        def set_result(self, result: link.Answer) -> None:
            held.append(result[1])
            came.set()
            if first:
                assert interrupted.wait(60)
            super().set_result(result)

        def result(self, timeout: float | None = None) -> link.Answer:
            if interrupted.is_set():
                return super().result(timeout)
            assert came.wait(60)
            if not first:
                super().result(60)
            interrupted.set()
            raise KeyboardInterrupt

    def drop(fds: list[int]) -> None:
        dropped.append(fds)
        channel.drop(fds)

    state = tensors(1)
    with zerostall.Checkpointer(where, state=state, rng=False) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()
        monkeypatch.setattr(link, "Future", Interrupted)
        monkeypatch.setattr(link, "drop", drop)
        with pytest.raises(KeyboardInterrupt):
            ckpt._link.ask(lambda id: m.Fetch(id=id, step=1, tier="host"))
        monkeypatch.setattr(link, "Future", Future)
        change(state["w"])
        assert ckpt.restore() == 1  # its answers come behind that one
    assert len(held) == 1 and held[0] and held[0] in dropped


@pytest.mark.parametrize("verb", ["wait", "restore", "close"])
def test_locks_that_an_interrupt_left_behind_hold_nobody_up(where: Path, verb: str) -> None:
    """Ctrl-C can come when a thread has just taken a lock, and before the block that would let go of it begins."""
    state = tensors(1)
    with zerostall.Checkpointer(where, state=state, when_busy="wait", rng=False) as ckpt:
        ckpt.restore()
        saving = ckpt.save(1)
        kept = state["w"].clone()
        ckpt._condition.acquire()
        ckpt._saves._sealer._told.acquire()
        match verb:
            case "wait":
                saving.wait(timeout=60)
            case "restore":
                change(state["w"])
                assert ckpt.restore() == 1 and (state["w"] == kept).all()
            case _:
                ckpt.close(timeout=60)
        with pytest.raises(RuntimeError):
            ckpt._condition.release()
    assert saved(where) == [1]


def test_threads_that_save_take_turns(where: Path) -> None:
    state = tensors(0)
    errors: list[BaseException] = []
    numbers = iter(range(1, 1000))
    lock = threading.Lock()

    def save_many() -> None:
        for _ in range(20):
            with lock:
                step = next(numbers)
            try:
                ckpt.save(step)
            except StepExistsError:
                pass  # another thread was faster
            except BaseException as error:
                errors.append(error)

    with zerostall.Checkpointer(where, state=state) as ckpt:
        ckpt.restore()
        threads = [threading.Thread(target=save_many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ckpt.save(1000, when_busy="wait").wait()
    assert errors == []
    assert not zerostall.verify(where, 1000)[0].problems


class Nested:
    """Saves, or restores, while it is saved or restored."""

    verb = ""
    ckpt: zerostall.Checkpointer

    def state_dict(self) -> dict[str, int]:
        if self.verb == "save":
            self.ckpt.save(7)
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.verb == "restore":
            self.ckpt.restore()


def test_a_save_within_a_save_is_refused(where: Path) -> None:
    nested = Nested()
    with zerostall.Checkpointer(where, nested=nested, state=tensors(1)) as ckpt:
        nested.ckpt = ckpt
        ckpt.restore()
        ckpt.save(1).wait()
        nested.verb = "save"
        with pytest.raises(RuntimeError, match=r"save\(\) was called while this very thread"):
            ckpt.save(2)
        nested.verb = "restore"
        with pytest.raises(RuntimeError, match=r"restore\(\) was called while this very thread"):
            ckpt.restore()
        nested.verb = ""
        ckpt.save(3).wait()
        assert ckpt.restore() == 3


def test_what_makes_no_sense_is_refused_at_once_and_costs_nothing(where: Path) -> None:
    state = tensors(1)
    with zerostall.Checkpointer(where, state=state, when_busy="wait") as ckpt:
        ckpt.restore()
        for step in (2**63, 10**40):
            with pytest.raises(ValueError, match="2\\^63"):
                ckpt.save(step)
        for metric in (True, "low", 1j, 10**400, [1.0], torch.ones(2)):
            with pytest.raises(TypeError, match="metric must be a number"):
                ckpt.save(1, metric=metric)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="when_busy"):
            ckpt.save(1, when_busy="later")  # type: ignore[arg-type]
        for step, metric in enumerate((np.float32(0.5), torch.tensor(0.25), 3), 1):
            ckpt.save(step, metric=metric, pin=np.bool_(True)).wait()  # type: ignore[arg-type]
    assert [snapshot.metric for snapshot in zerostall.snapshots(where)] == [0.5, 0.25, 3]
    for wrong in ({"slots": 2.5}, {"freeze_bytes": 1.5}, {"slots": True}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            zerostall.Checkpointer(where, state=state, **wrong)


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("ZEROSTALL_HOST_BUDGET", "lots", "is not a number of bytes"),
        ("ZEROSTALL_AGENT_IDLE", "nan", "is not a number of seconds"),
        ("ZEROSTALL_MANAGER", "ftp://there", "is not a URL"),
    ],
)
def test_an_agent_that_can_never_start_is_not_waited_for(
    where: Path, monkeypatch: pytest.MonkeyPatch, name: str, setting: str, said: str
) -> None:
    monkeypatch.setenv(name, setting)
    with pytest.raises(AgentError, match=rf"(?s)the agent does not start.*{said}"):
        zerostall.Checkpointer(where, state=tensors(1))


def test_an_agent_is_found_however_long_starting_it_takes(
    where: Path, own_agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_AGAIN_SECONDS", 0.0)  # over when it was launched, as on a busy machine
    with zerostall.Checkpointer(where, state=tensors(1)) as ckpt:
        assert ckpt.restore() == 0


def test_folders_that_are_none_are_refused(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("", "a\0b"):
        with pytest.raises(ValueError, match="is no folder"):
            zerostall.Checkpointer(wrong, state=tensors(1))
    where.mkdir()
    (where / "run.lock").symlink_to(where.parent / "elsewhere")
    with pytest.raises(StorageError, match="symbolic links"):
        zerostall.Checkpointer(where, state=tensors(1))
    assert not (where.parent / "elsewhere").exists()
    monkeypatch.setenv("ZEROSTALL_RUNTIME_DIR", "/proc/none")
    with pytest.raises(CapabilityError, match="/proc/none cannot be made"):
        zerostall.Checkpointer(where, state=tensors(1))


def test_a_checkpointer_is_neither_copied_nor_pickled(where: Path) -> None:
    with zerostall.Checkpointer(where, state=tensors(1)) as ckpt:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                duplicate(ckpt)
