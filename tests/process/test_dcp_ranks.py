"""torch.distributed.checkpoint on zerostall's files, by ranks of gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import forked
import zerostall
from ranks.dcp_rank import FULL

PATIENCE = 270


@pytest.mark.timeout(300)
def test_two_ranks_save_and_load_in_other_layouts(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        forked.start(
            "-m", "ranks.dcp_rank", rank, 2, tmp_path, environment=environment, output=tmp_path / f"said-{rank}"
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            rank.wait(PATIENCE)
    finally:
        for rank in ranks:
            rank.kill()
    for text in [rank.printed() for rank in ranks]:
        lines = [line for line in text.splitlines() if line.startswith(("refused", "ended"))]
        assert lines == ["refused ['StateError']", "refused ['StepExistsError']", "ended"], text

    run = tmp_path / "run"
    assert [(snapshot.step, snapshot.world, snapshot.clean) for snapshot in zerostall.snapshots(run)] == [
        (step, 2, True) for step in (1, 2, 3)
    ]
    assert all(verdict.clean for verdict in zerostall.verify(run))
    assert sorted(path.name for path in run.iterdir() if path.name.startswith("step")) == [
        f"step-{step:012d}" for step in (1, 2, 3)
    ]
    found = zerostall.load(run, 1)
    assert all(torch.equal(found["model"][name], full) for name, full in FULL.items())
    assert found["progress"] == {"epoch": 1, "seen": [1, 2]} and torch.equal(found["rank1"]["own"], torch.ones(2))

    # What DCP itself wrote, with the same ranks, comes in as the same.
    zerostall.import_file(tmp_path / "plain", tmp_path / "imported", 1)
    other = zerostall.load(tmp_path / "imported")
    assert all(torch.equal(other["model"][name], found["model"][name]) for name in found["model"])
    assert other["progress"] == found["progress"]
