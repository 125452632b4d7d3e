"""Fills the measured table of README.md from benchmarks/results/loop_time.json, so that no number is typed by hand."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.report import RESULTS

BEGIN = "<!-- measured: written by benchmarks/readme.py -->"
END = "<!-- /measured -->"
SHOWN = ("", "stall p50", "p99", "max", "added per save", "× plain copy")
PENDING = "*Not measured yet: `make bench` writes this table.*"


def measured(results: Path = RESULTS) -> str:
    """The table and what it was measured on; a plain statement when there is none."""
    source = results / "loop_time.json"
    if not source.exists():
        return PENDING
    facts = json.loads(source.read_text())
    wanted = [facts["columns"].index(name) for name in SHOWN]
    lines = [SHOWN, ("---",) * len(SHOWN), *([row[i] for i in wanted] for row in facts["rows"])]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    machine = ", ".join(facts["hardware"][key] for key in ("cpu", "memory", "file system"))
    cores = facts["hardware"]["cores"]
    return (
        f"{facts['title']}.\n\n{table}\n\n"
        f"{machine}, {cores} cores; torch {facts['versions']['torch']}; `{facts['command']}`, {facts['date']}.\n"
        "All rows from one run; raw samples in [benchmarks/results](benchmarks/results)."
    )


def fill(readme: Path = ROOT / "README.md", results: Path = RESULTS) -> None:
    """Replaces what stands between the two marks."""
    head, rest = readme.read_text().split(BEGIN)
    _, tail = rest.split(END)
    readme.write_text(f"{head}{BEGIN}\n{measured(results)}\n{END}{tail}")


if __name__ == "__main__":
    fill()
