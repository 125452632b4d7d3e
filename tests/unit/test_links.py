"""Links where folders are expected: followed to a run, never to a step, and round in a circle they are told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import zerostall
from zerostall.cli.app import app
from zerostall.errors import SnapshotNotFoundError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 and 2; the folder of step 2 was moved elsewhere, and a link left in its place."""
    source, where = tmp_path / "in.safetensors", tmp_path / "run"
    save_file({"w": np.ones(3, np.float32)}, source)
    for step in (1, 2):
        zerostall.import_file(source, where, step)
    folder = where / "step-000000000002"
    shutil.move(folder, tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    return where


def test_a_step_that_is_a_link_is_left_out_and_it_is_said(run: Path, tmp_path: Path) -> None:
    assert [snapshot.step for snapshot in zerostall.snapshots(run)] == [1]
    with pytest.raises(SnapshotNotFoundError, match=r"no step 2 in .*: it is a link, and links"):
        zerostall.verify(run, 2)
    told = CliRunner().invoke(app, ["ls", str(run)]).stdout
    assert "left out, for they are links, which are not followed: 2" in told
    assert json.loads(CliRunner().invoke(app, ["ls", str(run), "--json"]).stdout)["links"] == [2]
    replace = zerostall.ImportOptions(replace=True)
    zerostall.import_file(tmp_path / "in.safetensors", run, 2, replace)
    assert [verdict.clean for verdict in zerostall.verify(run)] == [True, True]
    assert (tmp_path / "moved" / "manifest.json").exists()  # what the link led to is nobody's to remove


def test_links_that_lead_round_in_a_circle_are_told(run: Path, tmp_path: Path, own_agent: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for look in (zerostall.snapshots, zerostall.verify, zerostall.load):
        with pytest.raises(SnapshotNotFoundError, match="is a link that leads nowhere"):
            look(loop)
    for write in (
        lambda: zerostall.import_file(tmp_path / "in.safetensors", loop, 1),
        lambda: zerostall.import_file(loop, run, 3),
        lambda: zerostall.export(run, 1, loop / "out.safetensors"),
        lambda: zerostall.Checkpointer(loop, state={"n": 1}),
    ):
        with pytest.raises(OSError, match="link"):
            write()


def test_a_run_may_be_reached_by_a_link(run: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(run)
    assert [snapshot.step for snapshot in zerostall.snapshots(link)] == [1]
