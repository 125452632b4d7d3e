"""The GPU benchmarks run from their first process to their reports; on the CPU, with a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import ROOT


def bench(name: str, *arguments: object, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", *map(str, arguments)]
    environment = {**environment, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.timeout(600)
def test_it_measures_and_reports(tmp_path: Path, agent_environment: dict[str, str]) -> None:
    pytest.importorskip("matplotlib")
    raw = tmp_path / "raw.json"
    systems = "none,plain-copies,torch.save,overlap,nvrx"
    ran = ["--device", "cpu", "--models", "tiny", "--systems", systems, "--minutes", 30]
    done = bench("stall", "run", *ran, "--folder", tmp_path, "--out", raw, environment=agent_environment)
    assert done.returncode == 0, done.stderr
    facts = json.loads(raw.read_text())
    found = {one["peer"]: one for one in facts["subjects"]}
    failure = found.pop("nvrx")["failure"]
    assert "Error: " in failure  # it is not installed, or finds no device; the others are measured all the same
    assert set(found) == {"none", "plain-copies", "torch.save", "overlap"}
    assert [one["failure"] for one in found.values()] == [""] * 4, done.stderr
    assert {found[name]["correct"] for name in ("plain-copies", "torch.save", "overlap")} == {"bit for bit"}
    assert all(outcome["bare"] and outcome["saves"] for outcome in found["overlap"]["outcomes"])
    done = bench("stall", "report", raw, environment=agent_environment)
    assert done.returncode == 0, done.stderr
    written = {path.suffixes[-1] for path in map(Path, done.stdout.split())}
    assert written == {".md", ".png", ".json"}
    page = (tmp_path / "raw.md").read_text()
    assert "**zerostall** (overlap)" in page and "bit for bit" in page and f"- NVRx, tiny: {failure}" in page
    trace = json.loads((tmp_path / "raw.trace.json").read_text())["traceEvents"]
    assert {"save", "update", "drain"} <= {event["name"] for event in trace}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_trainer_comes_back(tmp_path: Path, agent_environment: dict[str, str], ranks: int) -> None:
    ran = ["--model", "tiny", "--device", "cpu", "--steps", 4, "--folder", tmp_path, "--results", tmp_path]
    ran += ["--ranks", ranks]
    done = bench("recovery", *ran, environment=agent_environment)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / f"recovery{'_ranks' if ranks > 1 else ''}.json").read_text())
    assert facts["goals"]["the state is that of the save, bit for bit"] == "yes"
    assert facts["goals"]["out of host memory"] == "host"
    assert [row[0] for row in facts["rows"]][-1] == "first step finished"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_width_is_measured_and_its_page_written(tmp_path: Path, agent_environment: dict[str, str]) -> None:
    """Tensor parallel and FSDP2 in one, which no other test of the benchmarks trains."""
    ran = ["--device", "cpu", "--ranks", 2, "--only", "stalls", "--ways", "2d", "--pairs", 1, "--limit", 400]
    done = bench("width", *ran, "--folder", tmp_path, "--to", tmp_path, environment=agent_environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "width-cpu-2.json").read_text())["rows"]
    counted = {of for part, of, what, _ in rows if (part, what) == ("stalls", "saves, skipped")}
    assert counted == {"2d", "2d, a save every 5 steps"}
    assert "- reshard-disk: not run" in (tmp_path / "width-cpu-2.md").read_text()


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_width(tmp_path: Path, agent_environment: dict[str, str], ranks: int) -> None:
    ran = ["--device", "cpu", "--ranks", ranks, "--pairs", 1, "--limit", 1200, "--folder", tmp_path, "--to", tmp_path]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.width", *map(str, ran)]
    done = subprocess.run(command, cwd=ROOT, env=agent_environment, capture_output=True, text=True, timeout=2900)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / f"width-cpu-{ranks}.json").read_text())
    parts = ("death-of-one", "death-of-all", "reshard-host", "reshard-disk")
    exact = {goal: reached for goal, reached in facts["goals"].items() if "bit for bit" in goal}
    assert exact == {f"{part}: the state is that of the save, bit for bit": "yes" for part in parts}
    of = {(part, one) for part, one, *_ in facts["rows"]}
    assert {("stalls", way) for way in ("ddp", "fsdp2", "2d")} <= of
    assert {("peer", way) for way in (("ring", "straight") if ranks == 2 else ("ring", "pairs", "straight"))} <= of
    hops = (f"{ranks} → {ranks // 2}", f"{ranks // 2} → {ranks}")
    assert {(part, hop) for part in parts[2:] for hop in hops} <= of
