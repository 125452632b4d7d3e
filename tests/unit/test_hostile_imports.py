"""Checkpoints made to do harm: a clear error, and nothing is left behind."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zerostall
from zerostall.errors import FormatError, ZerostallError
from zerostall.flow import importing


def archive(path: Path, *entries: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in entries:
            file.writestr(name, data)
    return path


def refused(source: Path, words: str) -> None:
    where = source.parent / "run"
    with pytest.raises(ZerostallError, match=words):
        zerostall.import_file(source, where, step=1)
    assert not where.exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives(tmp_path: Path) -> None:
    nothing = pickle.dumps({"a": 1})
    bomb = archive(
        tmp_path / "a.pt", ("a/data.pkl", nothing), ("a/data/0", b"\0" * (1 << 20)), method=zipfile.ZIP_DEFLATED
    )
    refused(bomb, "compressed")
    refused(archive(tmp_path / "b.pt", ("../../a/data.pkl", nothing)), "not one of torch.save")
    refused(archive(tmp_path / "c.pt", ("a/data.pkl", nothing), ("b/data.pkl", nothing)), "not one of torch.save")
    refused(archive(tmp_path / "d.pt", ("a/data.pkl", nothing), ("a/data.pkl", pickle.dumps({"a": 2}))), "in it twice")


def test_tensors_that_overlap_one_another_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_ANYHOW", 1 << 20)
    base = torch.arange(25_000)
    torch.save({f"t{k}": base[k:] for k in range(300)}, tmp_path / "views.pt")
    refused(tmp_path / "views.pt", "tensors in it overlap one another")
    torch.save({"t": torch.zeros(1).expand(1 << 30), "u": base, "v": base[5:]}, tmp_path / "honest.pt")
    assert zerostall.import_file(tmp_path / "honest.pt", tmp_path / "run", step=1).nbytes < 1 << 20


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "what is outside": lambda path: path.symlink_to("/etc/passwd"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_files_of_a_dcp_folder_that_are_none(tmp_path: Path, kind: str, name: str) -> None:
    dcp.save({"m": {"w": torch.ones(1000)}}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp" / name).unlink()
    KINDS[kind](tmp_path / "dcp" / name)
    refused(tmp_path / "dcp", "not a regular file|a link|behind the end|is no|no torch.save|is damaged|directory")
    shutil.rmtree(tmp_path / "dcp")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_files_that_are_none(tmp_path: Path, kind: str, suffix: str) -> None:
    KINDS[kind](tmp_path / f"x{suffix}")
    with pytest.raises((FormatError, OSError)):
        zerostall.import_file(tmp_path / f"x{suffix}", tmp_path / "run", step=1)
    assert not (tmp_path / "run").exists()
