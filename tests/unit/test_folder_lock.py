"""One writer a folder: what keeps another one out, and nobody else."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zerostall.errors import RunBusyError
from zerostall.flow.folder_lock import LOCK, FolderLock
from zerostall.tiers.modes import OWN, Modes


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o600), (0o077, 0o600), (0o002, 0o660), (0o027, 0o600), (0, 0o666)]
)
@pytest.mark.parametrize("own", [False, True])
def test_nobody_opens_the_lock_who_may_not_write_the_folder(tmp_path: Path, umask: int, mode: int, own: bool) -> None:
    before = os.umask(umask if own else 0o077)
    try:
        FolderLock(tmp_path, OWN if own else Modes(umask)).close()
    finally:
        os.umask(before)
    assert mode_of(tmp_path / LOCK) == mode


def test_a_lock_of_an_older_version_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    (tmp_path / LOCK).chmod(0o644)
    FolderLock(tmp_path).close()
    assert mode_of(tmp_path / LOCK) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_who_may_look_into_the_folder_cannot_hold_it(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    FolderLock(tmp_path, Modes(0o022)).close()
    code = f"""
import fcntl, os
os.setuid(65534)
try:
    fcntl.flock(os.open({str(tmp_path / LOCK)!r}, os.O_RDONLY), fcntl.LOCK_SH)
except PermissionError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_who_holds_the_lock_for_reading_is_named(tmp_path: Path) -> None:
    FolderLock(tmp_path).close()
    with (tmp_path / LOCK).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(RunBusyError, match=f"process {os.getpid()} has locked .* for reading"):
            FolderLock(tmp_path)
    first = FolderLock(tmp_path)
    with pytest.raises(RunBusyError, match="another agent writes"):
        FolderLock(tmp_path)
    first.close()
