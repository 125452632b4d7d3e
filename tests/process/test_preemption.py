"""One process and a signal: the last step is saved, the handler of before hears of it, two signals end at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import forked
import zerostall
from crash.nursery import Child
from hand import wait_until

SCRIPT = """
import os, signal, sys, time
import torch, zerostall
from pathlib import Path
from zerostall.trainer import preemption

where, mode = sys.argv[1:]
if mode != "twice":
    preemption._TWICE_SECONDS = 600.0  # however far apart signals get here that were sent at once
if mode == "chained":
    signal.signal(signal.SIGTERM, lambda number, frame: print("before", number, frame, flush=True))
w = torch.zeros(1000)
grace = 1.0 if mode == "stuck" else 60.0
with zerostall.Checkpointer(where, preempt=("SIGTERM", signal.SIGUSR1), grace=grace, state={"w": w}) as ckpt:
    if mode == "worker" and (pid := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        print("worker lives", flush=True)
        os._exit(0)
    for step in range(1, 1_000_000):
        w.fill_(step)
        ckpt.save(step, when_busy="wait")
        if ckpt.preempted:
            break
        print("trained", step, flush=True)
        if mode in ("stuck", "twice") and step == 3:
            while True:
                time.sleep(100)
        time.sleep(0.01)
print("left", step, flush=True)
"""


def start(where: Path, mode: str, environment: dict[str, str]) -> Child:
    return forked.start("-c", SCRIPT, where, mode, environment=environment, output=where.parent / "printed")


def heard(process: Child, word: str) -> str:
    """The first line that begins so."""

    def lines() -> list[str]:
        return [line for line in process.printed().splitlines() if line.startswith(word)]

    wait_until(lambda: process.ended() or lines())
    assert lines(), f"it ended before it said {word!r}"
    return lines()[0]


@pytest.mark.parametrize("mode", ["plain", "chained", "worker"])
def test_the_loop_leaves_after_a_last_save(mode: str, tmp_path: Path, agent_environment: dict[str, str]) -> None:
    where = tmp_path / "run"
    process = start(where, mode, agent_environment)
    if mode == "worker":
        heard(process, "worker lives")
    heard(process, "trained 5")
    process.signal(signal.SIGTERM)
    process.signal(signal.SIGTERM)  # a launcher and its scheduler: the same signal, at once
    code = process.wait(100)
    rest = process.printed()
    assert code == 0, rest
    step = int(rest.split("left ")[1].split()[0])
    assert zerostall.snapshots(where)[-1].step == step
    assert ("before 15 None" in rest) is (mode == "chained")


def test_what_is_saved_gets_to_disk_though_no_step_ends(tmp_path: Path, agent_environment: dict[str, str]) -> None:
    where = tmp_path / "run"
    process = start(where, "stuck", agent_environment)
    heard(process, "trained 3")
    process.signal(signal.SIGUSR1)
    code = process.wait(100)
    rest = process.printed()
    assert code == -signal.SIGUSR1, rest
    assert "no step has ended" in rest
    assert zerostall.snapshots(where)[-1].step == 3


def test_a_second_signal_ends_it_at_once(tmp_path: Path, agent_environment: dict[str, str]) -> None:
    process = start(tmp_path / "run", "twice", agent_environment)
    heard(process, "trained 3")
    process.signal(signal.SIGTERM)
    assert "SIGTERM: all ranks save once more" in heard(process, "SIGTERM")

    def again() -> bool:
        process.signal(signal.SIGTERM)
        return process.ended()

    wait_until(again)
    assert process.code == -signal.SIGTERM


def test_only_signals_that_can_be_handled(tmp_path: Path, own_agent: Path) -> None:
    for wrong in ("SIGKILL", "SIGNOT", 999):
        with pytest.raises(ValueError, match=r"SIG|999"):
            zerostall.Checkpointer(tmp_path / "run", preempt=(wrong,), state={})
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
