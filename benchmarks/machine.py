"""What a number was measured on: hardware, versions, file system."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("zerostall", "torch", "numpy", "torch_checkpointing")


def hardware() -> dict[str, str]:
    """CPU, cores, memory and kernel of this machine."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "CPU part")):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": f"{model} ({platform.machine()})",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Versions of what takes part, and the commit measured."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found["commit"] = git.stdout.strip() or "unknown"
    return found


def file_system(folder: Path) -> str:
    """Type of the file system that holds `folder`."""
    where = os.path.realpath(folder)
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, name, *_ = line.split()
        if (where == point or where.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, name
    return kind


def end_on_signals() -> None:
    """A signal ends this process as an exception would, so that it ends what it has started."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
