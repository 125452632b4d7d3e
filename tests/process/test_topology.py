"""`zerostall manager --topology FILE`: where copies go by it, and what is said of nodes that are not in it."""

from __future__ import annotations

from pathlib import Path

from cluster import PATIENT, SECONDS, Manager
from forked import cli as zerostall
from hand import wait_until
from zerostall.wire import cluster as w

TOPOLOGY = """
[racks]
r1 = ["n[1-2]"]
r2 = ["n[3-4]"]
[leaves]
leaf1 = ["n1", "n3"]
leaf2 = ["n2", "n4"]
[spines]
spine1 = ["leaf1"]
spine2 = ["leaf2"]
"""


def test_copies_go_where_the_file_says_that_nothing_is_shared(
    tmp_path: Path, agent_environment: dict[str, str]
) -> None:
    file = tmp_path / "topology.toml"
    file.write_text(TOPOLOGY)
    manager = Manager(tmp_path, agent_environment, *PATIENT, "--topology", str(file))
    link = manager.link()
    try:
        epochs = {}
        for number, labels in enumerate(("", "rack=r2", "", "", "rack=r9"), 1):
            name = f"n{number}"
            join = w.Join(node=name, instance=name, labels=labels, peer=f"127.0.0.1:{9000 + number}", offers=1 << 30)
            epochs[name] = link.post("join", join, w.Joined).epoch
        rank = w.RankNote(0, True, True, (w.CopyNote(4, "a", "host", 1.0, 1000),), 1000)
        run = w.RunNote("run1", "/runs/one", 1, (rank,))
        report = w.Report(node="n1", epoch=epochs["n1"], sequence=1, version=1, held=(run,))
        link.post("report", report, w.Answer)
        wait_until(lambda: (found := manager.run()) is not None and found.copies, SECONDS)
        # n2 shares the rack of n1, n3 its leaf switch; n5 is nobody's: of it its own labels count.
        found = manager.run()
        assert found is not None
        assert found.copies in (
            ("n1 → n4, 1 image: another rack, 6 hops",),
            ("n1 → n5, 1 image: another rack",),
        )
        nodes = {node.name: (node.labels, node.stands) for node in manager.state().nodes}
        assert nodes["n1"] == ("rack=r1,leaf=leaf1,spines=spine1", f"as {file} says")
        assert nodes["n2"] == (
            "rack=r1,leaf=leaf2,spines=spine2",
            f"its labels say rack=r2, {file} says rack=r1: the file counts",
        )
        assert nodes["n5"] == ("rack=r9", f"not in {file}: its labels count, rack=r9")
        told = {event.subject: event.text for event in manager.state().events if event.kind == "topology"}
        assert told == {name: nodes[name][1] for name in ("n2", "n5")}
        status = zerostall(
            agent_environment, "status", "--manager", manager.url, "--token-file", manager.token_file
        ).stdout
        assert f"topology of {file}: 4 nodes, 2 racks, 2 leaf switches, 2 spine switches" in " ".join(status.split())
        assert f"replicas: {found.copies[0]}" in status
    finally:
        link.close()
        manager.close()


def test_a_bad_file_is_refused_before_anything_starts(tmp_path: Path, agent_environment: dict[str, str]) -> None:
    file = tmp_path / "topology.toml"
    options = ("--state", tmp_path / "state", "--token-file", tmp_path / "token", "--port", 0, "--topology", file)
    missing = zerostall(agent_environment, "manager", *options)
    assert missing.returncode == 1 and "cannot be read: No such file" in missing.stderr
    file.write_text("[racks]\nr1 = ['n1']\nr2 = ['n1']")
    wrong = zerostall(agent_environment, "manager", *options)
    assert wrong.returncode == 1 and "node n1 is in two: r1, r2" in " ".join(wrong.stderr.split())
    assert "Traceback" not in wrong.stderr and not (tmp_path / "state").exists()
