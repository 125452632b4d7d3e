"""The agent as a process: seals, trickles, survives its trainer, hands over, reclaims, leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hand import LAYOUT, RULES, HandTrainer, close_all, kill_agent, visit, wait_until
from images import HandMade, make_layout, record_of
from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.candidates import Past
from zerostall.errors import CapacityError, RunBusyError, RunMismatchError, StorageError, ZerostallError
from zerostall.tiers.disk import DiskTier
from zerostall.wire import messages as m
from zerostall.wire import rendezvous
from zerostall.wire.channel import ClosedError


@pytest.fixture(autouse=True)
def close_channels() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def folder(own_agent: Path) -> Path:
    return own_agent


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_sealed_image_is_clean_in_host_memory_and_soon_on_disk(folder: Path, where: Path) -> None:
    trainer = HandTrainer(folder, where)
    trainer.lease()
    made = trainer.seal(5)
    trainer.hear(m.Reached, step=5, tier="host")
    trainer.hear(m.Reached, step=5, tier="disk")
    assert trainer.copies() == {(5, "host", True), (5, "disk", True)}
    assert trainer.fetch(5, "host") == made.bytes
    assert trainer.fetch(5, "disk") == made.bytes


def test_the_next_trainer_finds_the_image_of_a_dead_one(folder: Path, where: Path) -> None:
    first = HandTrainer(folder, where)
    first.lease()
    made = first.seal(5)
    first.hear(m.Reached, step=5, tier="host")
    first.leave()
    second = HandTrainer(folder, where)
    assert second.welcome.steps == (5,)
    assert second.fetch(5, "host") == made.bytes
    second.lease()
    second.seal(6)
    second.hear(m.Reached, step=6, tier="host")
    assert second.fetch(5, "host") == made.bytes  # the step before is still whole


def test_a_capture_that_was_never_sealed_is_nobodys(folder: Path, where: Path) -> None:
    first = HandTrainer(folder, where)
    first.lease()
    slot = first.hear(m.Granted).slot
    assert first.segment is not None
    first.segment.view(slot * first.stride, 100)[:] = b"x" * 100
    first.leave()
    second = HandTrainer(folder, where)
    assert (second.welcome.steps, second.copies()) == ((), set())


def test_a_revoked_replacement_leaves_the_step_on_disk(folder: Path, where: Path) -> None:
    trainer = HandTrainer(folder, where)
    trainer.lease()
    good = trainer.seal(5)
    trainer.hear(m.Reached, step=5, created=good.created, tier="disk")
    torn = trainer.seal(5, seed=77)
    trainer.channel.send(m.Revoked(step=5, created=torn.created, reason="torn"))
    trainer.ask(m.Tidy(id=9))
    assert trainer.copies() == {(5, "disk", True)}
    assert trainer.fetch(5, "disk") == good.bytes


def test_a_past_that_was_left_is_not_gone_back_to_before_the_next_step_is_on_disk(folder: Path, where: Path) -> None:
    """The trainer may die then, and the disk still has the step that training went back from."""
    trainer = HandTrainer(folder, where, rules=m.Rules(keep_last=3, disk_interval=3600.0))
    trainer.lease()
    for step in (3, 5):
        left = trainer.seal(step, promise=True)
        trainer.hear(m.Reached, step=step, tier="disk")
    trainer.seal(4, seed=50, aside=(Past(5, left.created),))
    trainer.hear(m.Reached, step=4, tier="host")
    found = trainer.ask(m.Find(id=4)).copies
    assert {copy.step for copy in found if copy.clean} == {3, 4}
    assert [copy.reason for copy in found if copy.step == 5] == ["training went back before it: step 4 was saved later"]


def test_what_was_said_of_a_revoked_image_is_not_meant_for_the_next_of_its_number(folder: Path, where: Path) -> None:
    trainer = HandTrainer(folder, where)
    trainer.lease()
    torn = trainer.seal(5)
    trainer.channel.send(m.Revoked(step=5, created=torn.created, reason="torn"))
    trainer.channel.send(m.Promise(step=5, created=torn.created))
    good = trainer.seal(5, seed=77)
    trainer.hear(m.Replaced, step=5, created=torn.created, tier="disk")
    trainer.hear(m.Reached, step=5, created=good.created, tier="disk")
    trainer.ask(m.Tidy(id=9))
    assert trainer.fetch(5, "disk") == good.bytes
    assert trainer.fetch(5, "host") == good.bytes


def test_two_trainers_on_one_run_are_told_apart(folder: Path, where: Path) -> None:
    HandTrainer(folder, where)
    with pytest.raises(RunBusyError, match=str(os.getpid())):
        HandTrainer(folder, where)


def test_two_agents_on_one_folder_are_told_apart(folder: Path, where: Path, tmp_path: Path) -> None:
    from conftest import stop_agent

    HandTrainer(folder, where)
    other = tmp_path / "other agent"
    try:
        with pytest.raises(RunBusyError, match="another agent"):
            HandTrainer(other, where)
    finally:
        stop_agent(other)


def test_runs_and_ranks_live_side_by_side(folder: Path, tmp_path: Path) -> None:
    """A step of two ranks is clean when both are sealed."""
    zero = HandTrainer(folder, tmp_path / "two", rank=0, world=2)
    one = HandTrainer(folder, tmp_path / "two", rank=1, world=2)
    alone = HandTrainer(folder, tmp_path / "one")
    for trainer in (zero, one, alone):
        trainer.lease()
    alone.seal(3)
    alone.hear(m.Reached, step=3, tier="disk")
    assert DiskTier(tmp_path / "two", native.Pool("test", 1)).steps() == []


def test_a_named_run_keeps_its_folder(folder: Path, where: Path) -> None:
    HandTrainer(folder, where, run="gpt").leave()
    with pytest.raises(RunMismatchError, match=r"'gpt'.*'bert'"):
        HandTrainer(folder, where, run="bert")
    HandTrainer(folder, where, run="gpt").leave()
    HandTrainer(folder, where).leave()


def test_host_memory_of_a_folder_that_was_removed_is_forgotten(folder: Path, where: Path) -> None:
    first = HandTrainer(folder, where)
    first.lease()
    first.seal(5)
    first.hear(m.Reached, step=5, tier="disk")
    first.leave()
    shutil.rmtree(where)
    second = HandTrainer(folder, where)
    assert (second.welcome.steps, second.copies()) == ((), set())
    assert second.welcome.run_id != first.welcome.run_id
    second.lease()
    second.seal(1)
    second.hear(m.Reached, step=1, tier="disk")


def test_a_folder_that_cannot_be_written_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file"):
        HandTrainer(folder, tmp_path / "file" / "run")


def test_memory_over_the_budget_is_refused_with_numbers(
    folder: Path, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROSTALL_HOST_BUDGET", "4M")
    trainer = HandTrainer(folder, where)
    with pytest.raises(CapacityError, match="4194304"):
        trainer.lease()
    trainer.lease(make_layout(1000))


def test_memory_of_runs_without_a_trainer_is_taken_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROSTALL_HOST_BUDGET", "16M")
    first = HandTrainer(folder, tmp_path / "first")
    first.lease()
    first.seal(1)
    first.hear(m.Reached, step=1, tier="disk")
    first.leave()
    second = HandTrainer(folder, tmp_path / "second")
    second.lease()
    third = HandTrainer(folder, tmp_path / "third")
    with pytest.raises(CapacityError):
        third.lease()
    again = HandTrainer(folder, tmp_path / "first")
    assert again.copies() == {(1, "disk", True)}


def test_a_hostile_message_costs_only_its_own_connection(folder: Path, where: Path) -> None:
    good = HandTrainer(folder, where)
    good.lease()
    bad = visit(folder)
    assert bad is not None
    bad.socket.sendall(b"\xff" * 64)
    with pytest.raises(ClosedError):
        bad.receive()
    for path in ("relative/path", "/x"):
        tool = visit(folder)
        assert tool is not None
        tool.send(m.Hello(id=1, protocol=m.PROTOCOL, pid=1, where=path.encode(), rank=5, world=2, rules=RULES))
        ((answer, _),) = tool.receive()
        assert isinstance(answer, m.Refused)
        tool.close()
    good.seal(1)
    good.hear(m.Reached, step=1, tier="disk")


def test_the_agent_goes_away_when_idle(agent_environment: dict[str, str], where: Path, monkeypatch) -> None:
    folder = Path(agent_environment["ZEROSTALL_RUNTIME_DIR"])
    monkeypatch.setenv("ZEROSTALL_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("ZEROSTALL_AGENT_IDLE", "1")
    HandTrainer(folder, where)
    time.sleep(2.0)
    assert visit(folder) is not None  # a trainer is attached: it stays
    close_all()
    wait_until(lambda: not rendezvous.socket_path(folder).exists())
    assert visit(folder) is None


def test_an_agent_that_was_killed_is_replaced_and_its_folder_usable(folder: Path, where: Path) -> None:
    first = HandTrainer(folder, where)
    first.lease()
    first.seal(1)
    first.hear(m.Reached, step=1, tier="disk")
    kill_agent(folder)
    with pytest.raises(ClosedError):
        while True:
            first.channel.receive()
    second = HandTrainer(folder, where)
    assert second.copies() == {(1, "disk", True)}


def test_a_new_agent_adopts_memory_with_what_it_holds(folder: Path, where: Path) -> None:
    first = HandTrainer(folder, where)
    first.lease()
    made = first.seal(1)
    first.hear(m.Reached, step=1, tier="disk")
    kept = first.segment
    assert kept is not None
    kill_agent(folder)
    second = HandTrainer(folder, where)
    record = manifests.encode_record(record_of(LAYOUT, made.bytes, 1, run=second.welcome.run_id))
    second.ask(
        m.Adopt(
            id=3,
            layout=layouts.encode(LAYOUT),
            slots=3,
            images=(m.Sealed(slot=0, record=record),),
            busy_slot=1,
        ),
        kept.fileno(),
    )
    assert second.copies() == {(1, "host", True), (1, "disk", True)}
    assert second.fetch(1, "host") == made.bytes


def test_steps_are_replaced_in_memory_when_the_disk_is_slow_and_said_so(folder: Path, where: Path) -> None:
    trainer = HandTrainer(folder, where)
    trainer.lease()
    for step in range(1, 21):
        trainer.seal(step)
    reached = {e.step for e in trainer.events if isinstance(e, m.Reached) and e.tier == "disk"}
    trainer.hear(m.Reached, step=20, tier="disk")
    steps = DiskTier(where, native.Pool("test", 1)).steps()
    assert steps[-1] == 20
    assert len(steps) <= 4 and reached <= set(range(1, 21))


def test_a_lossless_run_brings_every_step_to_disk(folder: Path, where: Path) -> None:
    trainer = HandTrainer(folder, where, rules=m.Rules(keep_last=100, lossless=True))
    trainer.lease()
    for step in range(1, 13):
        trainer.seal(step)
    trainer.hear(m.Reached, step=12, tier="disk")
    assert DiskTier(where, native.Pool("test", 1)).steps() == list(range(1, 13))


def test_an_image_damaged_in_memory_never_gets_to_disk(folder: Path, where: Path) -> None:
    trainer = HandTrainer(folder, where)
    trainer.lease()
    granted = trainer.hear(m.Granted)
    slot = granted.slot
    made = HandMade(LAYOUT, 1)
    assert trainer.segment is not None
    trainer.segment.view(slot * trainer.stride, LAYOUT.nbytes)[:] = made.bytes
    trainer.segment.view(slot * trainer.stride + LAYOUT.nbytes - 1, 1)[0] ^= 1
    record = manifests.encode_record(record_of(LAYOUT, made.bytes, 1, run=trainer.welcome.run_id))
    trainer.channel.send(m.Sealed(slot=slot, record=record, grant=granted.number))
    failed = trainer.hear(m.Failed)
    assert (failed.step, failed.kind) == (1, "CorruptError")
    assert DiskTier(where, native.Pool("test", 1)).steps() == []


def test_the_agent_never_imports_torch_or_numpy_nor_what_only_clusters_and_stores_need() -> None:
    heavy = ("torch", "numpy", "ssl", "http.client", "zerostall.agent.replication", "zerostall.tiers.s3")
    code = f"import sys, zerostall.agent.__main__; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nobody_else_may_enter_the_runtime_folder(folder: Path, where: Path) -> None:
    HandTrainer(folder, where)
    assert folder.stat().st_mode & 0o077 == 0
    assert rendezvous.socket_path(folder).stat().st_mode & 0o077 == 0
    folder.chmod(0o755)
    with pytest.raises(ZerostallError, match="entered by others"):
        rendezvous.private_folder(folder)
