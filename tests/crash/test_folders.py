"""Where a run's folder may be, what it may be called, and who may read what is in it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from crash.conftest import StartAgent
from crash.live import Run, on_disk, restored
from crash.nursery import Child
from crash.script import leftovers
from shim.faults import Shim, Trace
from zerostall.errors import RunBusyError
from zerostall.flow.folder_lock import LOCK


@pytest.fixture
def agent(start_agent: StartAgent) -> Child:
    return start_agent()


def test_a_symlinked_folder_works_and_stays_a_link(agent: Child, tmp_path: Path) -> None:
    """Case A13: nothing is renamed from one file system to another."""
    (tmp_path / "big").mkdir()
    where = tmp_path / "run"
    where.symlink_to(tmp_path / "big")
    with Run(where, keep=1) as run:
        run.save().wait()
        run.save().wait()
    assert where.is_symlink()
    assert on_disk(tmp_path / "big") == [2]
    assert restored(tmp_path / "big") == 2 and restored(where) == 2


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_nothing_is_written_elsewhere(
    start_agent: StartAgent, faulty: Shim, folder: Path, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case A13: TMPDIR may be on another file system, or full."""
    elsewhere = Path("/dev/shm/zerostall-elsewhere")
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    agent = start_agent(TMPDIR=str(elsewhere))
    with Trace(faulty, op="open,mkdir,rename,link") as trace, Run(where) as run:
        run.save().wait()
        run.save().wait()
    made = [call for call in trace.calls if call.pid == agent.pid]
    assert made
    assert all(str(elsewhere) not in call.path + call.second for call in made)
    renamed = [call for call in made if call.op == "rename"]
    assert renamed and all(Path(call.path).parent == Path(call.second).parent for call in renamed)


def allowed(path: Path, mask: int) -> int:
    """The mode of a file or folder of a run; nobody opens its lock who may only read it, for he could hold it."""
    mode = (0o777 if path.is_dir() else 0o666) & ~mask
    if path.name == LOCK:
        mode = sum(0o6 << place for place in (6, 3, 0) if mode >> place & 0o2)
    return mode


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077, 0o027])
def test_modes_follow_the_umask(start_agent: StartAgent, tmp_path: Path, mask: int) -> None:
    """Temporary files that are made 0600 and renamed would keep others out."""
    before = os.umask(mask)
    try:
        where = tmp_path / "a" / "run"
        with Run(where, keep=1) as run:  # no agent listens yet: this starts one
            run.save().wait()
            run.save(pin=True).wait()
    finally:
        os.umask(before)
    for path in [tmp_path / "a", where, *where.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == allowed(path, mask), f"{path}: {mode:o}"


def test_the_umask_of_who_started_the_agent_does_not_matter(folder: Path, tmp_path: Path) -> None:
    """What is the agent's is its owner's alone; what is a run's has the modes that its own trainer asks for."""
    before = os.umask(0)
    try:
        with Run(tmp_path / "open" / "run") as run:  # no agent listens yet: this starts one
            run.save().wait()
        for name, mask in (("shared", 0o002), ("private", 0o077)):
            os.umask(mask)
            with Run(tmp_path / name / "run", keep=1) as run:
                run.save().wait()
                run.save(pin=True).wait()
    finally:
        os.umask(before)
    for name, mask in (("open", 0), ("shared", 0o002), ("private", 0o077)):
        for path in [tmp_path / name, *(tmp_path / name).rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == allowed(path, mask), f"{path}: {mode:o}"
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, f"{path}: {path.lstat().st_mode:o}"
    assert {path.suffix for path in folder.iterdir()} >= {".sock", ".lock", ".log"}


def test_the_group_of_a_shared_folder_is_kept(agent: Child, tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    with Run(tmp_path / "run") as run:
        run.save().wait()
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        assert path.stat().st_gid == tmp_path.stat().st_gid
        assert not path.is_dir() or path.stat().st_mode & stat.S_ISGID


def test_a_folder_that_was_moved_is_the_same_run(agent: Child, tmp_path: Path) -> None:
    """Case B10: no link and no absolute path is in it. What is put in its place begins anew."""
    with Run(tmp_path / "run", run="mine") as run:
        run.save().wait()
        run.save().wait()
    shutil.move(tmp_path / "run", tmp_path / "moved")
    with Run(tmp_path / "moved", run="mine") as run:
        assert run.restore() == 2
        run.save().wait()
    assert restored(tmp_path / "moved") == 3
    assert not any(path.is_symlink() for path in (tmp_path / "moved").rglob("*"))
    assert str(tmp_path).encode() not in (tmp_path / "moved" / "run.json").read_bytes()
    with Run(tmp_path / "run") as run:
        assert run.restore() == 0
        run.save().wait()
    assert restored(tmp_path / "run") == 1


def test_a_folder_that_was_moved_while_training_and_linked_is_the_same_run(agent: Child, tmp_path: Path) -> None:
    """By its new path, too, the agent knows who trains there: it was said to be another agent."""
    with Run(tmp_path / "run") as run:
        run.save().wait()
        shutil.move(tmp_path / "run", tmp_path / "moved")
        (tmp_path / "run").symlink_to(tmp_path / "moved")
        with pytest.raises(RunBusyError, match="open already in this very process"):
            Run(tmp_path / "moved")
        run.save().wait()
    assert restored(tmp_path / "moved") == restored(tmp_path / "run") == 2


@pytest.mark.parametrize(
    "name", ["übung-模型 🧪", "new\nline", "tab\tname", "-rf", ".hidden", "a.partial", "step-000000000001"]
)
def test_odd_names(agent: Child, tmp_path: Path, name: str) -> None:
    where = tmp_path / name
    with Run(where, keep=1) as run:
        for _ in range(3):
            run.save().wait()
    assert on_disk(where) == [3] and restored(where) == 3
    assert not leftovers(where)
    assert [path.name for path in tmp_path.iterdir() if path.name != "outside"] == [name]


def test_a_name_that_is_not_text(agent: Child, tmp_path: Path) -> None:
    where = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff\xfe"))
    with Run(where) as run:
        run.save().wait()
    assert restored(where) == 1


def test_strangers_in_the_folder_are_left_alone(agent: Child, where: Path) -> None:
    """Whatever has another name is not ours, even if it looks nearly so."""
    where.mkdir()
    strangers = ("notes.txt", "step-1", "step-000000000001.bak", "staging-1", "layouts.old", "events.partial")
    for name in strangers:
        (where / name).mkdir()
        (where / name / "content").write_text("theirs")
    (where / "step-000000000009").symlink_to(where / "step-1")
    with Run(where, keep=1) as run:
        for _ in range(3):
            run.save().wait()
    assert on_disk(where) == [3]
    assert all((where / name / "content").read_text() == "theirs" for name in strangers)
    assert (where / "step-000000000009").is_symlink()


def test_a_link_in_the_place_of_a_step_is_not_followed(agent: Child, where: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("data")
    where.mkdir()
    (where / "step-000000000001").symlink_to(outside)
    with Run(where) as run:
        run.save().wait(timeout=60)
        run.save().wait(timeout=60)
    assert sorted(path.name for path in outside.iterdir()) == ["precious"]
    assert on_disk(where) == [1, 2]
    assert restored(where) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_disk_is_refused_by_name(agent: Child, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,ro", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with pytest.raises(OSError, match=r"[Rr]ead-only") as caught:
            Run(disk / "run")
        assert str(disk) in str(caught.value)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
