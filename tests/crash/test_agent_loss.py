"""The agent is stopped, killed, hidden or locked out while training goes on: nothing waits, and all is well after.

The trainer is this process; its agents are forked from a warm one, or started by the trainer itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch

import zerostall.trainer.link
from crash.conftest import StartAgent
from crash.live import Run, on_disk, restored
from crash.nursery import Child
from crash.script import leftovers
from hand import agent_pid, kill_agent, wait_until
from shim.faults import Faults, Shim
from zerostall import native
from zerostall.errors import AgentError, CapacityError, RunBusyError, WaitTimeoutError, ZerostallError
from zerostall.tiers.disk import DiskTier
from zerostall.wire import messages as m
from zerostall.wire import rendezvous
from zerostall.wire.channel import Channel


@pytest.fixture
def agent(start_agent: StartAgent) -> Child:
    return start_agent()


@contextlib.contextmanager
def stopped(agent: Child):
    agent.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        agent.signal(signal.SIGCONT)


def created(where: Path, step: int) -> float:
    return DiskTier(where, native.Pool("look", 1)).created(step)


def train(run: Run, steps: int) -> list[zerostall.Saving]:
    """Train and save without ever waiting."""
    return [run.ckpt.save(run.job.train_one_step()) for _ in range(steps)]


def test_a_stopped_agent_stops_nobody(agent: Child, where: Path) -> None:
    with Run(where) as run:
        run.save().wait()
        with stopped(agent):
            savings = train(run, 20)
            assert sum(bool(saving.skipped) for saving in savings) >= 18
            assert run.ckpt.stats.skipped >= 18
            with pytest.raises(WaitTimeoutError):
                savings[0].wait(timeout=0.05)
        savings[0].wait(timeout=60)
        run.save().wait(timeout=60)
    assert restored(where) == run.job.clock["step"]


def test_close_is_bounded_while_the_agent_is_stopped(agent: Child, where: Path) -> None:
    run = Run(where)
    run.save().wait()
    with stopped(agent):
        run.ckpt.save(run.job.train_one_step())
        run.ckpt._saves.settle(60.0)
        with pytest.raises((WaitTimeoutError, AgentError)):
            run.ckpt.close(timeout=0.1)
    wait_until(lambda: on_disk(where) == [1, 2])  # told before, the agent brings it to disk all the same


def test_a_stopped_agent_refuses_nobody_for_ever(agent: Child, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zerostall.trainer.link, "_HELLO_SECONDS", 0.1)
    with stopped(agent), pytest.raises(AgentError, match=str(agent.pid)):
        Run(where)


def test_a_first_save_without_an_agent_is_skipped(
    agent: Child, where: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory to capture into, and none to be had: training goes on, and later saves work."""
    monkeypatch.setattr(zerostall.trainer.link, "_UP_SECONDS", 0.05)
    with Run(where) as run:
        with monkeypatch.context() as nowhere:
            nowhere.setattr(rendezvous, "_launch", lambda folder: 0)
            agent.kill()
            wait_until(lambda: not run.ckpt._link.up())
            savings = train(run, 3)
            assert all("agent" in saving.skipped for saving in savings)
            assert run.ckpt.stats.skipped == 3
        # The link comes back by itself, in its own time.
        run.ckpt._saves._captures._no_agent_until = 0.0
        monkeypatch.undo()
        monkeypatch.setenv("ZEROSTALL_RUNTIME_DIR", str(folder))
        wait_until(run.ckpt._link.up, seconds=60)
        run.save().wait(timeout=60)
        assert run.ckpt.stats.agent_restarts == 1
    assert restored(where) == 4


def test_an_agent_that_is_asked_to_leave_finishes_what_it_writes(
    agent: Child, start_agent: StartAgent, faulty: Shim, where: Path
) -> None:
    with Run(where) as run:
        run.save().wait()
        with Faults(faulty, op="fsync", match="*/rank-00000.safetensors", hold=True) as held:
            run.ckpt.save(run.job.train_one_step())
            wait_until(lambda: held.hits)
            agent.signal(signal.SIGTERM)
            train(run, 3)
        assert agent.wait() == 0
        assert on_disk(where)[:2] == [1, 2]
        run.save().wait(timeout=60)
    assert restored(where) == run.job.clock["step"]


def test_memory_that_was_refused_is_not_written_to(start_agent: StartAgent, where: Path) -> None:
    """A state that has grown beyond the budget is refused at each save; what is in memory stays as it is."""
    start_agent(ZEROSTALL_HOST_BUDGET="1M")
    small, large = torch.full((20_000,), 1.0), torch.full((200_000,), 2.0)
    state = {"t": small}
    with zerostall.Checkpointer(where, state=state) as ckpt:
        ckpt.save(1).wait()
        state["t"] = large
        for step in (2, 3):
            with pytest.raises(CapacityError, match="bytes"):
                ckpt.save(step)
        state["t"] = small
        ckpt.save(4, when_busy="wait").wait()
    state["t"] = torch.zeros(20_000)
    with zerostall.Checkpointer(where, state=state) as ckpt:
        assert ckpt.restore(1) == 1
        assert ckpt.restore() == 4
    assert torch.equal(state["t"], small)


@pytest.fixture
def launches_none(forked_agents: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process starts no agent of its own: it might be quicker than the one that the test starts."""
    monkeypatch.setattr(rendezvous, "_launch", lambda folder: 0)


@pytest.mark.usefixtures("launches_none")
def test_kills_of_the_agent_between_all_calls(agent: Child, start_agent: StartAgent, where: Path) -> None:
    """What was sealed is handed to the next agent; a save goes on where it was."""
    with Run(where) as run:
        for _ in range(4):
            saving = run.save()
            agent.kill()
            agent = start_agent()
            saving.wait(timeout=60)
            assert "disk" in saving.tiers
        assert run.ckpt.stats.agent_restarts == 4
    assert on_disk(where) == [1, 2, 3, 4]
    assert restored(where, 2) == 2


@pytest.mark.usefixtures("launches_none")
def test_what_was_asked_for_survives_the_agent(
    agent: Child, start_agent: StartAgent, faulty: Shim, where: Path
) -> None:
    """Pins, replacements and steps set aside are known to the agent that takes over."""
    with Run(where, keep=1) as run:
        for _ in range(3):
            run.save(pin=True).wait()
        assert run.restore(2) == 2
        with Faults(faulty, op="open", match="*/rank-00000.safetensors", hold=True):
            pinned = run.save(pin=True)
            pinned.wait("host", timeout=60)
            agent.kill()
            agent = start_agent()
            wait_until(lambda: run.ckpt.stats.agent_restarts == 1)
        pinned.wait(timeout=60)
        run.save().wait(timeout=60)
        before = created(where, 4)
        with Faults(faulty, op="open", match="*/rank-00000.safetensors", hold=True):
            again = run.ckpt.save(4, if_exists="replace", when_busy="wait")
            again.wait("host", timeout=60)
            agent.kill()
            agent = start_agent()
            wait_until(lambda: run.ckpt.stats.agent_restarts == 2)
            assert created(where, 4) == before
        again.wait(timeout=60)
        assert created(where, 4) > before
        run.save().wait(timeout=60)
    assert on_disk(where) == [1, 2, 3, 5]
    assert restored(where, 3) == 3


def test_the_agent_dies_while_a_restore_asks_it(
    agent: Child, start_agent: StartAgent, faulty: Shim, where: Path
) -> None:
    """The next agent is asked for the same step: an older one is no substitute."""
    with Run(where) as run:
        run.save().wait()
        run.save().wait()
    agent.kill()
    start_agent()
    with Run(where) as run:
        with Faults(faulty, op="read", match="*2/rank-00000.json", kill=0, times=1):
            assert run.restore() == 2
        run.save().wait(timeout=60)
    assert restored(where) == 3


def test_a_socket_that_was_swept_is_made_anew(agent: Child, where: Path, folder: Path) -> None:
    with Run(where) as run:
        run.save().wait()
        rendezvous.socket_path(folder).unlink()
        run.save().wait(timeout=60)
    assert restored(where) == 2  # a new trainer finds the same agent
    assert agent_pid(folder) == agent.pid


@pytest.mark.parametrize("also", ["nothing else", "the agent"])
def test_a_runtime_folder_that_was_swept_is_made_anew(agent: Child, where: Path, folder: Path, also: str) -> None:
    with Run(where) as run:
        run.save().wait()
        shutil.rmtree(folder)
        if also == "the agent":
            agent.kill()
        run.save().wait(timeout=60)
        run.save().wait(timeout=60)
    assert restored(where) == 3
    wait_until(lambda: rendezvous.socket_path(folder).exists())


def test_a_displaced_agent_leaves_with_its_trainer(agent: Child, where: Path, folder: Path) -> None:
    """Its lock was swept, and another agent was quicker: two would be one too many."""
    with Run(where) as run:
        run.save().wait()
        agent.signal(signal.SIGSTOP)
        shutil.rmtree(folder)
        with Run(where.parent / "another"):  # starts an agent of its own
            assert agent_pid(folder) != agent.pid
        agent.signal(signal.SIGCONT)
        run.save().wait(timeout=60)
        assert not agent.ended()
    assert agent.wait() == 0
    assert rendezvous.socket_path(folder).exists()
    assert restored(where) == 2


def test_the_run_folder_is_removed_while_training(agent: Child, where: Path) -> None:
    with Run(where) as run:
        run.save().wait()
        shutil.rmtree(where)
        run.save().wait(timeout=60)
        with pytest.raises(RunBusyError):
            Run(where)
    assert on_disk(where) == [2]
    assert not leftovers(where)
    assert restored(where) == 2


def test_another_run_takes_the_folder_while_training(agent: Child, where: Path, tmp_path: Path) -> None:
    run = Run(where)
    run.save().wait()
    with Run(tmp_path / "other") as other:
        other.save().wait()
    shutil.rmtree(where)
    shutil.copytree(tmp_path / "other", where)
    with pytest.raises(ZerostallError, match="another run"):
        run.save().wait(timeout=60)
    run.ckpt._estate.shut()
    run.ckpt._closed = True
    assert restored(where) == 1


def test_a_forked_child_does_not_keep_the_next_trainer_out(
    trainers, agent_environment: dict[str, str], folder: Path, where: Path, tmp_path: Path
) -> None:
    """Workers of a data loader outlive a killed trainer for a while, with its socket and its memory."""
    output = tmp_path / "with a worker"
    first = trainers.start(where, "--worker", "--scale=1", environment=agent_environment, output=output)
    wait_until(lambda: " disk" in first.printed() or first.ended())
    worker = int(first.printed().split("worker ")[1].split()[0])
    try:
        first.kill()
        os.kill(worker, 0)
        assert restored(where) >= 1
    finally:
        os.kill(worker, signal.SIGKILL)


def test_the_agent_is_killed_by_hand(where: Path, folder: Path) -> None:
    """The same with an agent that the trainer started itself."""
    with Run(where) as run:
        run.save().wait()
        kill_agent(folder)
        savings = train(run, 5)  # none of them waits for another agent
        assert run.job.clock["step"] == 6 and len(savings) == 5
        run.save().wait(timeout=60)
        assert run.ckpt.stats.agent_restarts == 1
    assert restored(where) == 7


def test_what_comes_around_an_answer_is_heard() -> None:
    """Lost, no slot would ever be free again, or nobody would hear what became of a save."""
    ours, theirs = socket.socketpair()
    channel, agent = Channel(ours, m.FromAgent), Channel(theirs, m.FromTrainer)
    events = [
        m.Reached(step=3, created=1.0, tier="host"),
        m.Granted(slot=2),
        m.Reached(step=4, created=2.0, tier="host"),
    ]
    for message in (events[0], m.Done(id=7), *events[1:]):
        agent.send(message)
    answer, _ = zerostall.trainer.link._exchange(channel, m.Tidy(id=7))
    assert answer == m.Done(id=7)
    assert channel.pending()
    assert [message for message, _ in channel.receive()] == events
    assert not channel.pending()
    channel.close()
    agent.close()
