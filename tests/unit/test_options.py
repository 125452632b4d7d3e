"""What a `Checkpointer` may be told: a wrong choice is refused by its name, before anything is started."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import zerostall
from zerostall.tiers.urls import is_url
from zerostall.trainer.options import step_number


@pytest.mark.parametrize("seconds", ["5m", -1, float("nan"), float("inf"), None])
def test_the_disk_interval_is_a_number_of_seconds(seconds, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"disk_interval=.* is not a number of seconds"):
        zerostall.Checkpointer(tmp_path / "run", disk_interval=seconds)


@pytest.mark.parametrize("where", ["s3:/bucket/run", "gs:bucket/run", "az:", "abfss:/x"])
def test_a_url_with_a_slash_too_few_is_no_folder(where, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is no URL: .*://bucket/run"):
        zerostall.Checkpointer(where)
    with pytest.raises(ValueError, match=r"is no URL: .*://bucket/run"):
        zerostall.snapshots(where)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["./s3:/x", "runs:today", "c:run", "s3"])
def test_a_folder_may_have_a_colon_in_its_name(where) -> None:
    assert not is_url(where)


@pytest.mark.parametrize("step", [1.5, True, "7", None])
def test_a_step_is_a_whole_number(step) -> None:
    with pytest.raises(TypeError, match="step must be a number of steps"):
        step_number(step)


def test_a_folder_of_a_step_is_no_runs(tmp_path) -> None:
    """The likeliest slip: it would become a run of its own within the other one."""
    step = tmp_path / "run" / "step-000000000003"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    save_file({"weight": np.zeros(3)}, tmp_path / "model.safetensors")
    told = f"is step 3 of a run.*{tmp_path / 'run'}$"
    with pytest.raises(ValueError, match=told):
        zerostall.Checkpointer(step)
    with pytest.raises(ValueError, match=told):
        zerostall.import_file(tmp_path / "model.safetensors", step, 1)
    for reads in (zerostall.snapshots, zerostall.load, zerostall.verify):
        with pytest.raises(zerostall.errors.SnapshotNotFoundError, match="is step 3 of a run"):
            reads(step)
    assert [path.name for path in step.iterdir()] == ["manifest.json"]
