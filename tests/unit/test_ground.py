"""Whether two nodes see one folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerostall.core.ground import Ground, sharing
from zerostall.tiers.ground import ground_of


def on(boot: str, kind: str, inode: int = 7) -> Ground:
    return Ground(boot, 1, inode, kind)


@pytest.mark.parametrize(
    ("mine", "theirs", "apart"),
    [
        (on("a", "ext4"), on("a", "ext4"), False),
        (on("a", "ext4"), on("a", "ext4", 8), True),
        (on("a", "ext4"), on("b", "ext4"), True),
        (on("a", "xfs"), on("b", "overlay", 8), True),
        (on("a", "nfs4"), on("b", "nfs4", 8), False),
        (on("a", "nfs4"), on("b", "ext4"), None),
        (on("a", "ext4"), on("b", "lustre"), None),
        (on("a", "fuse.s3fs"), on("b", "nfs4"), False),
    ],
    ids=lambda value: f"{value.boot}-{value.kind}-{value.inode}" if isinstance(value, Ground) else str(value),
)
def test_two_nodes_share_a_folder_or_each_has_its_own(mine: Ground, theirs: Ground, apart: bool | None) -> None:
    found = sharing(mine, theirs)
    assert found.apart is apart
    assert found.reason


def test_what_is_not_there_yet_lies_on_what_is_above_it(tmp_path: Path) -> None:
    """A folder on the very same machine is told from another, be it made or not."""
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    one = ground_of(tmp_path / "one")
    assert one.kind and one.boot
    assert sharing(one, ground_of(tmp_path / "link")).apart is False
    assert sharing(one, ground_of(tmp_path / "other" / "run")).apart is True
    assert ground_of(Path("/proc/self")).kind == "proc"
