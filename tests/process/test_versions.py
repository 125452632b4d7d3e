"""A newer zerostall beside an agent that an older one has left running, as after an update while a node is up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

import zerostall
from hand import wait_until

OLDER = """
import sys
from zerostall.wire import messages, rendezvous
messages.PROTOCOL = rendezvous.PROTOCOL = messages.PROTOCOL - 1
"""
AGENT = (
    OLDER
    + """
from zerostall.agent.__main__ import main
sys.exit(main(["--runtime-dir", sys.argv[1]]))
"""
)
TRAINER = (
    OLDER
    + """
import torch, zerostall
ckpt = zerostall.Checkpointer(sys.argv[1], state={"x": torch.full((5000,), 7.0)}, disk_interval=3600)
ckpt.save(7).wait("host", timeout=60)
print("saved", flush=True)
sys.stdin.read()
"""
)


def test_a_newer_trainer_gets_an_agent_of_its_own_and_what_the_older_one_leaves(
    own_agent: Path, tmp_path: Path
) -> None:
    old_agent = subprocess.Popen([sys.executable, "-c", AGENT, str(own_agent)])
    try:
        wait_until(lambda: any(own_agent.glob("agent-*.sock")), 60.0)
        run = tmp_path / "run"
        old_trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert old_trainer.stdout is not None and old_trainer.stdin is not None
        assert old_trainer.stdout.readline() == "saved\n"
        old_trainer.send_signal(signal.SIGKILL)  # what it saved is in the older agent's memory, and goes to disk now
        old_trainer.wait()
        old_trainer.stdin.close()
        old_trainer.stdout.close()
        wait_until(lambda: bool(zerostall.snapshots(run)), 60.0)
        state = {"x": torch.zeros(5000)}
        with zerostall.Checkpointer(run, state=state) as ckpt:
            assert ckpt.restore() == 7 and torch.equal(state["x"], torch.full((5000,), 7.0))
            ckpt.save(8).wait("disk", timeout=60)
        assert len(list(own_agent.glob("agent-*.sock"))) == 2
        assert old_agent.poll() is None
    finally:
        os.kill(old_agent.pid, signal.SIGTERM)
        try:
            old_agent.wait(60)
        finally:
            old_agent.kill()
            old_agent.wait()
