"""Replicas: an image also lives in another node's memory, and a trainer whose node was lost gets it from there."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from cluster import QUICK, SECONDS, Agents, Manager, joined, only_in_memory, until_replicated
from hand import HandTrainer, close_all, kill_agent, wait_until
from images import HandMade
from zerostall import Checkpointer, native
from zerostall.agent.pulling import pull
from zerostall.errors import SnapshotNotFoundError
from zerostall.wire import cluster as w
from zerostall.wire import messages as m
from zerostall.wire import peers as p
from zerostall.wire import token

pytestmark = pytest.mark.timeout(300)  # several agents and trainers start in each


def left_by_a_lost_node(manager: Manager, folders: dict[str, Path], where: Path, step: int) -> HandMade:
    """A step that n1 has sealed before it was killed: all that is left of it is in another node's memory."""
    trainer = HandTrainer(folders["n1"], where)
    trainer.lease()
    made = trainer.seal(step, promise=True)
    until_replicated(manager, step)
    trainer.leave()
    kill_agent(folders["n1"])
    only_in_memory(where)
    return made


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


@pytest.mark.parametrize(("transport", "by"), [("nixl", "UCX over TCP"), ("shm", "shared memory")])
def test_images_go_through_nixl_where_it_is_asked_for(
    manager: Manager, agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, by: str
) -> None:
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed")
    monkeypatch.setenv("ZEROSTALL_TRANSPORT", transport)
    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    made = left_by_a_lost_node(manager, folders, where, 5)
    again = HandTrainer(folders["n2"], where)
    assert (5, "replica", True) in again.copies()
    assert again.fetch(5, "replica") == made.bytes
    log = (folders["n2"] / "agent.log").read_text()
    assert f"images go to other nodes through NIXL: ZEROSTALL_TRANSPORT says so; {by}" in log
    assert ("UCX listens over TCP" in log) == (transport == "nixl")
    assert "by plain TCP" not in log


def test_another_node_brings_it_from_the_one_that_keeps_it(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    made = left_by_a_lost_node(manager, folders, where, 6)
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


def address_of(manager: Manager, asker: str, run: str, node: str, tier: str, step: int) -> str:
    """Where other agents fetch that copy; "" while it is not known."""
    link = manager.link()
    try:
        located = link.post("whereis", w.WhereIs(node=asker, run=run, rank=0), w.Located)
    finally:
        link.close()
    found = [c for c in located.copies if (c.peer.node, c.tier, c.step) == (node, tier, step)]
    return found[0].peer.address if found else ""


def pulled(manager: Manager, address: str, run: str, step: int, nbytes: int) -> bytes:
    """The image as another agent gets it from that one."""
    target = native.Segment("target", -(-nbytes // 4096) * 4096)
    request = p.Pull(run, 0, step)
    secret = token.read(manager.token_file)
    pull(address, "test", secret, request, lambda layout, record: target.view, stopping=lambda _: False)
    return bytes(target.view(0, nbytes))


def test_a_damaged_replica_is_made_again_from_a_good_copy(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    trainer = HandTrainer(folders["n1"], where)
    trainer.lease()
    made = trainer.seal(5)
    until_replicated(manager, 5)
    run = trainer.welcome.run_id
    address = address_of(manager, "n1", run, "n2", "replica", 5)
    assert pulled(manager, address, run, 5, len(made.bytes)) == made.bytes

    trainer.leave()  # so that the folder is free for one that looks at the replica from n2
    looker = HandTrainer(folders["n2"], where)
    assert (5, "replica", True) in looker.copies()
    fetched, fds = looker.ask_for_memory(m.Fetch(id=5, step=5, tier="replica"))
    os.pwrite(fds[0], bytes([made.bytes[-1] ^ 1]), fetched.offset + len(made.bytes) - 1)
    looker.channel.send(m.Release())
    for fd in fds:
        os.close(fd)
    looker.leave()

    def good_again() -> bool:
        """It is damaged until somebody, a puller or scrubbing, has found it and it is made again."""
        try:
            return pulled(manager, address, run, 5, len(made.bytes)) == made.bytes
        except SnapshotNotFoundError:
            return False

    wait_until(good_again, SECONDS)
    wait_until(lambda: "step 5 of rank 0 in memory is damaged" in (folders["n2"] / "agent.log").read_text(), SECONDS)


@pytest.mark.parametrize("manager", [QUICK], indirect=True, ids=["quick"])
def test_a_spare_node_gets_the_step_to_go_back_to_into_its_memory(
    manager: Manager, agents: Agents, tmp_path: Path
) -> None:
    """The one that keeps the replica trains something else; the spare one fetches it before anybody asks."""
    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    other = HandTrainer(folders["n2"], tmp_path / "other run")
    other.lease()
    other.seal(1)
    trainer = HandTrainer(folders["n1"], where)
    trainer.lease()
    made = trainer.seal(5)
    run = trainer.welcome.run_id
    wait_until(lambda: address_of(manager, "n1", run, "n2", "replica", 5) != "", SECONDS)
    trainer.leave()
    kill_agent(folders["n1"])
    manager.until_health("n1", "lost")
    folders |= joined(manager, agents, "n3")
    wait_until(lambda: address_of(manager, "n2", run, "n3", "replica", 5) != "", SECONDS)
    only_in_memory(where)
    kill_agent(folders["n2"])
    again = HandTrainer(folders["n3"], where)
    assert 5 in {step for step, tier, _ in again.copies() if tier == "replica"}
    assert again.fetch(5, "replica") == made.bytes


def test_another_nodes_disk_is_a_tier_too(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    """What is no longer in any memory is given from the disk of the node that has it."""
    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    trainer = HandTrainer(folders["n1"], where, rules=m.Rules(keep_last=9999))  # however many get to disk, 4 stays
    trainer.lease()
    made = trainer.seal(4, promise=True)
    run = trainer.welcome.run_id
    wait_until(lambda: address_of(manager, "n2", run, "n1", "disk", 4) != "", SECONDS)
    newer = itertools.count(5)

    def gone() -> bool:
        """It makes room once it has got to the other node."""
        trainer.seal(next(newer))
        return (4, "host", True) not in trainer.copies()

    wait_until(gone, SECONDS)
    address = address_of(manager, "n2", run, "n1", "disk", 4)
    assert pulled(manager, address, run, 4, len(made.bytes)) == made.bytes
