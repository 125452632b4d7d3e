"""A bucket that was copied into a folder is a run: read, checked, restored from, gone on with, cleared away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import zerostall
from stores.server import Server
from zerostall import native
from zerostall.core.candidates import Past
from zerostall.errors import CorruptError
from zerostall.tiers.disk import DiskTier


@pytest.fixture
def copy(s3_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every object below a URL as a file; the run has steps 5 and 6."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    bucket, source, folder = s3_server.new_bucket(), tmp_path / "source.safetensors", tmp_path / "copy"
    for step in (5, 6):
        save_file({"w": np.arange(9, dtype=np.float32) * step}, source)
        zerostall.import_file(source, f"s3://{bucket}/run", step, zerostall.ImportOptions(run="gpt"))
    for key in s3_server.keys(bucket):
        path = folder / key.removeprefix("run/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(s3_server.object(bucket, key))
    return folder


def test_it_is_read_and_checked(copy: Path) -> None:
    assert not list(copy.glob("step-*/*.safetensors"))  # they are where the bucket has them
    assert [(one.step, one.clean) for one in zerostall.snapshots(copy)] == [(5, True), (6, True)]
    assert all(verdict.clean for verdict in zerostall.verify(copy))
    assert torch.equal(zerostall.load(copy)["model"]["w"], torch.arange(9.0) * 6)  # type: ignore[index]
    image = next(copy.glob("images/step-000000000006/*.safetensors"))
    image.write_bytes(image.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptError, match="fails its checksum"):
        zerostall.load(copy, 6)
    image.unlink()
    assert [(one.step, one.clean) for one in zerostall.snapshots(copy)] == [(5, True), (6, False)]


@pytest.mark.usefixtures("own_agent")
def test_training_goes_on_in_it(copy: Path) -> None:
    state = {"w": torch.zeros(9)}
    with zerostall.Checkpointer(copy, run="gpt", keep=1, model=state) as ckpt:
        assert ckpt.restore() == 6 and torch.equal(state["w"], torch.arange(9.0) * 6)
        state["w"] += 1
        ckpt.save(7).wait("disk", timeout=120)
    assert [one.step for one in zerostall.snapshots(copy)] == [7]
    assert not list(copy.glob("images/*"))  # of steps that retention let go


def test_what_nobody_needs_goes_and_no_more(copy: Path) -> None:
    pool = native.Pool("test", 1)
    disk = DiskTier(copy, pool)
    five, six = (copy / "images" / f"step-00000000000{step}" for step in (5, 6))
    disk.set_aside([Past(6, disk.manifest(6).created)])
    assert disk.rewound() == [6] and six.is_dir()
    disk.forget_rewound(6)
    assert not six.exists() and five.is_dir()
    disk.evict(5)
    assert not five.exists() and disk.steps() == []
    pool.close()
