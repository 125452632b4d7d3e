"""The disk of another node as a tier: an image is there at its run's own pace, and outlives all memory and its node."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster import QUICK, SECONDS, Agents, Manager, joined
from hand import HandTrainer, kill_agent, wait_until
from zerostall.core.candidates import Past
from zerostall.wire import messages as m
from zerostall.wire import rendezvous

pytestmark = pytest.mark.timeout(300)  # several agents and trainers start in each


def until_at_a_partner(manager: Manager, step: int) -> None:
    def there() -> bool:
        run = manager.run()
        found = next((s for s in run.snapshots if s.step == step), None) if run else None
        return found is not None and found.tiers.get("partner") == 1

    wait_until(there, SECONDS)


def training_on_n1(manager: Manager, agents: Agents, where: Path) -> tuple[dict[str, Path], HandTrainer]:
    """A trainer that has its memory, on the first of two nodes; the folders of their agents."""
    folders = joined(manager, agents, "n1", "n2")
    trainer = HandTrainer(folders["n1"], where, rules=m.Rules(keep_last=3, disk_interval=0.0))
    trainer.lease()
    return folders, trainer


@pytest.mark.parametrize("manager", [QUICK], indirect=True, ids=["quick"])
def test_an_image_outlives_its_node_and_all_memory_on_another_nodes_disk(
    manager: Manager, agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROSTALL_REPLICA_DISK", str(tmp_path / "nvme of n2"))
    where = tmp_path / "disk of n1" / "run"
    folders, trainer = training_on_n1(manager, agents, where)
    trainer.seal(4)
    until_at_a_partner(manager, 4)
    made, run = trainer.seal(5), trainer.welcome.run_id
    until_at_a_partner(manager, 5)

    trainer.leave()
    for name in ("n1", "n2"):
        kill_agent(folders[name])
        manager.until_health(name, "lost")
    shutil.rmtree(tmp_path / "disk of n1")
    rendezvous.connect_or_start(agents("n2")).close()  # it finds on its disk what was there before it
    until_at_a_partner(manager, 5)
    joined(manager, agents, "n3")
    # The new node has a folder of its own, with nothing in it, where the lost one had the run's.
    again = HandTrainer(tmp_path / "n3", where)
    assert again.welcome.run_id == run
    assert (5, "replica", True) in again.copies()
    assert again.fetch(5, "replica") == made.bytes
    for chunks in (None, (0,)):
        fetched = again.ask(m.Fetch(id=7, step=5, tier="replica", rank=0, chunks=chunks))
        assert fetched.source == "partner"  # of memory there is none left
        again.channel.send(m.Release())
    wait_until(lambda: [event for event in manager.state().events if event.kind == "heir"], SECONDS)
    (told,) = [event.text for event in manager.state().events if event.kind == "heir"]
    assert told.startswith("an empty folder on node n3 goes on with it") and "the node that trained it is gone" in told
    again.lease()
    again.seal(6, promise=True)
    assert again.hear(m.Reached, tier="disk", step=6)
    assert where.joinpath("run.json").exists()


@pytest.mark.parametrize("manager", [QUICK], indirect=True, ids=["quick"])
def test_what_a_run_went_back_from_is_not_gone_on_with_from_a_node_that_was_away(
    manager: Manager, agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not heard of it: its disk has the step still, whole and newer by number than all that the run has."""
    monkeypatch.setenv("ZEROSTALL_REPLICA_DISK", str(tmp_path / "nvme of n2"))
    where = tmp_path / "disk of n1" / "run"
    folders, trainer = training_on_n1(manager, agents, where)
    left = trainer.seal(5, promise=True)
    until_at_a_partner(manager, 5)
    kill_agent(folders["n2"])
    manager.until_health("n2", "lost")
    trainer.seal(4, seed=50, promise=True, aside=(Past(5, left.created),))
    trainer.hear(m.Reached, tier="disk", step=4)
    trainer.leave()
    kill_agent(folders["n1"])
    rendezvous.connect_or_start(agents("n2")).close()
    until_at_a_partner(manager, 5)
    again = HandTrainer(agents("n1"), where)
    found = {(copy.step, copy.tier, copy.clean): copy.reason for copy in again.ask(m.Find(id=4)).copies}
    assert found[5, "replica", False] == "training went back before it: step 4 was saved later"
    assert found[4, "disk", True] == ""


def test_the_runs_own_policy_says_how_often(
    manager: Manager, agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROSTALL_REPLICA_DISK", str(tmp_path / "nvme"))
    folders = joined(manager, agents, "n1", "n2")
    trainer = HandTrainer(folders["n1"], tmp_path / "run", rules=m.Rules(keep_last=3, disk_interval=3600.0))
    trainer.lease()
    trainer.seal(1)
    until_at_a_partner(manager, 1)
    trainer.seal(2)
    wait_until(lambda: (run := manager.run()) is not None and run.target == 2 and run.replicated, SECONDS)
    found = manager.run()
    assert found is not None
    assert {s.step: s.tiers.get("partner", 0) for s in found.snapshots} == {2: 0, 1: 1}
