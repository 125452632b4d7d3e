"""A writer that dies while it replaces a step leaves the old or the new one, never neither."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from images import HandMade, make_layout, manifest_of
from zerostall import native
from zerostall.core.candidates import Past
from zerostall.errors import StorageError
from zerostall.tiers import draft_folders
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.files import write_whole

LAYOUT = make_layout(5000)


class Died(BaseException):
    pass


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    pool = native.Pool("test", 1)
    tier = DiskTier(tmp_path / "run", pool)
    old, new = HandMade(LAYOUT, 3, seed=1), HandMade(LAYOUT, 3, seed=2)
    tier.put(old.image)
    tier.commit(manifest_of(old.record))
    tier.put(new.image)
    left = renames
    rename = Path.rename

    def dying_rename(self: Path, target: Path) -> Path:
        nonlocal left
        if self.is_dir():
            if left == 0:
                raise Died
            left -= 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dying_rename)
    if renames < 2:
        with pytest.raises(Died):
            tier.commit(manifest_of(new.record), replace=True)
    else:
        tier.commit(manifest_of(new.record), replace=True)
    monkeypatch.undo()
    again = DiskTier(tmp_path / "run", pool)
    again.clear_leftovers()
    assert again.steps() == [3]
    target = native.Segment("target", 1 << 16)
    again.get(3, 0, target.address)
    got = bytes(target.view(0, LAYOUT.nbytes))
    assert got in (old.bytes, new.bytes)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["layouts", "step-000000000003"]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_step_stays_where_the_disk_fails_at_another_taking_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Two renames, and the one fsync by which they last."""
    tier = DiskTier(tmp_path / "run", native.Pool("test", 1))
    old, new = HandMade(LAYOUT, 3, seed=1), HandMade(LAYOUT, 3, seed=2)
    tier.put(old.image)
    tier.commit(manifest_of(old.record))
    tier.put(new.image)
    rename, fsync, left = Path.rename, draft_folders.fsync_folder, call

    def counted() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.EIO, "Input/output error")

    def failing_rename(self: Path, target: Path) -> Path:
        if self.is_dir():
            counted()
        return rename(self, target)

    def failing_fsync(folder: Path) -> None:
        counted()
        fsync(folder)

    monkeypatch.setattr(Path, "rename", failing_rename)
    monkeypatch.setattr(draft_folders, "fsync_folder", failing_fsync)
    with pytest.raises(StorageError, match="Input/output error"):
        tier.commit(manifest_of(new.record), replace=True)
    tier.abandon(3)
    assert tier.created(3) == old.created
    target = native.Segment("target", 1 << 16)
    tier.get(3, 0, target.address)
    assert bytes(target.view(0, LAYOUT.nbytes)) == old.bytes
    tier.put(new.image)
    tier.commit(manifest_of(new.record), replace=True)
    assert tier.created(3) == new.created
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["layouts", "step-000000000003"]


def test_nothing_is_renamed_over_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems refuse that: files take another's place by `replace` alone, folders go to names that are free."""
    rename = Path.rename

    def strict_rename(self: Path, target: Path) -> Path:
        if target.exists():
            raise FileExistsError(target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", strict_rename)
    tier = DiskTier(tmp_path / "run", native.Pool("test", 1))
    for seed, step, replace in ((1, 1, False), (2, 1, True), (3, 2, False), (4, 2, True)):
        made = HandMade(LAYOUT, step, seed=seed)
        tier.put(made.image)
        tier.commit(manifest_of(made.record), replace=replace)
    assert tier.set_aside([Past(2, tier.created(2))]) == [2]
    made = HandMade(LAYOUT, 2, seed=5)
    tier.put(made.image)
    tier.commit(manifest_of(made.record))
    assert tier.set_aside([Past(2, tier.created(2))]) == [2]  # over the one that was set aside before
    for _ in range(2):
        write_whole(tmp_path / "run" / "run.json", b"{}")
    assert tier.steps() == [1]
    for path in (tmp_path / "run").rglob("*"):
        assert not set(path.name) & set('<>:"|?*') and not path.name.endswith((" ", "."))
