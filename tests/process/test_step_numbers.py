"""Numbers of steps, which of them stay, and whose folder it is."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import zerostall
from hand import wait_until
from training import saved, tensors
from zerostall.errors import (
    MismatchError,
    RunMismatchError,
    SnapshotNotFoundError,
    StepExistsError,
)

pytestmark = pytest.mark.usefixtures("own_agent")


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


def loaded(where: Path) -> float:
    (value,) = set(zerostall.load(where, 7)["state"]["w"].tolist())  # type: ignore[index]
    return value


def exported(where: Path) -> float:
    out = where.parent / "out.safetensors"
    zerostall.export(where, 7, out, zerostall.ExportOptions(overwrite=True))
    (value,) = set(load_file(out)["state.w"].tolist())
    return value


def verified(where: Path) -> float:
    (verdict,) = zerostall.verify(where, 7)
    assert verdict.clean, verdict
    return time.monotonic()


def listed(where: Path) -> float:
    snapshot = next(iter(zerostall.snapshots(where)), None)
    if snapshot is None:
        raise SnapshotNotFoundError("absent")
    assert snapshot.clean, snapshot
    return snapshot.created


def compared(where: Path) -> float:
    zerostall.diff(where, 7, 7)
    return time.monotonic()


@pytest.mark.parametrize("look", [loaded, exported, verified, listed, compared])
def test_who_reads_a_step_while_it_is_replaced_gets_the_old_one_or_the_new(
    where: Path, look: Callable[[Path], float]
) -> None:
    state = tensors(0)
    seen: list[float] = []
    failed: list[BaseException] = []
    over = threading.Event()

    def read() -> None:
        try:
            while not over.is_set():
                with contextlib.suppress(SnapshotNotFoundError):  # for a moment there is neither
                    seen.append(look(where))
        except BaseException as error:
            failed.append(error)

    with zerostall.Checkpointer(where, when_busy="wait", disk_interval=0, state=state) as ckpt:
        ckpt.restore()
        ckpt.save(7).wait()
        reader = threading.Thread(target=read)
        reader.start()
        for value in range(1, 40):
            state["w"].fill_(value)
            ckpt.save(7, if_exists="replace").wait()
            if value % 4 == 0:
                wait_until(lambda before=len(seen): failed or len(seen) > before, pause=0.001)
        over.set()
        reader.join()
    assert failed == []
    assert seen == sorted(seen) and len(set(seen)) > 5
