"""Images of which a second vault has a copy, whatever becomes of the first; on a stand-in driver with several GPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import cli
from hand import agent_pid, agent_report, wait_until
from standin.training import ROOT, Trainer, expected, save
from zerostall.wire import messages as m

Start = Callable[..., Trainer]


@pytest.fixture
def folder(agent_environment: dict[str, str]) -> Path:
    return Path(agent_environment["ZEROSTALL_RUNTIME_DIR"])


@pytest.fixture(params=["3", "4"])
def gpus(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start(start_on_stand_in: Start) -> Start:
    return lambda gpus="3": start_on_stand_in({"FAKE_CUDA_DEVICES": gpus}, copies=2)


def peer(folder: Path) -> m.TierReport:
    return next((tier for rank in agent_report(folder).ranks for tier in rank.tiers if tier.tier == "peer"), None)  # type: ignore


def vaults(folder: Path) -> list[int]:
    """The process of the first copy, and of the second: the trainer's GPU is the first of all."""
    agent = agent_pid(folder)
    found = {}
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        found[words[words.index("--gpu") + 1]] = int(pid)
    return [found[gpu] for gpu in sorted(found)]


def mirrored(folder: Path, count: int) -> None:
    wait_until(lambda: f", {count} mirrored in" in peer(folder).where)


def shown(folder: Path, where: Path, step: int) -> str:
    """What `zerostall show` says."""
    environment = {
        **os.environ,
        "ZEROSTALL_RUNTIME_DIR": str(folder),
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": "200",
    }
    done = cli(environment, "show", where, step)
    assert done.returncode == 0, done.stderr
    return done.stdout


def with_both(trainer: Trainer, folder: Path) -> Trainer:
    """After saves of steps below 10; the last one lies in two vaults, and none before it does."""
    save(trainer, 1)
    wait_until(lambda: "mirrored in" in peer(folder).where and trainer.ask("has locker"))
    for step in range(2, 10):
        save(trainer, step)
        if trainer.ask("stats")["stowed"]:
            mirrored(folder, 1)
            return trainer
    pytest.fail("nothing was stowed")


def said(trainer: Trainer, words: str) -> bool:
    return any(words in text for text in trainer.ask("fallbacks"))


def test_what_only_vaults_have_outlives_one_of_them(start: Start, folder: Path, gpus: str) -> None:
    trainer = with_both(start(gpus), folder)
    first, _ = vaults(folder)
    os.kill(first, signal.SIGSTOP)  # so that it drains nothing; its memory is there
    trainer.ask("fill", 12)
    trainer.ask("save", 12)
    trainer.ask("guard")
    trainer.ask("fill", 99)
    mirrored(folder, 2)
    assert peer(folder).moving == 12
    os.kill(first, signal.SIGKILL)
    assert trainer.ask("wait", 12, "host") == ""
    assert trainer.ask("restore") == 12
    assert trainer.ask("digest") == expected(12)
    assert trainer.ask("stats")["restored_from"] == "peer" and trainer.ask("stats")["dirty"] == 0
    wait_until(lambda: trainer.ask("has locker"))  # the first vault has come back
    before = trainer.ask("stats")["stowed"]
    save(trainer, 13)
    save(trainer, 14)
    assert trainer.ask("stats")["stowed"] > before
    mirrored(folder, 2)
    trainer.kill()
    after = start(gpus)
    assert after.ask("restore") == 14
    assert after.ask("digest") == expected(14)
    assert after.ask("stats")["restored_from"] == "peer"
    after.close()


def test_a_damaged_copy_is_found_and_the_other_one_taken_then_host_memory(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    trainer = with_both(start(), folder)
    save(trainer, 12)
    mirrored(folder, 2)
    assert trainer.ask("wait", 12, "disk") == ""
    assert "in disk, host, peer ×2" in shown(folder, tmp_path / "run", 12)
    trainer.ask("spoil vault")
    assert trainer.ask("restore") == 12
    assert trainer.ask("digest") == expected(12)
    assert trainer.ask("stats")["restored_from"] == "peer"
    assert said(trainer, "its mirror is restored from, not the memory of")
    assert said(trainer, "arrived as other bytes")
    _, second = vaults(folder)
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{second}").exists())
    trainer.ask("fill", 99)
    assert trainer.ask("restore") == 12
    assert trainer.ask("digest") == expected(12)
    assert trainer.ask("stats")["restored_from"] == "host"
    trainer.close()


def test_where_there_is_no_third_gpu_one_copy_is_kept_and_it_is_said(start: Start, folder: Path) -> None:
    trainer = start("2")
    for step in range(1, 10):
        save(trainer, step)
        if trainer.ask("stats")["stowed"]:
            break
        wait_until(lambda: trainer.ask("has locker"))
    assert said(trainer, "a second copy takes three GPUs: one copy is kept")
    assert "mirror" not in peer(folder).where
    trainer.close()
