"""A run on several nodes, each with a folder of its own: each keeps its ranks' images, and all make up a step."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import zerostall
from benchmarks.namespaces import missing
from cluster import QUICK, SECONDS, Agents, Manager, joined
from hand import RULES, HandTrainer, close_all, kill_agent, wait_until
from images import HandMade
from ranks.world import StartOn
from zerostall import native
from zerostall.core.heirs import Holding, elder
from zerostall.errors import RunMismatchError
from zerostall.tiers.holding import holding_of
from zerostall.wire import cluster as w
from zerostall.wire import messages as m

pytestmark = pytest.mark.timeout(300)  # several agents and trainers start in each
STEP = "step-000000000005"


def folder_of(tmp_path: Path, name: str) -> Path:
    return tmp_path / f"disk of {name}" / "run"


def member(folder: Path, where: Path, rank: int, meeting: m.Meeting | None, held: Holding | None = None) -> HandTrainer:
    """A rank of two, the only one on its node."""
    nodes = m.Nodes(here=(rank,), host="127.0.0.1", meeting=meeting, elder=held)
    trainer = HandTrainer(folder, where, rank=rank, world=2, rules=RULES, nodes=nodes)
    trainer.channel.send(m.Begin(epoch=1))
    return trainer


def two(agents: Agents, tmp_path: Path, *names: str) -> list[HandTrainer]:
    """Rank 0 on the first of these nodes, rank 1 on the other."""
    held = elder([holding_of(folder_of(tmp_path, name)) for name in names], "").holding
    first = member(agents(names[0]), folder_of(tmp_path, names[0]), 0, None, held)
    return [first, member(agents(names[1]), folder_of(tmp_path, names[1]), 1, first.welcome.meeting, held)]


def on_disk(manager: Manager, run: str, rank: int, step: int = 5) -> set[str]:
    """The nodes that have the rank's image on a disk."""
    link = manager.link()
    try:
        located = link.post("whereis", w.WhereIs("nobody", run, rank, step), w.Located)
    finally:
        link.close()
    return {copy.peer.node for copy in located.copies if copy.tier in ("disk", "partner") and copy.clean}


def saved(agents: Agents, tmp_path: Path, *names: str) -> tuple[str, list[HandMade]]:
    """The run, and the images of its step 5, which is on the disks of both nodes."""
    trainers = two(agents, tmp_path, *names)
    run = trainers[0].welcome.run_id
    assert trainers[1].welcome.run_id == run
    made: list[HandMade] = []
    for trainer in trainers:
        trainer.lease()
        made.append(trainer.seal(5, seed=trainer.rank, promise=True, epoch=1))
    for trainer in trainers:
        trainer.hear(m.Reached, tier="disk", step=5)
    wait_until(lambda: (folder_of(tmp_path, names[1]) / STEP / "manifest.json").exists(), SECONDS)
    return run, made


def end(tmp_path: Path, *names: str) -> None:
    """Nothing of it is in memory any more."""
    for name in names:
        kill_agent(tmp_path / name)
    close_all()


def chunk(trainer: HandTrainer, rank: int, tier: str, nbytes: int) -> tuple[bytes, str]:
    """The whole image of a rank, as a restore of several ranks fetches it; and where it came from."""
    request = m.Fetch(id=9, step=5, tier=tier, rank=rank, chunks=(0,))
    fetched, fds = trainer.ask_for_memory(request)
    segment = native.Segment.attach(fds[0], fetched.memory.nbytes)
    data = bytes(segment.view(fetched.offset, nbytes))
    segment.close()
    trainer.channel.send(m.Release())
    return data, fetched.source


@pytest.mark.parametrize("manager", [QUICK], indirect=True, ids=["quick"])
def test_each_node_keeps_its_own_and_all_come_back_from_disk(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    joined(manager, agents, "n1", "n2")
    run, made = saved(agents, tmp_path, "n1", "n2")
    steps = [folder_of(tmp_path, name) / STEP for name in ("n1", "n2")]
    for rank, step in enumerate(steps):
        assert [path.name for path in step.glob("*.safetensors")] == [f"rank-0000{rank}.safetensors"]
        assert (step / f"rank-0000{rank}.safetensors").read_bytes() == made[rank].bytes
    assert steps[0].joinpath("manifest.json").read_bytes() == steps[1].joinpath("manifest.json").read_bytes()
    (alone,) = zerostall.snapshots(steps[1].parent)
    assert not alone.clean
    assert "images of 1 ranks, rank 0 the first, are on other nodes" in alone.reason

    end(tmp_path, "n1", "n2")
    whole = steps[1].joinpath("manifest.json").read_bytes()
    for name in ("manifest.json", "ranks.json"):
        steps[1].joinpath(name).unlink()  # as where the agent died before it heard that the step is committed
    never = steps[1].parent / "step-000000000009"
    shutil.copytree(steps[1], never)  # and one that no node has committed
    trainers = two(agents, tmp_path, "n1", "n2")
    assert (5, "disk", True) in trainers[1].copies()  # nobody is told of copies before what was put is settled
    assert not never.exists()
    assert steps[1].joinpath("manifest.json").read_bytes() == whole
    wait_until(lambda: (on_disk(manager, run, 0), on_disk(manager, run, 1)) == ({"n1"}, {"n2"}), SECONDS)
    for trainer in trainers:
        assert trainer.welcome.run_id == run
        assert trainer.copies() == {(5, "disk", True)}
        described = trainer.ask(m.Describe(id=8, step=5, tier="disk"))
        assert len(described.records) == 2
        for rank in (0, 1):
            data, source = chunk(trainer, rank, "disk", len(made[rank].bytes))
            assert data == made[rank].bytes
            assert source == ("" if rank == trainer.rank else "partner")
        trainer.channel.send(m.Release())


@pytest.mark.parametrize("manager", [QUICK], indirect=True, ids=["quick"])
def test_what_was_put_is_committed_though_rank_0_comes_to_its_node(
    manager: Manager, agents: Agents, tmp_path: Path
) -> None:
    """The other one had rank 0 and has committed the step; here the agent died before it heard that."""
    joined(manager, agents, "n1", "n2")
    run, _ = saved(agents, tmp_path, "n1", "n2")
    end(tmp_path, "n1", "n2")
    put = folder_of(tmp_path, "n2") / STEP
    whole = (put / "manifest.json").read_bytes()
    for name in ("manifest.json", "ranks.json"):
        (put / name).unlink()
    unknown = put.parent / "step-000000000009"
    shutil.copytree(put, unknown)  # nobody can say whether that is committed somewhere
    trainers = two(agents, tmp_path, "n2", "n1")
    assert trainers[0].welcome.run_id == run
    for trainer in trainers:
        assert any(step == 5 and clean for step, _, clean in trainer.copies())
    assert (put / "manifest.json").read_bytes() == whole
    assert unknown.exists()
    wait_until(lambda: (on_disk(manager, run, 0), on_disk(manager, run, 1)) == ({"n1"}, {"n2"}), SECONDS)


@pytest.mark.parametrize("manager", [QUICK], indirect=True, ids=["quick"])
@pytest.mark.parametrize(
    ("lost", "stays"), [(0, True), (0, False), (1, False)], ids=["rank 0's node", "rank 0's node, all anew", "a node"]
)
def test_a_node_that_is_lost_with_its_disk_is_replaced(
    manager: Manager, agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int, stays: bool
) -> None:
    """Its image is on its partner's disk. All memory is lost, too, unless the other one `stays`. The run has no name:
    what tells rank 0's node of it is its partner's folder.
    """
    for name in ("n1", "n2"):
        monkeypatch.setenv("ZEROSTALL_REPLICA_DISK", str(tmp_path / f"replicas of {name}"))
        joined(manager, agents, name)
    run, made = saved(agents, tmp_path, "n1", "n2")
    wait_until(lambda: on_disk(manager, run, lost) == {"n1", "n2"}, SECONDS)
    names = ["n1", "n2"]
    end(tmp_path, *(names[:1] if stays else names))
    shutil.rmtree(folder_of(tmp_path, names[lost]).parent)
    monkeypatch.setenv("ZEROSTALL_REPLICA_DISK", str(tmp_path / f"replicas of {names[1 - lost]}"))
    joined(manager, agents, names[1 - lost])
    monkeypatch.setenv("ZEROSTALL_REPLICA_DISK", str(tmp_path / "replicas of n3"))
    joined(manager, agents, "n3")
    manager.until_health(names[lost], "lost")
    names[lost] = "n3"
    trainers = two(agents, tmp_path, *names)
    assert {trainer.welcome.run_id for trainer in trainers} == {run}
    wait_until(lambda: all((5, True) in {(s, c) for s, _, c in trainer.copies()} for trainer in trainers), SECONDS)
    new = trainers[lost]
    assert (5, "replica", True) in new.copies()
    assert new.fetch(5, "replica") == made[lost].bytes
    new.ask(m.Describe(id=8, step=5, tier="replica"))
    for rank in (0, 1):
        data, _ = chunk(new, rank, "replica", len(made[rank].bytes))
        assert data == made[rank].bytes


def test_two_folders_need_a_cluster(agents: Agents, own_agent: Path, tmp_path: Path, manager: Manager) -> None:
    """Without it the images of one node never get to another."""
    first = member(agents("n1"), folder_of(tmp_path, "n1"), 0, None)
    for name in ("ZEROSTALL_MANAGER", "ZEROSTALL_PEER"):
        pytest.MonkeyPatch().delenv(name, raising=False)
    pytest.MonkeyPatch().setenv("ZEROSTALL_RUNTIME_DIR", str(own_agent))
    with pytest.raises(RunMismatchError, match=r"is not the folder of rank 0's node.*belong to a cluster"):
        member(own_agent, folder_of(tmp_path, "n2"), 1, first.welcome.meeting)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize(
    "lost", [pytest.param(False, marks=pytest.mark.long), True], ids=["all there", "rank 0's is lost"]
)
def test_training_without_a_shared_folder_goes_on_from_its_disks(
    start_on: StartOn, manager: Manager, tmp_path: Path, lost: bool
) -> None:
    """DistributedDataParallel: what is alike on both ranks is stored once, so both need both images.

    Where rank 0's folder is lost, the other's tells of the run, which has no name, and has that rank's image.
    """
    if lost:
        (tmp_path / "run of 1, others' images").mkdir()
    ranks = start_on(("n1", "n2"), "stay_apart", 6)
    ends = [tmp_path / f"run of {node}" / "step-000000000006" / "manifest.json" for node in (0, 1)]
    wait_until(lambda: all(path.exists() for path in ends), SECONDS)
    held = holding_of(ends[0].parent.parent)
    assert held is not None
    wait_until(lambda: not lost or "n2" in on_disk(manager, held.facts.run, 0, 6), SECONDS)
    ranks.kill()
    for name in ("n1", "n2"):
        kill_agent(tmp_path / name)
    if lost:
        shutil.rmtree(ends[0].parent.parent)
    said = start_on(("n1", "n2"), "resume_apart", attempt=2).wait()
    tiers = [re.findall(r"goes on from 6 (\w+)", text) for text in said]
    # An image on a partner's disk may have been brought to some node's memory by now.
    assert all(tier in ([["partner"], ["replica"], ["disk"]] if lost else [["disk"]]) for tier in tiers), said
    assert not lost or tiers[0] != ["disk"], said
    assert all("ended bit for bit" in text for text in said)
    for path in ends:
        there = holding_of(path.parent.parent)
        assert there is not None and there.facts.run == held.facts.run
