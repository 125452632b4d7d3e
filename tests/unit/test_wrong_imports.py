"""What is no checkpoint, or another one than was said, is refused by an error of ours that names it."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import safetensors.torch
import torch

import zerostall
from zerostall import ImportOptions
from zerostall.core.exchange import ImportFormat
from zerostall.errors import CapabilityError, FormatError, ZerostallError

FORMATS: tuple[ImportFormat | None, ...] = (None, *get_args(ImportFormat))


def saved(*, old: bool = False) -> bytes:
    into = io.BytesIO()
    torch.save({"w": torch.ones(30)}, into, _use_new_zipfile_serialization=not old)
    return into.getvalue()


def tarred() -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w") as file:
        file.addfile(tarfile.TarInfo("storages"))
    return into.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    "nothing": bytes,
    "a word": lambda: b"hello",
    "text": lambda: b"hello world, this is no archive at all\n" * 50,
    "an object": lambda: b"{}",
    "a list": lambda: b"[1, 2]",
    "a deep list": lambda: b"[" * 100_000,
    "an index of numbers": lambda: json.dumps({"weight_map": {"a": 1}}).encode(),
    "an index that is no text": lambda: b'{"weight_map": {"a": "\xff"}}',
    "an empty archive": lambda: b"PK\5\6" + bytes(18),
    "the begin of an archive": lambda: b"PK\3\4" + bytes(200),
    "a bare pickle": lambda: pickle.dumps({"a": 1}),
    "a bare pickle of old": lambda: pickle.dumps({"a": 1}, 0),
    "a tar": tarred,
    "compressed": lambda: gzip.compress(saved()),
    "zeros": lambda: bytes(5000),
    "ones": lambda: b"\xff" * 5000,
    "half of an archive": lambda: saved()[: len(saved()) // 2],
    "half of an old file": lambda: saved(old=True)[:300],
    "the begin of an old file": lambda: saved(old=True)[:60],
    "half a safetensors file": lambda: safetensors.torch.save({"w": torch.ones(30)})[:70],
}


@pytest.mark.parametrize("content", FILES)
def test_a_file_that_is_no_checkpoint_is_named_whatever_it_is_taken_for(tmp_path: Path, content: str) -> None:
    for suffix in ("", ".pt", ".safetensors", ".index.json"):
        path = tmp_path / f"x{suffix}"
        path.write_bytes(FILES[content]())
        for kind in FORMATS:
            for dtype in (None, "float16"):
                with pytest.raises(ZerostallError) as caught:
                    zerostall.import_file(path, tmp_path / "run", 1, ImportOptions(format=kind, dtype=dtype))
                text = str(caught.value)
                assert str(path) in text and "list index" not in text and len(text) < 1000, (kind, text)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"hello world", "is no file of torch.save"),
        (safetensors.torch.save({"w": torch.ones(3)}), 'say format="safetensors"'),
        (b'{"weight_map": {}}', 'say format="huggingface"'),
        (b"PK\5\6" + bytes(18), "with nothing in it"),
        (pickle.dumps({"w": 1}), "is a bare pickle"),
    ],
)
def test_what_it_looks_like_is_said(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(FormatError, match=words):
        zerostall.import_file(tmp_path / "x.bin", tmp_path / "run", 1)


def test_a_file_of_the_old_way_comes_in(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(saved(old=True))
    zerostall.import_file(tmp_path / "x.bin", tmp_path / "run", 1)
    assert zerostall.load(tmp_path / "run")["model"]["w"].tolist() == [1.0] * 30


FOLDERS: dict[str, dict[str, bytes]] = {
    "nothing": {},
    "others' files": {"readme.txt": b"hello", "x.pt.tmp": b"1"},
    "an index that is none": {"model.safetensors.index.json": b"hello"},
    "an index of nothing there": {"model.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}'},
    "two files without an index": {"a.safetensors": b"1", "b.safetensors": b"1"},
    "metadata that is none": {".metadata": b"hello"},
    "empty metadata": {".metadata": b""},
    "metadata of something else": {".metadata": pickle.dumps([1])},
    "items that are none": {"model_0.pt": b"hello"},
    "items that are empty": {"model_0.pt": b"", "more_0.json": b""},
    "values that are none": {"model_0.pt": saved(), "more_0.json": b"\xff"},
    "the same twice": {"model_0.pt": saved(), "model_0.json": b"{}"},
}


@pytest.mark.parametrize("content", FOLDERS)
def test_a_folder_that_is_no_checkpoint_is_named_whatever_it_is_taken_for(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, data in FOLDERS[content].items():
        (folder / name).write_bytes(data)
    for kind in FORMATS:
        with pytest.raises(ZerostallError) as caught:
            zerostall.import_file(folder, tmp_path / "run", 1, ImportOptions(format=kind))
        assert str(folder) in str(caught.value) and "does not exist" not in str(caught.value), (kind, caught.value)
    assert not (tmp_path / "run").exists()


def ranks(folder: Path, *states: object, name: str = "model") -> Path:
    folder.mkdir(exist_ok=True)
    for rank, state in enumerate(states):
        torch.save(state, folder / f"{name}_{rank}.pt")
    return folder


def test_ranks_that_contradict_each_other_are_refused_by_name_and_number(tmp_path: Path) -> None:
    """Nobody can say which is right, or how the parts fit together."""
    w = torch.arange(6.0)
    cases: dict[str, list[object]] = {
        "model.w is whole and has other elements on rank 2": [{"w": w}, {"w": w}, {"w": w + 1}],
        "model.w has another shape or type on rank 1": [{"w": w}, {"w": w[:3].clone()}],
        r"model.w\.x\[1\] has another shape or type on rank 1": [{"w": {"x": [1, w]}}, {"w": {"x": [1, w.half()]}}],
        "model.w is a tensor on one rank and something else on rank 1": [{"w": w}, {"w": 3}],
    }
    for number, (words, states) in enumerate(cases.items()):
        with pytest.raises(FormatError, match=words) as caught:
            zerostall.import_file(ranks(tmp_path / f"{number}", *states), tmp_path / "run", 1)
        assert "--key" in caught.value.hint
    for rank in range(2):
        safetensors.torch.save_file({"w": w}, tmp_path / f"model_{rank}.safetensors")
    with pytest.raises(CapabilityError, match="do not say how they fit together") as unclear:
        zerostall.import_file(tmp_path, tmp_path / "run", 1, ImportOptions(format="torch_checkpointing"))
    assert "dcp.save" in unclear.value.hint
    assert not (tmp_path / "run").exists()


def test_an_item_may_be_taken_alone_though_others_are_each_ranks_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = ranks(tmp_path / "folder", {"w": torch.ones(3)}, {"w": torch.ones(3), "extra": torch.zeros(2)})
    ranks(folder, {"state": torch.ones(5)}, {"state": torch.zeros(5)}, name="rng")
    ranks(folder, {"epoch": 1, "ids": [0]}, {"epoch": 1, "ids": [7]}, name="values")
    with pytest.raises(FormatError, match=r"rng\.state is whole and has other elements on rank 1"):
        zerostall.import_file(folder, tmp_path / "run", 1)
    zerostall.import_file(folder, tmp_path / "run", 1, ImportOptions(key="model"))
    assert set(zerostall.load(tmp_path / "run", 1)["model"]) == {"w", "extra"}
    for rank in range(2):
        (folder / f"rng_{rank}.pt").unlink()
    zerostall.import_file(folder, tmp_path / "run", 2)
    assert "values.ids[0] (rank 1)" in caplog.text and "epoch" not in caplog.text
    assert zerostall.load(tmp_path / "run", 2)["values"] == {"epoch": 1, "ids": [0]}


def test_tensors_at_one_place_of_two_files_are_two(tmp_path: Path) -> None:
    """They were taken for one, and the second had the first one's bytes."""
    folder = ranks(tmp_path / "folder", {"w": torch.ones(300)})
    ranks(folder, {"w": torch.zeros(300)}, name="average")
    assert zerostall.import_file(folder, tmp_path / "run", 1).tensors == 2
    found = zerostall.load(tmp_path / "run", 1)
    assert found["model"]["w"].sum() == 300 and found["average"]["w"].sum() == 0
