"""What the agent costs, read from the operating system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def agent_pid() -> int:
    """The process id of the agent of this ZEROSTALL_RUNTIME_DIR."""
    command = [sys.executable, "-m", "zerostall.cli", "agent", "status", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return int(json.loads(done.stdout)["pid"])


def private_bytes(pid: int) -> int:
    """Resident memory of a process beside memory that it shares (its segments)."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return 1024 * (int(fields["RssAnon"].split()[0]) + int(fields["RssFile"].split()[0]))


def segment_bytes(pid: int) -> int:
    """Memory really taken by the memfd segments that a process holds open, each counted once."""
    found: dict[int, int] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "/memfd:" in str(link.readlink()):
                facts = link.stat()
                found[facts.st_ino] = facts.st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(found.values())


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
