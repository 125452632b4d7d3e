"""Whether two nodes see one folder at a path, or each its own there: a pure decision from what each sees.

It is decided from what a file system is, and not by looking whether what one writes turns up at the other: a network
file system may show it late, and a restart cannot wait for what will never come.
"""

from __future__ import annotations

import msgspec

_LOCAL = "apfs bcachefs btrfs exfat ext2 ext3 ext4 f2fs jfs ntfs3 overlay ramfs reiserfs squashfs tmpfs vfat xfs zfs"
LOCAL = frozenset(_LOCAL.split(" "))
"""File systems that one machine alone mounts. Of any other, one cannot say."""


class Ground(msgspec.Struct, frozen=True):
    """What a node sees at the path of a run's folder.

    Attributes:
        boot: of the machine, which is another one after each start.
        device, inode: of the folder, or of what is nearest above it where it is not there.
        kind: the file system's.
    """

    boot: str
    device: int
    inode: int
    kind: str


class Sharing(msgspec.Struct, frozen=True):
    """Whether each has a folder of its own; None where one of them looks at something else than is meant. And why."""

    apart: bool | None
    reason: str


def sharing(mine: Ground, theirs: Ground) -> Sharing:
    """Decide for the folders of two nodes."""
    if mine.boot == theirs.boot:
        same = (mine.device, mine.inode) == (theirs.device, theirs.inode)
        return Sharing(not same, f"{'one folder' if same else 'two folders'} of one machine")
    local = [ground.kind in LOCAL for ground in (mine, theirs)]
    if all(local):
        return Sharing(apart=True, reason=f"{mine.kind} here and {theirs.kind} there: each has its own")
    if any(local):
        return Sharing(None, f"it is on {mine.kind} here and on {theirs.kind} there: one of them is not mounted")
    return Sharing(apart=False, reason=f"{mine.kind} here and {theirs.kind} there may be one folder")
