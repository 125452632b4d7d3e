"""Captures into another GPU's memory with a real agent and its vault, on the stand-in driver."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hand import agent_pid, agent_report, kill_agent, wait_until
from standin.cuda import LAUNCH_FAILED
from standin.training import IMAGE, Trainer, expected, save

Start = Callable[..., Trainer]


@pytest.fixture
def start(start_on_stand_in: Start) -> Start:
    return lambda environment=None, **options: start_on_stand_in(environment, **{"peer": True, **options})


@pytest.fixture
def folder(agent_environment: dict[str, str]) -> Path:
    return Path(agent_environment["ZEROSTALL_RUNTIME_DIR"])


def with_locker(trainer: Trainer) -> Trainer:
    """After saves of steps below 10; the last of them, and no other, went through the vault.

    The first asks for a locker, and slots that were granted before it was there are for host memory.
    """
    for step in range(1, 10):
        save(trainer, step)
        if trainer.ask("stats")["stowed"]:
            return trainer
        wait_until(lambda: trainer.ask("has locker"))
    pytest.fail("nothing was stowed")


def vault_pid(folder: Path) -> int:
    """The vault's process: the agent's only child."""
    (pid,) = Path(f"/proc/{agent_pid(folder)}/task/{agent_pid(folder)}/children").read_text().split()
    return int(pid)


def said(trainer: Trainer, words: str) -> bool:
    return any(words in text for text in trainer.ask("fallbacks"))


def test_what_is_queued_before_counts_and_what_comes_after_does_not(start: Start, folder: Path) -> None:
    trainer = with_locker(start())
    trainer.ask("fake", "delay", 200)
    for step in range(12, 17):
        trainer.ask("fill", step, 3000)  # still running at save
        assert trainer.ask("save", step, {"when_busy": "wait"}) == ""
        trainer.ask("guard")
        trainer.ask("fill", 99)
    trainer.ask("fake", "delay", 0)
    assert trainer.ask("wait", 16, "disk") == ""
    assert trainer.ask("stats")["stowed"] == 6
    (rank,) = agent_report(folder).ranks
    tiers = {tier.tier: tier for tier in rank.tiers}
    assert tiers["peer"].newest == 16 and "GPU-" in tiers["peer"].where
    assert rank.peer_bytes >= 2 * IMAGE
    for step in (15, 16):
        assert trainer.ask("restore", step) == step
        assert trainer.ask("digest") == expected(step)
    trainer.close()


@pytest.mark.long
def test_chunks_that_a_guard_moves_aside_get_there(start: Start) -> None:
    trainer = with_locker(start(policy="freeze", freeze_bytes=64 << 20))
    for step in range(12, 15):
        trainer.ask("fill", step)
        assert trainer.ask("save", step, {"when_busy": "wait"}) == ""
        trainer.ask("guard")
        trainer.ask("fill", 99)
        assert trainer.ask("wait", step, "host") == ""
        assert trainer.ask("restore", step) == step
        assert trainer.ask("digest") == expected(step)
    assert trainer.ask("stats")["stowed"] == 4


def test_what_lies_in_the_vault_when_the_trainer_is_killed_is_finished(start: Start, folder: Path) -> None:
    trainer = with_locker(start())
    os.kill(pid := vault_pid(folder), signal.SIGSTOP)  # it would be too quick
    trainer.ask("fill", 12)
    trainer.ask("save", 12)
    wait_until(lambda: trainer.ask("stats")["stowed"] == 2)
    wait_until(lambda: any(tier.moving == 12 for rank in agent_report(folder).ranks for tier in rank.tiers))
    trainer.kill()
    os.kill(pid, signal.SIGCONT)
    after = start()
    assert after.ask("restore") == 12
    assert after.ask("digest") == expected(12)
    assert after.ask("stats")["restored_from"] == "peer"
    save(after, 13)
    after.close()


def test_a_restore_in_the_same_process_waits_for_what_is_on_its_way(start: Start) -> None:
    trainer = with_locker(start())
    trainer.ask("fill", 12)
    trainer.ask("save", 12)
    trainer.ask("guard")
    trainer.ask("fill", 99)
    assert trainer.ask("restore") == 12
    assert trainer.ask("digest") == expected(12)
    assert trainer.ask("stats")["restored_from"] == "peer"


def test_of_several_steps_each_comes_from_where_it_is(start: Start) -> None:
    trainer = with_locker(start())
    for step in range(12, 15):
        save(trainer, step)
    for step in (13, 14):
        assert trainer.ask("restore", step) == step
        assert trainer.ask("digest") == expected(step)
    assert trainer.ask("stats")["restored_from"] == "peer"  # the newest is there always
    trainer.close()


def test_a_vault_that_cannot_be_restored_from_is_told_and_host_memory_serves(start: Start) -> None:
    trainer = with_locker(start())
    save(trainer, 12)
    trainer.ask("spoil vault")
    assert trainer.ask("restore") == 12
    assert trainer.ask("digest") == expected(12)
    assert trainer.ask("stats")["restored_from"] == "host"
    assert said(trainer, "arrived as other bytes")
    trainer.kill()
    after = start()
    after.ask("fake", "fail", "cuIpcOpenMemHandle", 1, 201)
    assert after.ask("restore") == 12
    assert after.ask("digest") == expected(12)
    assert after.ask("stats")["restored_from"] == "host"
    assert said(after, "cuIpcOpenMemHandle")
    after.close()


def test_a_vault_that_is_killed_takes_its_images_along_and_comes_back(start: Start, folder: Path) -> None:
    trainer = with_locker(start())
    save(trainer, 12)
    os.kill(pid := vault_pid(folder), signal.SIGSTOP)
    trainer.ask("fill", 13)
    trainer.ask("save", 13)
    wait_until(lambda: trainer.ask("stats")["stowed"] == 3)
    os.kill(pid, signal.SIGKILL)
    failed = trainer.ask("wait", 13, "host")
    assert failed.startswith("AgentError") and "vault" in failed and "signal 9" in failed
    wait_until(lambda: said(trainer, "no memory of another GPU"))
    save(trainer, 14)  # to host memory, or to the vault that has come back
    wait_until(lambda: trainer.ask("has locker"))
    before = trainer.ask("stats")["stowed"]
    save(trainer, 15)
    save(trainer, 16)
    assert trainer.ask("stats")["stowed"] > before
    assert trainer.ask("restore") == 16
    assert trainer.ask("digest") == expected(16)
    trainer.close()


def test_an_agent_that_is_killed_takes_its_vault_along(start: Start, folder: Path) -> None:
    trainer = with_locker(start())
    save(trainer, 12)
    os.kill(pid := vault_pid(folder), signal.SIGSTOP)
    trainer.ask("fill", 13)
    trainer.ask("save", 13)
    wait_until(lambda: trainer.ask("stats")["stowed"] == 3)
    kill_agent(folder)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert "the agent died" in trainer.ask("wait", 13, "host")
    wait_until(lambda: trainer.ask("has locker"))
    save(trainer, 14)
    before = trainer.ask("stats")["stowed"]
    save(trainer, 15)
    assert trainer.ask("stats")["stowed"] > before
    assert trainer.ask("restore") == 15
    assert trainer.ask("digest") == expected(15)
    trainer.close()


@pytest.mark.long
def test_a_drain_that_fails_makes_the_step_dirty(start: Start) -> None:
    trainer = start({"FAKE_CUDA_FAIL": f"vault cuMemcpyDtoHAsync 1 {LAUNCH_FAILED}"})
    said: list[str] = []
    for step in range(1, 10):
        trainer.ask("save", step, {"when_busy": "wait"})
        said.append(trainer.ask("wait", step, "host"))
        if said[-1]:
            break
        wait_until(lambda: trainer.ask("has locker"))
    assert "could not be drained" in said[-1]
    save(trainer, 13)
    assert trainer.ask("restore") == 13
    assert trainer.ask("digest") == expected(13)


@pytest.mark.parametrize(
    ("environment", "options", "why"),
    [
        ({"FAKE_CUDA_LINKS": ""}, {}, "it reaches no other GPU's memory"),
        ({"ZEROSTALL_VAULT_BUDGET": "1M"}, {}, "over its budget"),
        pytest.param({}, {"places": [0, 1]}, "the state of this process is on several GPUs", marks=pytest.mark.long),
    ],
    ids=["no access", "no budget", "two devices"],
)
def test_what_keeps_a_locker_from_being_had_is_said(
    start: Start, environment: dict[str, str], options: dict[str, object], why: str
) -> None:
    trainer = start(environment, **options)
    for step in (1, 2):
        save(trainer, step)
    wait_until(lambda: said(trainer, why))
    save(trainer, 3)
    assert trainer.ask("stats")["stowed"] == 0
    assert trainer.ask("restore") == 3
    assert trainer.ask("digest") == expected(3)
    trainer.close()


@pytest.mark.long
def test_a_gpu_with_room_for_one_image_lends_one_place(start: Start, folder: Path) -> None:
    trainer = with_locker(start({"FAKE_CUDA_MEMORY": str(70_000_000)}))  # half of which is lent
    for step in (12, 13):
        save(trainer, step)
    assert trainer.ask("stats")["stowed"] == 3
    assert IMAGE <= agent_report(folder).ranks[0].peer_bytes < 2 * IMAGE
    assert trainer.ask("restore") == 13
    assert trainer.ask("digest") == expected(13)


@pytest.mark.long
def test_a_locker_that_cannot_be_opened_is_given_back(start: Start, folder: Path) -> None:
    trainer = start()
    trainer.ask("fake", "fail", "cuIpcOpenMemHandle", 1, 201)
    save(trainer, 1)
    wait_until(lambda: trainer.ask("has locker"))
    for step in (2, 3, 4):
        save(trainer, step)
    assert said(trainer, "cannot be opened")
    wait_until(lambda: agent_report(folder).ranks[0].peer_bytes == 0)
    assert trainer.ask("stats")["stowed"] == 0


def test_without_being_asked_for_no_other_gpu_is_touched(start: Start, folder: Path) -> None:
    trainer = start(peer=False)
    for step in (1, 2):
        save(trainer, step)
    assert not Path(f"/proc/{agent_pid(folder)}/task/{agent_pid(folder)}/children").read_text()
    assert [tier.tier for tier in agent_report(folder).ranks[0].tiers] == ["host", "disk"]


def test_bytes_that_are_not_what_the_device_held_are_found_where_they_arrive(start: Start) -> None:
    trainer = start({"ZEROSTALL_WITHOUT": "order"}, source_checks=1.0, at_once=["host"])
    stream = trainer.ask("stream")
    for step in range(1, 10):
        trainer.ask("fill", step)
        trainer.ask("fake", "settle", stream)
        trainer.ask("save", step, {"when_busy": "wait"})
        assert trainer.ask("wait", step, "host") == ""
        if trainer.ask("stats")["stowed"]:
            break
        wait_until(lambda: trainer.ask("has locker"))
    before = trainer.ask("fake", "count", "cuEventSynchronize")
    trainer.ask("fake", "hold", stream)  # a long kernel, and nothing waits for it
    trainer.ask("fill", 12)
    trainer.ask("save", 12)
    wait_until(lambda: trainer.ask("fake", "count", "cuEventSynchronize") > before)  # by the sealer: all has arrived
    trainer.ask("fake", "release")
    assert "GhostError: step 12: other bytes arrived than the device held at save: t" in trainer.ask("wait", 12, "host")
    assert trainer.ask("stats")["dirty"] == 1
