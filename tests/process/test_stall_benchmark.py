"""The GPU benchmark runs from its first process to its report; on the CPU, with a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import ROOT


def stall(*arguments: object, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.stall", *map(str, arguments)]
    environment = {**environment, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.timeout(600)
def test_it_measures_and_reports(tmp_path: Path, agent_environment: dict[str, str]) -> None:
    pytest.importorskip("matplotlib")
    raw = tmp_path / "raw.json"
    ran = ["--device", "cpu", "--models", "tiny", "--systems", "none,torch.save,overlap,nvrx", "--minutes", 30]
    done = stall("run", *ran, "--folder", tmp_path, "--out", raw, environment=agent_environment)
    assert done.returncode == 0, done.stderr
    facts = json.loads(raw.read_text())
    found = {one["peer"]: one for one in facts["subjects"]}
    failure = found.pop("nvrx")["failure"]
    assert "exit code" in failure  # it is not installed, or finds no device; the others are measured all the same
    assert set(found) == {"none", "torch.save", "overlap"}
    assert [one["failure"] for one in found.values()] == ["", "", ""], done.stderr
    assert found["overlap"]["correct"] == found["torch.save"]["correct"] == "bit for bit"
    assert all(outcome["bare"] and outcome["saves"] for outcome in found["overlap"]["outcomes"])
    done = stall("report", raw, environment=agent_environment)
    assert done.returncode == 0, done.stderr
    written = {path.suffixes[-1] for path in map(Path, done.stdout.split())}
    assert written == {".md", ".png", ".json"}
    page = (tmp_path / "raw.md").read_text()
    assert "**zerostall** (overlap)" in page and "bit for bit" in page and "- NVRx, tiny: exit code" in page
    trace = json.loads((tmp_path / "raw.trace.json").read_text())["traceEvents"]
    assert {"save", "update", "drain"} <= {event["name"] for event in trace}
