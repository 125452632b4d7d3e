"""The disk refuses, at every place where the agent writes: training goes on, and every earlier step is still there.

The error reaches whoever waits for the step, with its number and the path. Nothing unfinished stays behind, and the
next save works as soon as the disk does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.conftest import StartAgent
from crash.live import Run, on_disk, restored
from crash.script import leftovers
from hand import wait_until
from shim.faults import Faults, Shim, Trace
from zerostall.errors import StorageError

IMAGE, RECORD, MANIFEST = "*/rank-00000.safetensors", "*/rank-00000.json", "*/manifest.json*"

# What fails (operation, path), and with what.
REFUSALS = [
    *(("open", IMAGE, error) for error in ("EACCES", "EIO", "ENOSPC", "EROFS")),
    *(("allocate", IMAGE, error) for error in ("ENOSPC", "EDQUOT")),
    *(("write", IMAGE, error) for error in ("EIO", "ENOSPC", "EDQUOT")),
    *((op, IMAGE, "EIO") for op in ("truncate", "fsync")),
    *((op, RECORD, "ENOSPC") for op in ("open", "write")),
    *((op, RECORD, error) for op, error in (("fsync", "EIO"), ("write", "EDQUOT"))),
    *((op, MANIFEST, error) for op, error in (("open", "ENOSPC"), ("write", "EDQUOT"), ("fsync", "EIO"))),
    *(("rename", MANIFEST, error) for error in ("EACCES", "EIO")),
    *(("mkdir", "*/step-*", error) for error in ("ENOSPC", "EACCES")),
    ("fsync", "*/step-0*[0-9]", "EIO"),
    ("fsync", "*/run", "EIO"),
]


@pytest.fixture(autouse=True)
def agent(start_agent: StartAgent):
    return start_agent()


@pytest.mark.parametrize(("op", "match", "error"), REFUSALS)
def test_a_refusal_costs_only_its_own_step(faulty: Shim, where: Path, op: str, match: str, error: str) -> None:
    with Run(where) as run:
        run.save().wait()
        with Faults(faulty, op=op, match=match, error=error) as fault:
            failing = run.save()
            with pytest.raises(StorageError) as caught:
                failing.wait(timeout=60)
            assert caught.value.errno == getattr(errno, error)
            assert str(where) in str(caught.value)
            if error in ("ENOSPC", "EDQUOT"):
                assert re.search(r": [1-9]\d* bytes needed, \d+ free", str(caught.value))
            assert fault.hits
            assert 1 in on_disk(where)
            run.save()
        last = run.save()
        last.wait(timeout=60)
        assert run.ckpt.stats.failed >= 1
    assert {1, last.step} <= set(on_disk(where))
    assert not leftovers(where)
    assert restored(where, 1) == 1
    assert restored(where) == last.step


@pytest.mark.parametrize(
    ("op", "match"), [("mkdir", "*/layouts"), *((op, "*/layouts/*") for op in ("open", "write", "fsync", "rename"))]
)
def test_a_layout_that_cannot_be_written_fails_the_first_step(faulty: Shim, where: Path, op: str, match: str) -> None:
    with Run(where) as run:
        with Faults(faulty, op=op, match=match, error="ENOSPC"), pytest.raises(StorageError, match="bytes needed"):
            run.save().wait(timeout=60)
        assert on_disk(where) == []
        run.save().wait(timeout=60)
    assert not leftovers(where)
    assert restored(where) == 2


@pytest.mark.parametrize("op", ["mkdir", "open", "write", "fsync", "rename"])
def test_a_folder_that_cannot_be_begun_is_refused_at_once(faulty: Shim, where: Path, op: str) -> None:
    match = "*/run" if op == "mkdir" else "*/run.json.*"
    with Faults(faulty, op=op, match=match, error="ENOSPC"), pytest.raises(StorageError, match="room") as caught:
        Run(where)
    assert caught.value.errno == errno.ENOSPC
    with Run(where) as run:
        run.save().wait(timeout=60)
    assert not leftovers(where)


def test_a_run_file_that_cannot_be_rewritten_is_no_reason_to_fail(faulty: Shim, where: Path) -> None:
    run = Run(where)
    with run, Faults(faulty, op="write", match="*/run.json*", error="ENOSPC") as fault:
        run.save().wait(timeout=60)
        assert fault.hits
    assert restored(where) == 1


REMOVALS = [
    *(("unlink", "*/manifest.json", error, 0) for error in ("EACCES", "EIO")),
    *(("unlink", IMAGE, error, 0) for error in ("EACCES", "EBUSY")),
    *(("rmdir", "*/step-*", error, 0) for error in ("ENOTEMPTY", "EACCES")),
    *(("unlink,rmdir", "*/step-*", error, 1) for error in ("ESTALE", "EBUSY", "ENOTEMPTY")),
]


@pytest.mark.parametrize(("op", "match", "error", "times"), REMOVALS)
def test_what_cannot_be_removed_is_only_a_warning(
    faulty: Shim, where: Path, op: str, match: str, error: str, times: int
) -> None:
    with Run(where, keep=1) as run:
        run.save().wait()
        with Faults(faulty, op=op, match=match, error=error, times=times) as fault:
            for _ in range(3):
                run.save().wait(timeout=60)
            run.tidy()
        assert fault.hits
        assert on_disk(where)[-1] == 4
        assert run.ckpt.stats.failed == 0
        run.save().wait(timeout=60)
    assert on_disk(where) == [5]
    assert not leftovers(where)


def test_a_reader_that_holds_an_old_file_does_not_disturb(where: Path) -> None:
    with Run(where, keep=1) as run:
        run.save().wait()
        with (where / "step-000000000001" / "rank-00000.safetensors").open("rb") as held:
            run.save().wait()
            run.save().wait()
            assert held.read(8)
    assert on_disk(where) == [3]


@pytest.mark.parametrize("short", [1000, 4096, 100_000])
def test_short_writes_lose_nothing(faulty: Shim, where: Path, short: int) -> None:
    with Faults(faulty, op="write", match=f"{where}*", short=short) as fault, Run(where) as run:
        run.save().wait(timeout=60)
        run.save().wait(timeout=60)
    assert fault.hits > 6
    assert restored(where, 1) == 1 and restored(where) == 2


def test_a_slow_disk_slows_nobody(faulty: Shim, where: Path) -> None:
    """Saves go on beside one that is being written; the newest gets there in the end."""
    with Run(where) as run:
        run.save().wait()
        with Faults(faulty, op="fsync", match=IMAGE, hold=True) as fault:
            first = run.save()
            while not fault.hits:
                first.wait("host", timeout=60)
            wait_until(lambda: not run.ckpt.save(run.job.train_one_step()).skipped)
            assert first.tiers == {"host"}
            assert on_disk(where) == [1]
        first.wait(timeout=60)
        last = run.save()
    assert on_disk(where)[-1] == last.step
    assert restored(where) == last.step


def test_a_failed_step_is_tried_again_without_being_asked(faulty: Shim, where: Path) -> None:
    with Run(where) as run:
        with Faults(faulty, op="fsync", match=IMAGE, error="EIO"), pytest.raises(StorageError):
            run.save().wait(timeout=60)
        saving = run.ckpt._ledger.newest()
        assert saving is not None
        while "disk" not in saving.tiers:
            with contextlib.suppress(StorageError):
                saving.wait(timeout=60)
    assert on_disk(where) == [1]


def test_a_run_that_loses_nothing_is_not_held_up_by_a_broken_disk(faulty: Shim, where: Path) -> None:
    """`when_busy="wait"` waits for a disk that is slow, not for one that refuses."""
    with Run(where, when_busy="wait") as run:
        run.save().wait()
        with Faults(faulty, op="write", match=IMAGE, error="EIO"):
            for _ in range(6):
                run.save()
            run.tidy()
        assert run.ckpt.stats.failed
        run.save().wait(timeout=60)
    assert restored(where) == 8


def test_an_unreported_failure_is_raised_by_close(faulty: Shim, where: Path) -> None:
    run = Run(where)
    with Faults(faulty, op="write", match=IMAGE, error="EIO"), pytest.raises(StorageError):
        run.save()
        run.ckpt.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk that is soon full."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_says_what_is_needed_and_goes_on_once_there_is_room(small_disk: Path) -> None:
    where = small_disk / "run"
    with Run(where) as run:
        run.save().wait()
        size = sum(path.stat().st_size for path in where.rglob("*") if path.is_file())
        (small_disk / "in the way").write_bytes(bytes(700 * 1024 - 2 * size))
        with pytest.raises(StorageError, match=r"\d{5,} bytes needed, \d+ free") as caught:
            run.save().wait(timeout=60)
        assert caught.value.errno == errno.ENOSPC and str(where) in str(caught.value)
        assert on_disk(where) == [1] and not leftovers(where)
        (small_disk / "in the way").unlink()
        run.save().wait(timeout=60)
    assert on_disk(where)[-1] == 3
    assert restored(where, 1) == 1 and restored(where) == 3


def test_data_is_read_in_large_pieces(faulty: Shim, where: Path, agent) -> None:
    """Slow network file systems want few, large reads (case H13), and nothing mapped."""
    with Run(where) as run:
        run.save().wait()
    agent.kill()
    with Trace(faulty, op="read", match=f"{where}*") as trace:
        assert restored(where) == 1
    sizes = [call.result for call in trace.calls if call.path.endswith(".safetensors")]
    assert len(sizes) <= 3
