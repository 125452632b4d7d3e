"""What a `Checkpointer` may be told: a wrong choice is refused by its name, before anything is started."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import zerostall
from zerostall.core.steps import step_number
from zerostall.tiers.urls import is_url
from zerostall.trainer.state import Asked


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


@pytest.mark.parametrize("shapes", [["model.weight"], {"model.weight": 3}, {"model.weight": "3, 4"}, 5])
def test_expected_shapes_are_shapes(shapes, tmp_path) -> None:
    with pytest.raises(TypeError, match=r"expect_shapes=.* is not of names and shapes"):
        zerostall.Checkpointer(tmp_path / "run", expect_shapes=shapes)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("run", 5),
        ("run", "a\nb"),
        ("only", 5),
        ("only", [5]),
        ("require_finite", True),
        ("require_finite", []),
        ("source_checks", "1"),
        ("source_checks", None),
        ("preempt", None),
        ("preempt", "SIGTERM"),
        ("grace", "30s"),
        ("peer", 1),
        ("peer", "yes"),
        ("disks", None),
        ("disks", [5]),
        ("remote", 5),
        ("where", None),
        ("where", b"run"),
        ("where", "~/run"),
    ],
)
def test_what_makes_no_sense_is_said_of_the_option(option, value, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError), match=rf"^{option}( |:|=)"):
        zerostall.Checkpointer(**{"where": tmp_path / "run"} | {option: value}, model={"w": np.ones(3)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("only=5", {"only": 5}),
        ("rename='a=b'", {"rename": "a=b"}),
        ("rename 'a' to None", {"rename": {"a": None}}),
        ("strict='loose'", {"strict": "loose"}),
        ("meta_to='gpu'", {"meta_to": "gpu"}),
        ("meta_to='meta'", {"meta_to": "meta"}),
        ("meta_to='cuda:99'", {"meta_to": "cuda:99"}),
    ],
)
def test_what_a_restore_cannot_mean_is_said_of_the_option(words, asked) -> None:
    with pytest.raises((TypeError, ValueError, zerostall.errors.CapabilityError), match=f"^{words}"):
        Asked(**asked).insist()


def test_functions_say_what_they_were_given(tmp_path) -> None:
    (tmp_path / "x.pt").write_bytes(b"")
    for device, words in (("gpu", "device='gpu' is no device"), ("cuda:99", "device='cuda:99': torch sees")):
        with pytest.raises((ValueError, zerostall.errors.CapabilityError), match=words):
            zerostall.load(tmp_path, device=device)
    with pytest.raises(TypeError, match=r"options=.*ExportOptions"):
        zerostall.export(tmp_path, None, tmp_path / "y.pt", {"weights": True})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"options=.*ImportOptions"):
        zerostall.import_file(tmp_path / "x.pt", tmp_path, 1, {"root": ""})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="shard_size is a number of bytes, not '2GB'"):
        zerostall.ExportOptions(shard_size="2GB")  # pyright: ignore[reportArgumentType]
    for number in ("1", 1.5, True):
        with pytest.raises(TypeError, match="step must be a number of steps"):
            zerostall.verify(tmp_path, number)  # pyright: ignore[reportArgumentType]
