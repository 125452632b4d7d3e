"""Several nodes, each in a network namespace: what is killed, cut off, stopped or slowed, and training goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import Network, missing
from benchmarks.nodes import Cluster, undisturbed, until

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

GIGABYTES = 0.004
# Heartbeats come often and silence is short, so that a test need not wait; each node that is to live is given time.
QUICK = ("--interval", "0.2", "--suspect-after", "2", "--lost-after", "4")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(Network(), tmp_path, "n1", "n2", "n3", options=QUICK, budget="256M")
    yield found
    found.close()


def replicated(cluster: Cluster, step: int) -> bool:
    run = cluster.run()
    return run is not None and any(s.step >= step and s.tiers.get("replica") for s in run.snapshots)


def target(cluster: Cluster) -> int:
    run = cluster.run()
    return run.target or 0 if run is not None else 0


def test_training_goes_on_whatever_happens_to_nodes(cluster: Cluster, tmp_path: Path) -> None:
    where = tmp_path / "run"
    for name in cluster.nodes:
        cluster.start_agent(name)
    trainer = cluster.train("n1", where, GIGABYTES)
    assert trainer.until("restored")["step"] == 0
    trainer.until("step", at_least=2)
    until(lambda: replicated(cluster, 1))

    # The node that keeps the copy is cut off: another one gets it, training knows nothing of that.
    holder = cluster.holder()
    assert holder in ("n2", "n3")
    cluster.nodes[holder].cut()
    until(lambda: cluster.health(holder) == "lost")
    reached = trainer.until("step", at_least=target(cluster) + 2)["step"]
    until(lambda: replicated(cluster, reached) and cluster.holder() not in (None, holder))
    # It comes back in a new epoch: what it said in the old one counts no longer.
    before = next(node.epoch for node in cluster.state().nodes if node.name == holder)
    cluster.nodes[holder].heal()
    until(lambda: cluster.health(holder) == "alive")
    assert next(node.epoch for node in cluster.state().nodes if node.name == holder) > before

    # The trainer's own agent stands still for longer than a node may be silent.
    agent = cluster.agent("n1")
    os.kill(agent, signal.SIGSTOP)
    until(lambda: cluster.health("n1") == "lost")
    os.kill(agent, signal.SIGCONT)
    until(lambda: cluster.health("n1") == "alive")
    now = trainer.until("step", at_least=trainer.last_step + 2)["step"]
    until(lambda: target(cluster) >= now)

    # Without a manager agents go on; a new one hears from them what there is.
    cluster.kill_manager()
    now = trainer.until("step", at_least=trainer.last_step + 2)["step"]
    cluster.start_manager()
    until(lambda: target(cluster) >= now and replicated(cluster, now))

    # A slow link holds up copies, nobody else.
    cluster.nodes["n1"].slow(megabits=8)
    trainer.until("step", at_least=trainer.last_step + 3)
    cluster.nodes["n1"].slow(megabits=10_000)

    # The trainer is killed: from this node's memory.
    died = trainer.kill()
    trainer = cluster.train("n1", where, GIGABYTES)
    restored = trainer.until("restored")
    assert restored["from"] == "host"
    assert 0 < restored["step"] <= died
    now = trainer.until("step", at_least=restored["step"] + 2)["step"]
    until(lambda: replicated(cluster, now))

    # The whole node is gone: from the memory of the one that keeps the copy.
    cluster.nodes["n1"].kill()
    died = trainer.kill()
    until(lambda: cluster.health("n1") == "lost" and target(cluster) >= now)
    holder = cluster.holder()
    assert holder is not None
    trainer = cluster.train(holder, where, GIGABYTES)
    restored = trainer.until("restored")
    assert now <= restored["step"] <= died
    assert restored["from"] in ("replica", "disk")  # whichever is newer
    last = trainer.until("step", at_least=restored["step"] + 2)
    trainer.kill()
    assert last["digest"] == undisturbed(tmp_path, GIGABYTES, last["step"])
