"""A run whose ranks are on several nodes, with replicas: a whole node is lost with its memory, another takes its place.

What is restored was never on disk: the images of the node that is left come from its own memory, those of the lost one
from whoever keeps them for it.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

import zerostall
from cluster import QUICK, SECONDS, Agents, Manager, until_replicated
from hand import LAYOUT, RULES, HandTrainer, kill_agent, wait_until
from images import HandMade
from ranks.world import Ranks, StartOn
from zerostall.wire import cluster as w
from zerostall.wire import messages as m
from zerostall.wire import rendezvous

pytestmark = pytest.mark.timeout(300)  # several agents and trainers start in each
REACHED = 6


def lose(ranks: Ranks, rank: int, folder: Path) -> None:
    """The rank's node goes: its trainer and its agent, and with it what is in its memory. Then the other ranks."""
    ranks.rank[rank].signal(signal.SIGSTOP)  # so that it starts no other agent
    kill_agent(folder)
    ranks.kill()


@pytest.mark.parametrize("lost", [1, 0], ids=["a node", "rank 0's node"])
def test_training_goes_on_from_memory_alone_and_ends_bit_for_bit(
    start_on: StartOn, manager: Manager, agents: Agents, tmp_path: Path, lost: int
) -> None:
    """DistributedDataParallel: what is alike on both ranks is stored once, so both need both images."""
    rendezvous.connect_or_start(agents("n3")).close()  # a spare node
    manager.until_health("n3", "alive")
    ranks = start_on(("n1", "n2"), "stay", REACHED)
    until_replicated(manager, REACHED, ranks=2)
    lose(ranks, lost, tmp_path / f"n{lost + 1}")
    assert REACHED not in {snapshot.step for snapshot in zerostall.snapshots(tmp_path / "run")}
    nodes = ("n1", "n3") if lost == 1 else ("n3", "n2")
    said = start_on(nodes, "resume", attempt=2).wait()
    tiers = [re.findall(rf"goes on from {REACHED} (\w+)", text) for text in said]
    assert tiers == ([["host"], ["replica"]] if lost == 1 else [["replica"], ["host"]]), said
    assert all("ended bit for bit" in text for text in said)


def copied(manager: Manager) -> set[int]:
    """The steps of which other nodes have both ranks' images."""
    run = manager.run()
    return {one.step for one in run.snapshots if one.tiers.get("replica") == 2} if run is not None else set()


@pytest.mark.parametrize(
    "lost",
    [pytest.param(1, id="a node"), pytest.param(0, id="rank 0's node", marks=pytest.mark.long)],
)
def test_saves_that_come_faster_than_copies_leave_one_step_that_all_can_have(
    start_on: StartOn, manager: Manager, agent_environment: dict[str, str], tmp_path: Path, lost: int
) -> None:
    """What is kept of the lost node is of a step that the other still has in memory, many saves later."""
    agent_environment["ZEROSTALL_REPLICA_RATE"] = "16K"  # about two images a second
    ranks = start_on(("n1", "n2"), "hurry", 0.03)
    first: set[int] = set()
    wait_until(lambda: first.update(copied(manager)) or first, SECONDS)
    wait_until(lambda: copied(manager) - first, SECONDS)
    lose(ranks, lost, tmp_path / f"n{lost + 1}")
    on_disk = {snapshot.step for snapshot in zerostall.snapshots(tmp_path / "run")}
    nodes = ("n1", "n3") if lost == 1 else ("n3", "n2")
    said = start_on(nodes, "hurry", 0.0, attempt=2).wait()
    found = [re.findall(r"goes on from (\d+) (\w+)", text) for text in said]
    tiers = ["host", "replica"] if lost == 1 else ["replica", "host"]
    (step,) = {int(step) for ((step, _),) in found}
    assert [tier for ((_, tier),) in found] == tiers and step > max(first) and step not in on_disk, said
    assert all("ended bit for bit" in text for text in said)


def member(folder: Path, where: Path, rank: int, meeting: m.Meeting | None) -> HandTrainer:
    """A rank of two, the only one on its node."""
    nodes = m.Nodes(here=(rank,), host="127.0.0.1", meeting=meeting)
    trainer = HandTrainer(folder, where, rank=rank, world=2, rules=RULES, nodes=nodes)
    trainer.channel.send(m.Begin(epoch=1))
    trainer.lease()
    return trainer


def holders(manager: Manager, run: str, rank: int, step: int) -> set[tuple[str, str]]:
    """The nodes, and their tiers, that have the image."""
    link = manager.link()
    try:
        located = link.post("whereis", w.WhereIs("nobody", run, rank, step), w.Located)
    finally:
        link.close()
    return {(copy.peer.node, copy.tier) for copy in located.copies}


def prefetched(manager: Manager) -> set[str]:
    return {event.text for event in manager.state().events if event.kind == "prefetch"}


@pytest.mark.parametrize("manager", [QUICK], indirect=True, ids=["quick"])
def test_what_a_lost_node_had_is_brought_to_where_its_ranks_will_be(
    manager: Manager, agents: Agents, tmp_path: Path
) -> None:
    """A spare node gets it; and so does the node itself, when it is replaced and comes up with nothing."""
    where = tmp_path / "run"
    folders = {name: agents(name) for name in ("n1",)}
    first = member(folders["n1"], where, 0, None)
    folders["n2"] = agents("n2")
    second = member(folders["n2"], where, 1, first.welcome.meeting)
    run = first.welcome.run_id
    for trainer in (first, second):
        trainer.seal(5, seed=trainer.rank, epoch=1)
    manager.until_clean(5)
    until_replicated(manager, 5, ranks=2)
    assert {("n1", "host"), ("n2", "replica")} <= holders(manager, run, 0, 5)
    assert {("n2", "host"), ("n1", "replica")} <= holders(manager, run, 1, 5)
    found = manager.run()
    assert found is not None and found.copies == (
        "n1 → n2, 1 image: another node, no rack or switch is known",
        "n2 → n1, 1 image: another node, no rack or switch is known",
    )

    kill_agent(folders["n2"])
    second.leave()
    manager.until_health("n2", "lost")
    wait_until(lambda: (run := manager.run()) is not None and run.waiting, SECONDS)
    folders["n3"] = agents("n3")
    rendezvous.connect_or_start(folders["n3"]).close()
    wait_until(lambda: ("n3", "replica") in holders(manager, run, 1, 5), SECONDS)
    to_spare = "to n3: rank 1 will ask for step 5, in place of node n2; its nearest copy is n1's replica"
    assert prefetched(manager) <= {to_spare}  # nothing, where it came there first as the copy that n2 has lost

    kill_agent(folders["n3"])
    manager.until_health("n3", "lost")
    rendezvous.connect_or_start(agents("n2")).close()
    wait_until(lambda: ("n2", "replica") in holders(manager, run, 1, 5), SECONDS)
    assert prefetched(manager) <= {to_spare, "to n2: rank 1 will ask for step 5; its nearest copy is n1's replica"}


@pytest.mark.parametrize("manager", [QUICK], indirect=True, ids=["quick"])
def test_a_manager_that_is_lost_with_a_node_knows_again_what_there_is(
    manager: Manager, agents: Agents, tmp_path: Path
) -> None:
    """Nobody tells the new one where the lost rank was: the one who keeps its image tells that it is there."""
    where = tmp_path / "run"
    first = member(agents("n1"), where, 0, None)
    lost = agents("n2")
    second = member(lost, where, 1, first.welcome.meeting)
    run = first.welcome.run_id
    for trainer in (first, second):
        trainer.seal(5, seed=trainer.rank, epoch=1)
    manager.until_clean(5)
    until_replicated(manager, 5, ranks=2)
    manager.kill()
    kill_agent(lost)
    second.leave()
    manager.start()
    manager.until_health("n1", "alive")
    wait_until(lambda: ("n1", "replica") in holders(manager, run, 1, 5), SECONDS)
    manager.until_clean(5)
    rendezvous.connect_or_start(agents("n3")).close()
    again = member(tmp_path / "n3", where, 1, first.welcome.meeting)
    wait_until(lambda: (5, "replica", True) in again.copies(), SECONDS)
    assert again.fetch(5, "replica") == HandMade(LAYOUT, 5, seed=1).bytes
