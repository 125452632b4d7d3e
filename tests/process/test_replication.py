"""Replicas: an image also lives in another node's memory, and a trainer whose node was lost gets it from there."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from cluster import QUICK, SECONDS, Agents, Manager
from hand import HandTrainer, close_all, kill_agent, wait_until
from zerostall import Checkpointer
from zerostall.errors import SnapshotNotFoundError
from zerostall.wire import messages as m


def until_replicated(manager: Manager, step: int, ranks: int = 1) -> None:
    def there() -> bool:
        run = manager.run()
        found = next((s for s in run.snapshots if s.step == step), None) if run else None
        return found is not None and found.tiers.get("replica") == ranks

    wait_until(there, SECONDS)


def only_in_memory(where: Path) -> None:
    """The disk has lost its steps."""
    for folder in where.glob("step-*"):
        shutil.rmtree(folder)


def joined(manager: Manager, agents: Agents, *names: str) -> dict[str, Path]:
    """Agents of these nodes, all of them known to the manager; this process uses the last one's."""
    folders = {}
    for name in names:
        folders[name] = agents(name)
        from zerostall.wire import rendezvous

        rendezvous.connect_or_start(folders[name]).close()
    for name in names:
        manager.until_health(name, "alive")
    return folders


def test_an_image_lives_on_when_its_node_is_lost(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    trainer = HandTrainer(folders["n1"], where)
    trainer.lease()
    trainer.seal(4)
    made = trainer.seal(5, promise=True)
    until_replicated(manager, 5)
    assert manager.node("n2").replicas >= 1
    trainer.leave()
    kill_agent(folders["n1"])
    only_in_memory(where)

    again = HandTrainer(folders["n2"], where)
    assert (5, "replica", True) in again.copies()
    assert again.fetch(5, "replica") == made.bytes
    with pytest.raises(SnapshotNotFoundError):
        again.fetch(4000, "replica")


def test_images_go_through_nixl_where_it_is_asked_for(
    manager: Manager, agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed")
    monkeypatch.setenv("ZEROSTALL_TRANSPORT", "nixl")
    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    trainer = HandTrainer(folders["n1"], where)
    trainer.lease()
    made = trainer.seal(5, promise=True)
    until_replicated(manager, 5)
    trainer.leave()
    kill_agent(folders["n1"])
    only_in_memory(where)
    again = HandTrainer(folders["n2"], where)
    assert (5, "replica", True) in again.copies()
    assert again.fetch(5, "replica") == made.bytes
    log = (folders["n2"] / "agent.log").read_text()
    assert "images go to other nodes through NIXL: ZEROSTALL_TRANSPORT says so" in log
    assert "by plain TCP" not in log


def test_another_node_brings_it_from_the_one_that_keeps_it(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    trainer = HandTrainer(folders["n1"], where)
    trainer.lease()
    made = trainer.seal(6, promise=True)
    until_replicated(manager, 6)
    trainer.leave()
    kill_agent(folders["n1"])
    only_in_memory(where)
    folders |= joined(manager, agents, "n3")
    again = HandTrainer(folders["n3"], where)
    assert (6, "replica", True) in again.copies()
    assert again.fetch(6, "replica") == made.bytes


def test_what_a_run_goes_back_from_is_nowhere_any_more(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    from zerostall.core.candidates import Past

    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    trainer = HandTrainer(folders["n1"], where)
    trainer.lease()
    trainer.seal(5)
    gone = trainer.seal(9)
    until_replicated(manager, 9)
    made = trainer.seal(6, seed=60, aside=(Past(9, gone.created),))
    until_replicated(manager, 6)
    wait_until(lambda: 9 not in {snapshot.step for snapshot in manager.run().snapshots}, SECONDS)
    trainer.leave()
    kill_agent(folders["n1"])
    only_in_memory(where)
    again = HandTrainer(folders["n2"], where)
    assert max(again.copies())[:2] == (6, "replica")
    assert again.fetch(6, "replica") == made.bytes


def test_what_is_dirty_after_all_is_nowhere_any_more(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    folders = joined(manager, agents, "n1", "n2")
    trainer = HandTrainer(folders["n1"], tmp_path / "run")
    trainer.lease()
    made = trainer.seal(5)
    until_replicated(manager, 5)
    trainer.channel.send(m.Revoked(step=5, created=made.created, reason="torn after all"))
    wait_until(lambda: manager.node("n2").replicas == 0, SECONDS)


@pytest.mark.parametrize("manager", [QUICK], indirect=True, ids=["quick"])
def test_a_lost_nodes_image_is_fetched_before_anybody_asks(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    """Its replica is on one node; of the two that are left, a spare one is to have it in memory."""
    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    trainer = HandTrainer(folders["n1"], where)
    trainer.lease()
    trainer.seal(5, promise=True)
    until_replicated(manager, 5)
    trainer.leave()
    kill_agent(folders["n1"])
    manager.until_health("n1", "lost")
    wait_until(lambda: any(event.kind == "rollback" for event in manager.state().events), SECONDS)
    manager.until_clean(5)
    wait_until(lambda: (run := manager.run()) is not None and not run.waiting, SECONDS)
    again = HandTrainer(folders["n2"], where)
    assert (5, "replica", True) in again.copies()


def test_a_checkpointer_restores_from_another_nodes_memory(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    where = tmp_path / "run"
    folders = joined(manager, agents, "n2", "n1")
    state = {"weights": np.arange(100_000, dtype=np.float32)}
    with Checkpointer(where, model=state) as ckpt:
        state["weights"][:] = 7.0
        ckpt.save(3).wait(tier="disk", timeout=SECONDS)
        until_replicated(manager, 3)
    kill_agent(folders["n1"])
    close_all()
    only_in_memory(where)
    agents("n2")
    state["weights"][:] = 0.0
    with Checkpointer(where, model=state) as ckpt:
        assert ckpt.restore() == 3
        assert ckpt.stats.restored_from == "replica"
    assert (state["weights"] == 7.0).all()


def test_two_ranks_on_two_nodes_each_find_their_own(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    """A step of two ranks is clean when both are sealed, and each rank's image is brought for itself."""
    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    trainers = [HandTrainer(folders["n1"], where, rank=rank, world=2) for rank in range(2)]
    made = []
    for rank, trainer in enumerate(trainers):
        trainer.lease()
        made.append(trainer.seal(5, seed=rank, epoch=1))
    manager.until_clean(5)
    until_replicated(manager, 5, ranks=2)
    for trainer in trainers:
        trainer.leave()
    kill_agent(folders["n1"])
    only_in_memory(where)
    for rank in range(2):
        again = HandTrainer(folders["n2"], where, rank=rank, world=2)
        assert (5, "replica", True) in again.copies()
        assert again.fetch(5, "replica") == made[rank].bytes
