"""Several nodes, each in a network namespace: what is killed, cut off, stopped or slowed, and training goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
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

    # The trainer's own agent is killed: another one takes its memory over.
    os.kill(agent, signal.SIGKILL)
    now = trainer.until("step", at_least=trainer.last_step + 2)["step"]
    until(lambda: cluster.health("n1") == "alive" and target(cluster) >= now and replicated(cluster, now))

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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file system of its own, of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(ballast: Path) -> None:
    """Take all room that is left."""
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def trouble(cluster: Cluster, name: str) -> str:
    return next((node.error for node in cluster.state().nodes if node.name == name), "")


def newest_on_disk(cluster: Cluster) -> int:
    run = cluster.run()
    return max((s.step for s in run.snapshots if s.tiers.get("disk")), default=0) if run is not None else 0


def committed(where: Path) -> int:
    """The newest step in the folder itself; what the manager knows of it is a little behind."""
    return max(int(manifest.parent.name.removeprefix("step-")) for manifest in where.glob("step-*/manifest.json"))


def test_a_full_disk_holds_up_neither_training_nor_recovery(cluster: Cluster, small_disk: Path, tmp_path: Path) -> None:
    where, ballast = small_disk / "run", small_disk / "ballast"
    for name in ("n1", "n2"):
        cluster.start_agent(name)
    trainer = cluster.train("n1", where, GIGABYTES)
    trainer.until("step", at_least=2)
    until(lambda: newest_on_disk(cluster) >= 1)
    fill(ballast)

    def is_full() -> bool:
        """A write has failed, none is under way that could give room back, and no other one can get far."""
        fill(ballast)
        whole = all((folder / "manifest.json").exists() for folder in where.glob("step-*"))
        left = os.statvfs(small_disk)
        return whole and left.f_bavail * left.f_bsize < 1 << 20 and "No space left" in trouble(cluster, "n1")

    until(is_full)
    stuck = committed(where)

    # Memory is enough, of this node and of the other one.
    now = trainer.until("step", at_least=trainer.last_step + 3)["step"]
    until(lambda: target(cluster) >= now and replicated(cluster, now))
    died = trainer.kill()
    trainer = cluster.train("n1", where, GIGABYTES)
    restored = trainer.until("restored")
    assert restored["from"] == "host"
    assert now <= restored["step"] <= died
    now = trainer.until("step", at_least=restored["step"] + 2)["step"]
    until(lambda: replicated(cluster, now))
    assert committed(where) == stuck < now

    # The node is gone, its disk is full still: only the other one's memory is new enough.
    cluster.nodes["n1"].kill()
    died = trainer.kill()
    until(lambda: cluster.health("n1") == "lost" and target(cluster) >= now)
    trainer = cluster.train("n2", where, GIGABYTES)
    restored = trainer.until("restored")
    assert restored["from"] == "replica"
    assert now <= restored["step"] <= died

    # Room again, and the newest step gets there by itself.
    ballast.unlink()
    now = trainer.until("step", at_least=restored["step"] + 2)["step"]
    until(lambda: newest_on_disk(cluster) >= now and trouble(cluster, "n2") == "")
    last = trainer.until("step", at_least=now)
    trainer.kill()
    assert last["digest"] == undisturbed(tmp_path, GIGABYTES, last["step"])


def test_the_old_half_of_a_split_brain_is_fenced(cluster: Cluster, tmp_path: Path) -> None:
    """A node that is cut off trains on; the folder is shared, and only one agent writes to it."""
    where = tmp_path / "run"
    for name in ("n1", "n2"):
        cluster.start_agent(name)
    trainer = cluster.train("n1", where, GIGABYTES)
    trainer.until("step", at_least=2)
    until(lambda: replicated(cluster, 1))
    before = next(node.epoch for node in cluster.state().nodes if node.name == "n1")
    cluster.nodes["n1"].cut()
    until(lambda: cluster.health("n1") == "lost")

    # The cluster has given the node up, the node has not: whoever comes next is not let in beside it.
    second = cluster.train("n2", where, GIGABYTES)
    with pytest.raises(RuntimeError, match="the trainer ended with 1"):
        second.until("restored")
    assert "end the other job" in (tmp_path / "n2.log").read_text()
    now = trainer.until("step", at_least=trainer.last_step + 2)["step"]

    # Back again, what it says in its old epoch counts no longer; in a new one it is heard, and what it made is there.
    cluster.nodes["n1"].heal()
    until(lambda: cluster.health("n1") == "alive" and target(cluster) >= now)
    assert next(node.epoch for node in cluster.state().nodes if node.name == "n1") > before
    assert any("epoch" in event.text and event.subject == "n1" for event in cluster.state().events)

    last = trainer.until("step", at_least=now)
    trainer.kill()
    assert last["digest"] == undisturbed(tmp_path, GIGABYTES, last["step"])
