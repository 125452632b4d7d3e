"""What is announced as durable was made durable first, in the order of docs/format.md (case A6)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shim.faults import Call, Shim, Trace

TRAIN = """
import sys
import torch
import zerostall

state = {"weights": torch.arange(3_000_000, dtype=torch.float32), "small": torch.ones(5)}
with zerostall.Checkpointer(sys.argv[1], state=state) as ckpt:
    for step in (1, 2):
        state["small"] += 1
        ckpt.save(step).wait("disk", timeout=60)
        open(f"{sys.argv[1]}/announced-{step}", "w").close()
"""


@pytest.fixture(scope="module")
def calls(shim_library: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Every file call of trainer and agent while two steps are saved."""
    where = tmp_path_factory.mktemp("run")
    runtime = tmp_path_factory.mktemp("agent")
    shim = Shim(shim_library, tmp_path_factory.mktemp("shim"))
    environment = {**shim.environment(), "ZEROSTALL_RUNTIME_DIR": str(runtime), "ZEROSTALL_AGENT_IDLE": "1"}
    with Trace(shim, match=f"{where}*") as trace:
        done = subprocess.run(
            [sys.executable, "-c", TRAIN, str(where)], env=environment, capture_output=True, text=True, timeout=100
        )
    assert done.returncode == 0, done.stderr
    return trace.calls


def of(calls: list[Call], op: str, ending: str) -> list[Call]:
    """Successful calls of one kind on paths that end so (writes through partial names count for the name)."""
    found = [call for call in calls if call.op in op.split(",") and call.result >= 0]
    return [call for call in found if ending in (call.second or call.path)]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.json"])
def test_data_is_synced_after_its_last_write_and_before_the_manifest_appears(
    calls: list[Call], step: int, name: str
) -> None:
    path = f"step-{step:012d}/{name}"
    wrote = of(calls, "write,truncate", path)
    synced = of(calls, "fsync,fdatasync", path)
    (published,) = of(calls, "rename", f"step-{step:012d}/manifest.json")
    assert wrote and synced
    last = max(wrote, key=lambda call: call.end)
    assert any(sync.after(last) and published.after(sync) for sync in synced)


@pytest.mark.parametrize("step", [1, 2])
def test_the_manifest_is_synced_before_it_gets_its_name(calls: list[Call], step: int) -> None:
    (published,) = of(calls, "rename", f"step-{step:012d}/manifest.json")
    wrote = [call for call in calls if call.op == "write" and call.path == published.path]
    synced = [call for call in calls if call.op in ("fsync", "fdatasync") and call.path == published.path]
    assert wrote and any(sync.after(wrote[-1]) and published.after(sync) for sync in synced)


@pytest.mark.parametrize("step", [1, 2])
def test_both_folders_are_synced_before_the_step_is_announced(calls: list[Call], step: int) -> None:
    folder = f"step-{step:012d}"
    (published,) = of(calls, "rename", f"{folder}/manifest.json")
    (announced,) = [call for call in of(calls, "open", f"announced-{step}") if call.argument & os.O_CREAT]
    above = str(Path(announced.path).parent)
    for path in (f"{above}/{folder}", above):
        synced = [call for call in calls if call.op == "fsync" and call.path == path and call.result == 0]
        assert any(sync.after(published) and announced.after(sync) for sync in synced), path


def test_the_layout_is_durable_before_the_first_manifest(calls: list[Call]) -> None:
    (published,) = of(calls, "rename", "step-000000000001/manifest.json")
    renamed = [call for call in of(calls, "rename", "/layouts/") if published.after(call)]
    synced = [call for call in calls if call.op == "fsync" and call.path.endswith("/layouts")]
    assert renamed
    for copy in renamed:
        assert any(sync.after(copy) and published.after(sync) for sync in synced), copy.second


def test_the_trainer_does_no_file_work_in_the_run_folder(calls: list[Call]) -> None:
    trainer = {call.pid for call in calls if "announced-" in call.path}
    touched = {call.path for call in calls if call.pid in trainer and call.op != "read"}
    assert {Path(path).name for path in touched} == {"announced-1", "announced-2"}
