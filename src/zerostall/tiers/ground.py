"""What this node sees at a path; see `core.ground`."""

from __future__ import annotations

from pathlib import Path

from zerostall.core.ground import Ground

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")


def ground_of(folder: Path) -> Ground:
    """Raises OSError where nothing of it can be looked at."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    facts = there.stat()
    return Ground(_BOOT.read_text().strip(), facts.st_dev, facts.st_ino, _kind(there))


def _kind(path: Path) -> str:
    """The type of the file system that is mounted nearest above it."""
    found = (Path("/"), "")
    for line in _MOUNTS.read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = Path(left.split()[4].encode().decode("unicode_escape"))  # a space in it is \\040
        if path.resolve().is_relative_to(point) and len(point.parts) >= len(found[0].parts):
            found = point, right.split()[0]
    return found[1]
