"""Images in memory that are damaged: found by whoever, marked, told, and made again from a good copy."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from cluster import SECONDS, Agents, Manager, joined, only_in_memory, until_replicated
from forked import cli as zerostall
from hand import HandTrainer, agent_report, wait_until
from images import HandMade
from zerostall import Checkpointer
from zerostall.errors import CorruptError
from zerostall.flow import catalog
from zerostall.wire import messages as m

pytestmark = pytest.mark.timeout(300)  # several agents and trainers start in each


def damage(trainer: HandTrainer, made: HandMade) -> None:
    """Change one bit of an image in its rank's own memory."""
    fetched, fds = trainer.ask_for_memory(m.Fetch(id=6, step=made.record.step, tier="host"))
    os.pwrite(fds[0], bytes([made.bytes[-1] ^ 1]), fetched.offset + len(made.bytes) - 1)
    for fd in fds:
        os.close(fd)


def told(manager: Manager, kind: str) -> str:
    """What the manager says of the newest such event; "" while there is none."""
    return next((event.text for event in manager.state().events if event.kind == kind), "")


def upkeep(folder: Path) -> m.UpkeepReport:
    return agent_report(folder).upkeep


def stored(agent: Path, where: Path) -> tuple[HandTrainer, HandMade]:
    """A trainer and its step 5, which is on disk, and in the memory of its agent."""
    trainer = HandTrainer(agent, where)
    trainer.lease()
    made = trainer.seal(5, promise=True)
    trainer.hear(m.Reached, tier="disk")
    return trainer, made


def replicated(manager: Manager, folders: dict[str, Path], where: Path) -> tuple[HandTrainer, HandMade]:
    """A trainer on n1 and its step 5, of which there is another copy in the memory of n2 and none on disk."""
    trainer, made = stored(folders["n1"], where)
    until_replicated(manager, 5)
    only_in_memory(where)
    return trainer, made


def test_what_nobody_fetches_is_found_damaged_and_made_again(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    trainer, made = replicated(manager, joined(manager, agents, "n1", "n2"), tmp_path / "run")
    damage(trainer, made)
    trainer.channel.send(m.Release())
    wait_until(lambda: "made again from node n2" in told(manager, "mended"), SECONDS)
    assert "found while nobody asked" in told(manager, "damaged")
    assert "step 5 of rank 0 in the host memory of node n1" in told(manager, "damaged")
    assert trainer.fetch(5, "host") == made.bytes
    assert (5, "host", True) in trainer.copies()
    node = manager.node("n1")
    assert node is not None
    assert (node.damaged, node.damaged_ever, node.mended_ever) == ((), 1, 1)
    assert node.upkeep.startswith("scrubs at most 65536 KiB/s")


@pytest.fixture
def unscrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSTALL_SCRUB_RATE", "0")


@pytest.mark.usefixtures("unscrubbed")
def test_what_a_trainer_finds_damaged_is_made_again(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    folders = joined(manager, agents, "n1", "n2")
    trainer, made = replicated(manager, folders, tmp_path / "run")
    damage(trainer, made)
    trainer.channel.send(m.Release(damaged="chunk 0 fails its checksum"))
    wait_until(lambda: upkeep(folders["n1"]).mended == 1, SECONDS)
    assert trainer.fetch(5, "host") == made.bytes
    wait_until(lambda: "made again from node n2" in told(manager, "mended"), SECONDS)
    assert "the trainer of rank 0 found it" in told(manager, "damaged")


@pytest.mark.usefixtures("unscrubbed")
def test_what_the_disk_refuses_is_made_again_and_gets_there(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    folders = joined(manager, agents, "n1", "n2")
    trainer = HandTrainer(folders["n1"], tmp_path / "run", rules=m.Rules(keep_last=3, disk_interval=3600.0))
    trainer.lease()
    trainer.seal(4, promise=True)
    trainer.hear(m.Reached, tier="disk")
    made = trainer.seal(5)
    until_replicated(manager, 5)
    damage(trainer, made)
    trainer.channel.send(m.Release())
    trainer.channel.send(m.Promise(step=5, created=made.created))
    assert trainer.hear(m.Failed).kind == "CorruptError"
    assert trainer.hear(m.Reached, tier="disk", step=5).created == made.created
    assert (5, "disk", True) in trainer.copies()


@pytest.mark.usefixtures("unscrubbed")
def test_without_a_good_copy_it_is_no_copy_any_more(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    """The run goes on; what is damaged is told and is not counted on."""
    folders = joined(manager, agents, "n1")
    trainer = HandTrainer(folders["n1"], tmp_path / "run")
    trainer.lease()
    made = trainer.seal(5, promise=True)
    trainer.hear(m.Reached, tier="disk")
    only_in_memory(tmp_path / "run")
    damage(trainer, made)
    trainer.channel.send(m.Release(damaged="chunk 0 fails its checksum"))
    wait_until(lambda: told(manager, "hopeless") != "", SECONDS)
    assert (5, "host", False) in trainer.copies()

    def shown() -> str:
        node = manager.node("n1")
        return "; ".join(node.damaged) if node else ""

    wait_until(lambda: "chunk 0 of 1 fails its checksum" in shown(), SECONDS)
    wait_until(lambda: (run := manager.run()) is None or run.target is None, SECONDS)
    again = trainer.seal(6)
    manager.until_clean(6)
    assert trainer.fetch(6, "host") == again.bytes


@pytest.mark.usefixtures("unscrubbed")
def test_a_restore_that_finds_damage_goes_on_and_the_memory_is_made_again(own_agent: Path, tmp_path: Path) -> None:
    """One node without a manager: its disk has the good copy."""
    where = tmp_path / "run"
    state = {"weights": np.arange(100_000, dtype=np.float32)}
    with Checkpointer(where, model=state) as ckpt:
        ckpt.save(3).wait(tier="disk", timeout=SECONDS)
    looker = HandTrainer(own_agent, where)
    fetched, fds = looker.ask_for_memory(m.Fetch(id=6, step=3, tier="host"))
    os.pwrite(fds[0], b"\xff" * 8, fetched.offset + 4096)
    os.close(fds[0])
    looker.channel.send(m.Release())
    looker.leave()
    state["weights"][:] = 0.0
    with Checkpointer(where, model=state) as ckpt:
        assert ckpt.restore() == 3
        assert ckpt.stats.restored_from == "disk"
        assert (state["weights"] == np.arange(100_000, dtype=np.float32)).all()
        wait_until(lambda: upkeep(own_agent).mended == 1, SECONDS)
        assert ckpt.restore() == 3
        assert ckpt.stats.restored_from == "host"


@pytest.mark.usefixtures("unscrubbed")
def test_what_is_damaged_on_disk_is_written_anew(own_agent: Path, tmp_path: Path) -> None:
    """A restore that asks for a step no memory has finds it, another one in memory or elsewhere makes it good."""
    where = tmp_path / "run"
    trainer, made = stored(own_agent, where)
    file = where / "step-000000000005" / "rank-00000.safetensors"
    with file.open("r+b") as opened:
        opened.seek(2_000_000)
        opened.write(bytes([made.bytes[2_000_000] ^ 1]))
    _, fds = trainer.ask_for_memory(m.Fetch(id=6, step=5, tier="disk", as_file=True))
    os.close(fds[0])
    trainer.channel.send(m.Release(damaged="chunk 0 fails its checksum"))
    wait_until(lambda: upkeep(own_agent).mended == 1, SECONDS)
    assert file.read_bytes() == made.bytes
    assert "on disk is whole again, made again from this node's memory" in (own_agent / "agent.log").read_text()
    assert trainer.fetch(5, "disk") == made.bytes


@pytest.mark.usefixtures("unscrubbed")
def test_what_is_damaged_on_disk_comes_from_another_node(manager: Manager, agents: Agents, tmp_path: Path) -> None:
    where = tmp_path / "run"
    folders = joined(manager, agents, "n1", "n2")
    trainer, made = stored(folders["n1"], where)
    until_replicated(manager, 5)
    damage(trainer, made)  # so this node's memory cannot help
    trainer.channel.send(m.Release())
    file = where / "step-000000000005" / "rank-00000.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"wrong")
    with pytest.raises(CorruptError):
        trainer.fetch(5, "disk")
    trainer.channel.send(m.Release(damaged="chunk 0 fails its checksum"))
    wait_until(lambda: "made again from node n2" in told(manager, "mended"), SECONDS)
    assert "step 5 of rank 0 on the disk of node n1" in told(manager, "mended")
    assert file.read_bytes() == made.bytes


def spoil(file: Path) -> bytes:
    """Change one bit in the middle of a file; what was there before."""
    before = file.read_bytes()
    middle = len(before) // 2
    file.write_bytes(before[:middle] + bytes([before[middle] ^ 1]) + before[middle + 1 :])
    return before


@pytest.mark.usefixtures("unscrubbed")
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.json"])
def test_what_vouches_for_an_image_on_disk_is_written_anew(own_agent: Path, tmp_path: Path, name: str) -> None:
    where = tmp_path / "run"
    trainer, made = stored(own_agent, where)
    before = spoil(where / "step-000000000005" / name)
    assert (5, "disk", True) in trainer.copies()
    assert upkeep(own_agent).mended == 1
    assert (where / "step-000000000005" / name).read_bytes() == before
    assert trainer.fetch(5, "disk") == made.bytes


@pytest.mark.usefixtures("unscrubbed")
def test_a_manifest_is_what_all_records_say_and_a_record_that_nobody_has_is_told_once(
    own_agent: Path, tmp_path: Path
) -> None:
    """Memory has newer steps by now."""
    where = tmp_path / "run"
    trainer = HandTrainer(own_agent, where, rules=m.Rules(keep_last=9))
    trainer.lease()
    made = {}
    for step in (1, 2, 3, 4):
        made[step] = trainer.seal(step, promise=True)
        trainer.hear(m.Reached, tier="disk", step=step)
    folder = where / "step-000000000001"
    before = spoil(folder / "manifest.json")
    assert {copy for copy in trainer.copies() if copy[0] == 1} == {(1, "disk", True)}
    assert upkeep(own_agent).mended == 1
    assert (folder / "manifest.json").read_bytes() == before
    assert trainer.fetch(1, "disk") == made[1].bytes
    log = own_agent / "agent.log"
    assert "the manifest is made again from the records beside it" in log.read_text()

    spoil(folder / "rank-00000.json")
    for _ in range(2):
        assert (1, "disk", False) in trainer.copies()
        assert upkeep(own_agent).damaged == 2
    assert len([line for line in log.read_text().splitlines() if "rank-00000.json" in line]) == 1
    spoil(folder / "rank-00000.json")  # back again
    assert (1, "disk", True) in trainer.copies()


def test_what_lies_on_disk_is_found_damaged_though_nobody_reads_it(
    own_agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROSTALL_SCRUB_REST", "0")
    where = tmp_path / "run"
    _there = stored(own_agent, where)  # a trainer that stays to the end
    image = where / "step-000000000005" / "rank-00000.safetensors"
    layouts = sorted(where.glob("layouts/*.json"))
    before = {file: spoil(file) for file in (image, *layouts)}
    wait_until(lambda: upkeep(own_agent).mended >= 2, SECONDS)
    wait_until(lambda: {file: file.read_bytes() for file in before} == before, SECONDS)
    image.unlink()
    wait_until(lambda: image.exists() and image.read_bytes() == before[image], SECONDS)
    log = (own_agent / "agent.log").read_text()
    assert "its layout is made again from what is known of it" in log
    assert "on disk is whole again, made again from this node's memory" in log


@pytest.mark.usefixtures("unscrubbed")
@pytest.mark.parametrize("by_command", [True, False], ids=["command", "python"])
def test_what_verify_finds_damaged_on_disk_is_made_again(
    own_agent: Path, agent_environment: dict[str, str], tmp_path: Path, by_command: bool
) -> None:
    where = tmp_path / "run"
    trainer, _ = stored(own_agent, where)
    file = where / "step-000000000005" / "rank-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    if by_command:
        done = zerostall(agent_environment, "verify", where, "--json")
        assert done.returncode == 1, done.stderr
        found = json.loads(done.stdout)
        assert (found["clean"], found["agent_told"]) == (False, True)
    else:
        assert [(verdict.clean, verdict.agent_told) for verdict in catalog.verify(where)] == [(False, True)]
    wait_until(lambda: upkeep(own_agent).mended == 1, SECONDS)
    assert file.read_bytes() == whole
    assert zerostall(agent_environment, "verify", where).returncode == 0
    # Of a run that the agent does not have it hears nothing.
    trainer.leave()
    shutil.copytree(where, tmp_path / "copy")
    (tmp_path / "copy" / file.relative_to(where)).write_bytes(whole[:-1])
    assert "agent" not in zerostall(agent_environment, "verify", tmp_path / "copy").stdout
    assert [(verdict.clean, verdict.agent_told) for verdict in catalog.verify(tmp_path / "copy")] == [(False, False)]
