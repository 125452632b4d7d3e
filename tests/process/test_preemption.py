"""One process and a signal: the last step is saved, the handler of before hears of it, two signals end at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zerostall
from hand import wait_until

SCRIPT = """
import os, signal, sys, time
import torch, zerostall
from pathlib import Path

where, mode = sys.argv[1:]
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
        ckpt.save(step)
        if ckpt.preempted:
            break
        print("trained", step, flush=True)
        if mode in ("stuck", "twice") and step == 3:
            while True:
                time.sleep(100)
        time.sleep(0.01)
print("left", step, flush=True)
"""


def start(where: Path, mode: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(where), mode],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def heard(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line
    raise AssertionError(f"it ended before it said {word!r}")


@pytest.mark.parametrize("mode", ["plain", "chained", "worker"])
def test_the_loop_leaves_after_a_last_save(mode: str, tmp_path: Path, agent_environment: dict[str, str]) -> None:
    where = tmp_path / "run"
    process = start(where, mode, agent_environment)
    if mode == "worker":
        heard(process, "worker lives")
    heard(process, "trained 5")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # a launcher and its scheduler: the same signal, at once
    rest, _ = process.communicate(timeout=100)
    assert process.returncode == 0, rest
    step = int(rest.split("left ")[1].split()[0])
    assert zerostall.snapshots(where)[-1].step == step
    assert ("before 15 None" in rest) is (mode == "chained")


def test_what_is_saved_gets_to_disk_though_no_step_ends(tmp_path: Path, agent_environment: dict[str, str]) -> None:
    where = tmp_path / "run"
    process = start(where, "stuck", agent_environment)
    heard(process, "trained 3")
    process.send_signal(signal.SIGUSR1)
    rest, _ = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGUSR1, rest
    assert "no step has ended" in rest
    assert zerostall.snapshots(where)[-1].step == 3


def test_a_second_signal_ends_it_at_once(tmp_path: Path, agent_environment: dict[str, str]) -> None:
    process = start(tmp_path / "run", "twice", agent_environment)
    heard(process, "trained 3")
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM: all ranks save once more" in heard(process, "SIGTERM")
    ended = False

    def again() -> bool:
        nonlocal ended
        process.send_signal(signal.SIGTERM)
        ended = process.poll() is not None
        return ended

    wait_until(again, 60)
    assert process.returncode == -signal.SIGTERM
    process.communicate()


def test_only_signals_that_can_be_handled(tmp_path: Path, own_agent: Path) -> None:
    for wrong in ("SIGKILL", "SIGNOT", 999):
        with pytest.raises(ValueError, match=r"SIG|999"):
            zerostall.Checkpointer(tmp_path / "run", preempt=(wrong,), state={})
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
