"""Files that are cut off, flipped, gone, empty, foreign or links: an older clean step comes back, and the log says why.

An explicit step never becomes another one; and the folder is as usable as before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from crash.conftest import StartAgent
from crash.live import Run, on_disk, restored
from crash.nursery import Child
from crash.script import leftovers
from zerostall.core.manifest import decode_run
from zerostall.errors import CorruptError, FormatError, RunBusyError, SnapshotNotFoundError
from zerostall.flow.catalog import snapshots, verify

Damage = Callable[[Path], None]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * 5000)


def remove(path: Path) -> None:
    path.unlink()


def foreign(path: Path) -> None:
    path.write_text('{"name": "somebody else\'s"}\n')


def other_step(path: Path) -> None:
    """The file of the step before: whole, and of this very run."""
    shutil.copyfile(path.parent.parent / path.parent.name.replace("3", "2") / path.name, path)


def link_outside(path: Path) -> None:
    outside = path.parent.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


EVERY = (cut, empty, flip, remove, foreign, other_step, link_outside, dangling, folder, pipe)
KINDS = {"image": "rank-00000.safetensors", "record": "rank-00000.json", "manifest": "manifest.json"}
CHANGED = (cut, empty, flip, foreign, other_step)
"""A file is there and is not what was written. Of a manifest that is mended: the record says the same."""
CASES = [(kind, damage) for kind in KINDS for damage in EVERY if kind != "manifest" or damage not in CHANGED]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, agents, faulty, shim_library) -> Path:
    """Where a run with three steps will be; made by the first test that needs it."""
    return tmp_path_factory.mktemp("saved") / "run"


@pytest.fixture
def agent(start_agent: StartAgent) -> Child:
    return start_agent()


@pytest.fixture
def damaged(saved: Path, where: Path, agent: Child) -> Path:
    """A copy of that run, for this test to damage."""
    if not saved.exists():
        with Run(saved) as run:
            for _ in range(3):
                run.save().wait(timeout=60)
    shutil.copytree(saved, where)
    return where


@pytest.mark.parametrize(("kind", "damage"), CASES, ids=[f"{kind}-{damage.__name__}" for kind, damage in CASES])
def test_a_damaged_step_is_skipped_with_the_reason(
    damaged: Path, caplog: pytest.LogCaptureFixture, kind: str, damage: Damage
) -> None:
    path = damaged / "step-000000000003" / KINDS[kind]
    damage(path)
    absent = kind == "manifest" and damage is remove
    with Run(damaged) as run:
        with pytest.raises(SnapshotNotFoundError if absent else CorruptError, match="step 3"):
            run.restore(3)
        with caplog.at_level(logging.WARNING, "zerostall"):
            assert run.restore() == 2
        lines = [line.getMessage() for line in caplog.records if "step 3 in disk is skipped" in line.getMessage()]
        assert absent or any(str(path.parent) in line for line in lines)
        assert run.restore(1) == 1
        assert run.restore() == 2
        run.save().wait(timeout=60)
        assert run.job.clock["step"] == 3
    assert restored(damaged) == 3
    assert not leftovers(damaged)
    outside = damaged.parent / "outside"
    assert damage is not link_outside or outside.stat().st_size > 100


@pytest.mark.parametrize("damage", CHANGED)
def test_a_damaged_manifest_is_made_again_from_the_record_and_the_step_comes_back(
    damaged: Path, damage: Damage
) -> None:
    path = damaged / "step-000000000003" / "manifest.json"
    good = path.read_bytes()
    damage(path)
    with Run(damaged) as run:
        assert run.restore() == 3
        assert path.read_bytes() == good
        assert run.restore(2) == 2


@pytest.mark.parametrize("damage", [cut, empty, flip, remove, foreign, dangling, folder])
def test_a_damaged_layout_has_a_spare(damaged: Path, damage: Damage) -> None:
    (first,) = [path for path in (damaged / "layouts").iterdir() if "spare" not in path.name]
    (spare,) = [path for path in (damaged / "layouts").iterdir() if "spare" in path.name]
    good = spare.read_bytes()
    damage(first)
    with Run(damaged) as run:
        assert run.restore() == 3
        if damage is folder:
            return
        run.save().wait(timeout=60)
    assert first.read_bytes() == spare.read_bytes() == good
    damage(spare)
    assert restored(damaged) == 4


def test_with_both_copies_of_a_layout_gone_nothing_is_restored(damaged: Path) -> None:
    shutil.rmtree(damaged / "layouts")
    with Run(damaged) as run, pytest.raises(CorruptError, match=r"layouts.*is missing"):
        run.restore()
    assert on_disk(damaged) == [1, 2, 3]


@pytest.mark.parametrize("damage", [cut, empty, flip, remove, foreign, dangling, link_outside])
def test_a_damaged_run_file_is_written_anew(damaged: Path, caplog: pytest.LogCaptureFixture, damage: Damage) -> None:
    path = damaged / "run.json"
    before = path.read_bytes()
    damage(path)
    with Run(damaged, run="a name") as run:
        assert run.restore() == 3
        run.save().wait(timeout=60)
    assert not path.is_symlink()
    assert b'"name":"a name"' in path.read_bytes()
    assert path.read_bytes().partition(b'"run":')[2][:34] == before.partition(b'"run":')[2][:34]
    assert restored(damaged) == 4


def test_somebody_elses_run_file_is_left_alone(agent: Child, where: Path) -> None:
    where.mkdir()
    (where / "run.json").write_text('{"wandb": true}')
    with pytest.raises(FormatError, match=r"run\.json"):
        Run(where)
    assert (where / "run.json").read_text() == '{"wandb": true}'


@pytest.mark.parametrize("of", ["another step", "this step"])
def test_a_step_of_another_run_is_skipped_with_both_names(
    damaged: Path, where: Path, caplog: pytest.LogCaptureFixture, of: str
) -> None:
    other = where.with_name("other")
    with Run(other) as run:
        for _ in range(4):
            run.save().wait(timeout=60)
    step = 4 if of == "another step" else 3
    name = f"step-{step:012d}"
    shutil.rmtree(damaged / name, ignore_errors=True)
    shutil.copytree(other / name, damaged / name)
    there = (damaged / name / "manifest.json").read_bytes()
    ours, theirs = (decode_run((folder / "run.json").read_bytes()).run for folder in (damaged, other))
    with Run(damaged, keep=2) as run:
        with pytest.raises(CorruptError, match=f"{name}.*{theirs}.*{ours}"):
            run.restore(step)
        with caplog.at_level(logging.WARNING, "zerostall"):
            assert run.restore() == step - 1
        assert any(theirs in line.getMessage() and ours in line.getMessage() for line in caplog.records)
        assert [one.clean for one in snapshots(damaged)] == [True] * (step - 1) + [False]
        assert [one.clean for one in verify(damaged, step)] == [False]
        for _ in range(3):
            run.save().wait(timeout=60)
        run.tidy()
    aside = damaged / f"rewound-{step:012d}" / "manifest.json"
    assert aside.read_bytes() == there, "it gave its number up, and is not this run's to remove"
    assert on_disk(damaged) == [step + 1, step + 2]


def test_every_step_damaged_is_an_error_that_names_them_all(damaged: Path) -> None:
    for step in (1, 2, 3):
        flip(damaged / f"step-00000000000{step}" / KINDS["image"])
    with Run(damaged) as run, pytest.raises(CorruptError, match=r"step 3 .*step 2 .*step 1 "):
        run.restore()


def segments(agent: Child) -> list[Path]:
    """The shared memory of an agent."""
    found = []
    for fd in Path(f"/proc/{agent.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:zerostall" in str(fd.readlink()):
                found.append(fd)
    assert found
    return found


def test_damaged_host_memory_is_not_used(agent: Child, where: Path) -> None:
    """Case L1: the image in shared memory is checked before it is used: what is on disk is, or it is made again."""
    with Run(where) as run:
        run.save().wait()
        run.save().wait()
    for segment in segments(agent):
        with segment.open("r+b") as memory:
            size = memory.seek(0, os.SEEK_END)
            for at in range(50_000, size, 50_000):
                memory.seek(at)
                memory.write(b"flipped")
    for _ in range(2):  # and again: it does not go round in circles
        with Run(where) as run:
            assert run.restore() == 2  # bit for bit, wherever from
    with Run(where) as run:
        assert run.restore(1) == 1
        run.save().wait()
        assert run.job.clock["step"] == 2
    assert restored(where) == 2


def test_two_trainers_of_one_agent_are_told_apart(agent: Child, where: Path) -> None:
    with Run(where) as first:
        first.save().wait()
        with pytest.raises(RunBusyError, match=str(os.getpid())):
            Run(where)
        link = where.parent / "another way"
        link.symlink_to(where)
        with pytest.raises(RunBusyError):
            Run(link)
        first.save().wait()
    assert restored(where) == 2


def test_two_agents_on_one_folder_are_told_apart(
    agent: Child, start_agent: StartAgent, where: Path, tmp_path_factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    with Run(where) as first:
        first.save().wait()
        start_agent(other)
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("ZEROSTALL_RUNTIME_DIR", str(other))
            with pytest.raises(RunBusyError, match="another agent"):
                Run(where)
        first.save().wait()
    assert on_disk(where) == [1, 2]
    monkeypatch.setenv("ZEROSTALL_RUNTIME_DIR", str(other))
    with Run(where) as second:
        assert second.restore() == 2
        second.save().wait()
    assert restored(where) == 3


def test_memory_of_a_past_that_another_agent_has_rewritten_is_forgotten(
    agent: Child, start_agent: StartAgent, where: Path, tmp_path_factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    start_agent(other)
    with Run(where) as first:
        for _ in range(3):
            first.save().wait()
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("ZEROSTALL_RUNTIME_DIR", str(other))
        with Run(where) as second:
            assert second.restore(1) == 1
            second.save().wait()
    with Run(where) as third:
        assert third.restore() == 2
        assert third.ckpt.stats.restored_from == "disk"


def test_memory_is_all_that_is_left_of_a_step_that_is_damaged_on_disk(agent: Child, where: Path) -> None:
    with Run(where) as first:
        for _ in range(3):
            first.save().wait()
    for name in KINDS.values():
        flip(where / "step-000000000003" / name)
    with Run(where) as second:
        assert second.restore() == 3
        assert second.ckpt.stats.restored_from == "host"
