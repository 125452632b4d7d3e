"""Other people's files as steps: safetensors and torch.save, sound, damaged and hostile."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

import zerostall
from unit.small_steps import DATA, image, module, store, whole
from zerostall import ExportOptions, ImportOptions, native
from zerostall.errors import (
    CorruptError,
    FormatError,
    RunMismatchError,
    SnapshotNotFoundError,
    StateError,
    StepExistsError,
)
from zerostall.flow import catalog

# ------------------------------------------------------------------------------------------ from safetensors


def test_any_alignment_of_the_header(tmp_path: Path) -> None:
    tensors = {"a": ("U8", 3), "b": ("F32", 20), "c": ("F64", 16), "d": ("BF16", 14)}
    for pad in range(9):
        slots, at = {}, 0
        for name, (code, size) in tensors.items():
            width = {"U8": 1, "F32": 4, "F64": 8, "BF16": 2}[code]
            slots[name] = {"dtype": code, "shape": [size // width], "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(slots).encode() + b" " * pad
        path = tmp_path / f"{pad}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + DATA[:at])
        done = zerostall.import_file(path, tmp_path / "run", pad)
        assert (done.step, done.tensors) == (pad, 4)
    assert all(verdict.clean for verdict in catalog.verify(tmp_path / "run"))
    for pad in range(1, 9):
        assert not catalog.diff(tmp_path / "run", 0, pad).changed
    found = zerostall.load(tmp_path / "run", 3)["model"]
    assert found["c"].numpy().tobytes() == DATA[23:39] and found["d"].view(torch.uint8).numpy().tobytes() == DATA[39:53]


def test_ties_and_names_of_somebody_elses_file(tmp_path: Path) -> None:
    tensors = {"h.0.attn.weight": torch.randn(3, 4), "odd[name]": torch.ones(2, dtype=torch.float16)}
    metadata = {"head.weight": "h.0.attn.weight", "format": "pt", "author": "somebody"}
    safetensors.torch.save_file(tensors, tmp_path / "f.safetensors", metadata)
    done = zerostall.import_file(tmp_path / "f.safetensors", tmp_path / "run", 0)
    assert (done.tensors, done.aliases) == (2, 1)
    found = zerostall.load(tmp_path / "run")["model"]
    assert found["head.weight"].data_ptr() == found["h.0.attn.weight"].data_ptr()
    assert torch.equal(found["h.0.attn.weight"], tensors["h.0.attn.weight"])
    zerostall.export(tmp_path / "run", 0, tmp_path / "g.safetensors", ExportOptions(root="model"))
    assert set(safetensors.torch.load_file(tmp_path / "g.safetensors")) == set(tensors)


def test_an_image_is_a_file_to_import_like_any(tmp_path: Path) -> None:
    shards = [whole("model.w", "float32", 7), whole("model.z", "complex64", 3)]
    store(tmp_path / "run", 1, shards, small=module(*shards))
    link = tmp_path / "link.safetensors"  # as caches of downloads have them
    link.symlink_to(image(tmp_path / "run", 1))
    zerostall.import_file(link, tmp_path / "new", 0, ImportOptions(root=""))
    assert torch.equal(*(zerostall.load(tmp_path / name)["model"]["w"] for name in ("run", "new")))
    with pytest.raises(FormatError, match="give a root"):
        safetensors.torch.save_file({"a..b": torch.ones(1)}, tmp_path / "x.safetensors")
        zerostall.import_file(tmp_path / "x.safetensors", tmp_path / "new", 1, ImportOptions(root=""))


def header(**slots: object) -> bytes:
    text = json.dumps(slots).encode()
    return len(text).to_bytes(8, "little") + text


def slot(code: str = "U8", shape: tuple[int, ...] = (4,), at: tuple[int, int] = (0, 4)) -> dict[str, object]:
    return {"dtype": code, "shape": shape, "data_offsets": at}


HOSTILE = {
    "empty": b"",
    "short": b"\x01\x02",
    "huge header": b"\xff" * 8 + b"{}",
    "header past the end": (1 << 20).to_bytes(8, "little") + b"{}",
    "no JSON": (4).to_bytes(8, "little") + b"{xx}",
    "deep JSON": (20_000).to_bytes(8, "little") + b'{"a":' + b"[" * 19_995,
    "truncated": header(a=slot()) + b"12",
    "trailing": header(a=slot()) + b"12345",
    "hole": header(a=slot(at=(2, 6))) + b"123456",
    "overlap": header(a=slot(), b=slot(at=(2, 6))) + b"123456",
    "negative": header(a=slot(at=(-4, 0))) + b"1234",
    "huge shape": header(a=slot(shape=(1 << 62, 1 << 62))) + b"1234",
    "huge offsets": header(a=slot(shape=(1 << 62,), at=(0, 1 << 62))) + b"1234",
    "wrong size": header(a=slot(shape=(5,))) + b"1234",
    "unknown type": header(a=slot("Q7")) + b"1234",
    "forged types": header(__metadata__={"zerostall.dtypes": '{"a": "complex64"}'}, a=slot()) + b"1234",
    "types no JSON": header(__metadata__={"zerostall.dtypes": "{"}, a=slot()) + b"1234",
    "pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_safetensors_files_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(HOSTILE[kind])
    with pytest.raises(FormatError, match=r"f\.safetensors") as caught:
        zerostall.import_file(path, tmp_path / "run", 1)
    assert len(str(caught.value)) < 1000
    assert not (tmp_path / "run").exists()


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    with pytest.raises(FormatError, match="not a regular file"):
        zerostall.import_file(tmp_path / "fifo.safetensors", tmp_path / "run", 1)
    (tmp_path / "dir.safetensors").mkdir()
    with pytest.raises(FormatError, match="no folder of"):
        zerostall.import_file(tmp_path / "dir.safetensors", tmp_path / "run", 1)
    with pytest.raises(SnapshotNotFoundError, match="does not exist"):
        zerostall.import_file(tmp_path / "no.safetensors", tmp_path / "run", 1)


def test_names_that_cannot_be_refused_as_state(tmp_path: Path) -> None:
    (tmp_path / "f.safetensors").write_bytes(header(**{"n" * 70_000: slot()}) + b"1234")
    with pytest.raises(StateError, match="65535 characters"):
        zerostall.import_file(tmp_path / "f.safetensors", tmp_path / "run", 1)


# --------------------------------------------------------------------------------------------- committing


def test_a_step_is_replaced_only_when_told(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        safetensors.torch.save_file({"w": torch.full((5,), value)}, tmp_path / f"{value:.0f}.safetensors")
    zerostall.import_file(tmp_path / "1.safetensors", tmp_path / "run", 3)
    with pytest.raises(StepExistsError, match="step 3"):
        zerostall.import_file(tmp_path / "2.safetensors", tmp_path / "run", 3)
    assert zerostall.load(tmp_path / "run")["model"]["w"][0] == 1
    zerostall.import_file(tmp_path / "2.safetensors", tmp_path / "run", 3, ImportOptions(replace=True))
    assert zerostall.load(tmp_path / "run")["model"]["w"][0] == 2
    with pytest.raises(RunMismatchError, match="belongs to the run ''"):
        zerostall.import_file(tmp_path / "2.safetensors", tmp_path / "run", 4, ImportOptions(run="other"))
    with pytest.raises(ValueError, match="a step is"):
        zerostall.import_file(tmp_path / "2.safetensors", tmp_path / "run", -1)
    runs = {
        json.loads(path.read_text())["body"]["run"]
        for path in (tmp_path / "run").rglob("*.json")
        if "layouts" not in str(path)
    }
    assert len(runs) == 1


def test_a_folder_that_somebody_writes_to_is_left_alone(tmp_path: Path) -> None:
    from zerostall.errors import RunBusyError
    from zerostall.flow.folder_lock import FolderLock

    safetensors.torch.save_file({"w": torch.ones(5)}, tmp_path / "f.safetensors")
    (tmp_path / "run").mkdir()
    lock = FolderLock(tmp_path / "run")
    with pytest.raises(RunBusyError):
        zerostall.import_file(tmp_path / "f.safetensors", tmp_path / "run", 3)
    lock.close()
    zerostall.import_file(tmp_path / "f.safetensors", tmp_path / "run", 3)


def test_a_file_cut_while_it_is_read_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.safetensors"
    safetensors.torch.save_file({"w": torch.ones(5000)}, path)
    real = native.Pool

    def cut(name: str, threads: int) -> native.Pool:
        os.truncate(path, 300)
        return real(name, threads)

    monkeypatch.setattr(native, "Pool", cut)
    with pytest.raises(CorruptError, match="too early"):
        zerostall.import_file(path, tmp_path / "run", 3)
    assert catalog.snapshots(tmp_path / "run") == []


# ------------------------------------------------------------------------------------------------ from torch


def test_a_state_dict_becomes_a_module(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    torch.save(model.state_dict(), tmp_path / "m.pt")
    done = zerostall.import_file(tmp_path / "m.pt", tmp_path / "run", 4)
    assert (done.tensors, done.aliases) == (3, 1)
    found = zerostall.load(tmp_path / "run", 4)["model"]
    assert list(found) and all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_a_nested_file_keeps_its_names_and_values(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = {"state_dict": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 5, "ema": torch.ones(2).t()}
    torch.save(saved, tmp_path / "m.ckpt")
    zerostall.import_file(tmp_path / "m.ckpt", tmp_path / "run", 0)
    found = zerostall.load(tmp_path / "run")
    assert torch.equal(found["state_dict"]["weight"], model.weight) and found["rest"] == {"epoch": 5}
    assert torch.equal(found["opt"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert found["opt"]["param_groups"] == optimizer.state_dict()["param_groups"]
    zerostall.import_file(tmp_path / "m.ckpt", tmp_path / "run", 1, ImportOptions(key="state_dict"))
    assert set(zerostall.load(tmp_path / "run", 1)) == {"model"}
    with pytest.raises(ValueError, match="it holds state_dict, opt, epoch, ema"):
        zerostall.import_file(tmp_path / "m.ckpt", tmp_path / "run", 2, ImportOptions(key="model"))


class Trap:
    """Unpickling this would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


def test_no_code_of_a_file_is_run(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "trap": Trap(tmp_path / "mark")}, tmp_path / "m.pt")
    with pytest.raises(FormatError, match="code would have to be run"):
        zerostall.import_file(tmp_path / "m.pt", tmp_path / "run", 0)
    assert not (tmp_path / "mark").exists() and not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 speaks of it when it makes one
def test_damaged_torch_files_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(3000)}, tmp_path / "m.pt")
    data = (tmp_path / "m.pt").read_bytes()
    for damaged in (b"", data[:20], data[: len(data) // 2], data[:-30], b"PK\x03\x04" + bytes(100), os.urandom(500)):
        (tmp_path / "d.pt").write_bytes(damaged)
        with pytest.raises(FormatError, match=r"d\.pt"):
            zerostall.import_file(tmp_path / "d.pt", tmp_path / "run", 0)
    with pytest.raises(SnapshotNotFoundError):
        zerostall.import_file(tmp_path / "none.pt", tmp_path / "run", 0)
    os.mkfifo(tmp_path / "fifo.pt")
    with pytest.raises(FormatError, match="not a regular file"):
        zerostall.import_file(tmp_path / "fifo.pt", tmp_path / "run", 0)
    torch.save({"s": torch.eye(3).to_sparse()}, tmp_path / "s.pt")
    with pytest.raises(FormatError, match="sparse"):
        zerostall.import_file(tmp_path / "s.pt", tmp_path / "run", 0)
    assert not (tmp_path / "run").exists()
