"""How much memory this process may use: the machine's, or what a control group that it is in leaves of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Files:
    """What a version of control groups calls them."""

    limits: tuple[str, ...]
    usage: str
    idle: str  # in memory.stat: pages of files that the kernel takes back before it refuses any


_FIRST = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def limit(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes that this process may use at most."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(bound for _, _, bound in _bounds(proc, groups))])


def available(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes that this process may take without anybody's being swapped out, as far as the kernel knows."""
    free = limit(proc, groups) // 4
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    for folder, files, bound in _bounds(proc, groups):
        free = min(free, max(0, bound - (_number(folder / files.usage) or 0) + _idle(folder, files)))
    return free


def _bounds(proc: Path, groups: Path) -> Iterator[tuple[Path, _Files, int]]:
    """The groups that this process is in, directly or not, and the least that each allows."""
    for folder, files in _folders(proc, groups):
        bounds = [bound for name in files.limits if (bound := _number(folder / name)) is not None]
        if bounds:
            yield folder, files, min(bounds)


def _folders(proc: Path, groups: Path) -> Iterator[tuple[Path, _Files]]:
    """Where they are: in a container, that of the container may be shown at the very top."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tops, files = [groups, groups / "unified"], _SECOND
        elif "memory" in controllers.split(","):
            tops, files = [groups / "memory"], _FIRST
        else:
            continue
        names = [name for name in path.split("/") if name]
        if ".." in names:
            names = []  # the group is outside of what this process sees
        for top in tops:
            yield from ((top.joinpath(*names[:depth]), files) for depth in range(len(names), -1, -1))


def _number(path: Path) -> int | None:
    """None where there is none: no such group here, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _idle(folder: Path, files: _Files) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{files.idle} ")), 0)
