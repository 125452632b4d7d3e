"""One report: raw samples and facts as JSON, a Markdown table, and a plot beside it."""

from __future__ import annotations

import datetime
import json
import math
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.machine import ROOT, file_system, hardware, versions

# Student's t for 95 %, of one degree of freedom upwards.
T95 = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
    2.09,
)
RESULTS = ROOT / "benchmarks" / "results"


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` (0 to 1) of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval (Student's t); half is infinite for a single sample."""
    count = len(samples)
    if count < 2:
        return (samples[0] if samples else math.nan), math.inf
    t = T95[count - 2] if count - 2 < len(T95) else 2.0
    return statistics.fmean(samples), t * statistics.stdev(samples) / math.sqrt(count)


def seconds(value: float) -> str:
    """A time for a table: three digits and a fitting unit."""
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    unit = next((name for name, scale in units.items() if abs(value) >= scale), "µs")
    number = value / units[unit]
    return f"{number:.3g} {unit}" if abs(number) < 1000 else f"{number:.0f} {unit}"


@dataclass
class Report:
    """What one benchmark found. `write()` puts it under benchmarks/results/.

    Attributes:
        name: of the files.
        title: one sentence over the table.
        columns, rows: the table, as text.
        goals: what was to be reached -> what was, in words.
        samples: name -> raw samples, in the unit that the name ends in.
        notes: what a reader must know to judge the numbers.
        module: what was run, where it is not called as the files are.
    """

    name: str
    title: str
    folder: Path
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    goals: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    module: str = ""

    def write(self, results: Path = RESULTS) -> Path:
        """Writes NAME.json and NAME.md; returns the JSON file."""
        facts = {
            "title": self.title,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": shlex.join(["python", "-m", f"benchmarks.{self.module or self.name}", *sys.argv[1:]]),
            "hardware": {**hardware(), "file system": file_system(self.folder)},
            "load at the end": f"{os.getloadavg()[0]:.1f}",
            "versions": versions(),
            "columns": self.columns,
            "rows": self.rows,
            "goals": self.goals,
            "notes": self.notes,
            "samples": {name: [float(f"{x:.6g}") for x in values] for name, values in self.samples.items()},
        }
        results.mkdir(parents=True, exist_ok=True)
        target = results / f"{self.name}.json"
        target.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
        (results / f"{self.name}.md").write_text(render(json.loads(target.read_text())))
        return target


def render(facts: dict) -> str:
    """The Markdown page of a report that was written as JSON."""
    lines = [f"# {facts['title']}", ""]
    table = [facts["columns"], ["---"] * len(facts["columns"]), *facts["rows"]]
    lines += ["| " + " | ".join(row) + " |" for row in table]
    if facts["goals"]:
        lines += ["", "| goal | reached |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in facts["goals"].items())]
    lines += ["", *(f"- {note}" for note in facts["notes"])]
    lines += ["", " · ".join(f"{k}: {v}" for k, v in facts["hardware"].items())]
    lines += ["", " · ".join(f"{k} {v}" for k, v in facts["versions"].items())]
    lines += ["", f"`{facts['command']}` · {facts['date']} · load at the end {facts['load at the end']}", ""]
    return "\n".join(lines)
