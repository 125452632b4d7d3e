"""When a save is skipped, waits or is replaced, and when the disk rests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

import forked
import zerostall
from hand import agent_report
from training import SCRIPT, saved, tensors
from zerostall.errors import (
    ReplacedError,
    WaitTimeoutError,
)

pytestmark = pytest.mark.usefixtures("own_agent")

BIG = 3_000_000  # floats: more than one chunk is in flight, and the copy takes a while


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
        savings = [ckpt.save(1)]
        while len(savings) < 29 or not any(saving.skipped for saving in savings):
            savings.append(ckpt.save(savings[-1].step + 1))
        skipped = [s for s in savings if s.skipped]
        assert ckpt.stats.skipped == len(skipped)
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
    forked.python("-c", script, where)
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
