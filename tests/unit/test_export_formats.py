"""Exports of steps that several ranks hold, into shards, under other names, as another type."""

from __future__ import annotations

import itertools
import json
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import zerostall
from sharded_steps import store_ranks
from zerostall import ExportOptions
from zerostall.core.layout import Shard, View
from zerostall.errors import CapabilityError, CorruptError, FormatError, StorageError


def boxes(name: str, array: np.ndarray, cuts: list[list[int]]) -> list[tuple[Shard, bytes]]:
    """The array cut into boxes along each dimension, in order."""
    found = [((), ())]
    for cut in cuts:
        found = [((*start, a), (*end, b)) for start, end in found for a, b in itertools.pairwise(cut)]
    made = []
    for start, end in found:
        part = array[tuple(slice(a, b) for a, b in zip(start, end))]
        shard = Shard(name, str(array.dtype), part.shape, array.shape, start)
        made.append((shard, np.ascontiguousarray(part).tobytes()))
    return made


def test_tensors_spread_over_ranks_come_out_whole(tmp_path: Path) -> None:
    rows = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
    grid = np.arange(6 * 4 * 3, dtype=np.int64).reshape(6, 4, 3)
    whole = np.arange(9, dtype=np.int16)
    by_rows, by_grid = boxes("m.rows", rows, [[0, 3, 7], [0, 5]]), boxes("m.grid", grid, [[0, 6], [0, 1, 4], [0, 3]])
    replica = (Shard.whole("m.whole", "int16", (9,)), whole.tobytes())
    tied = {rank: [View("m.tied", "m.rows", "float32", (size, 5), (5, 1), 0)] for rank, size in enumerate((3, 4))}
    ranks = [[by_rows[0], by_grid[1], replica], [by_rows[1], by_grid[0], replica]]
    store_ranks(tmp_path / "run", 1, ranks, views=tied)
    done = zerostall.export(tmp_path / "run", 1, tmp_path / "o.safetensors", ExportOptions(root="m"))
    assert (done.tensors, done.aliases) == (3, {"tied": "rows"})
    found = safetensors.torch.load_file(tmp_path / "o.safetensors")
    for name, array in {"rows": rows, "grid": grid, "whole": whole}.items():
        assert np.array_equal(found[name].numpy(), array)

    loaded = zerostall.load(tmp_path / "run", 1)["m"]
    assert loaded["tied"].data_ptr() == loaded["rows"].data_ptr()
    assert np.array_equal(loaded["grid"].numpy(), grid) and np.array_equal(loaded["rows"].numpy(), rows)
    zerostall.export(tmp_path / "run", 1, tmp_path / "o.pt")
    assert torch.equal(torch.load(tmp_path / "o.pt", weights_only=True)["m"]["rows"], found["rows"])

    store_ranks(tmp_path / "run", 2, [[by_rows[0]]])
    with pytest.raises(CorruptError, match=r"20 of its 35 elements are in no part"):
        zerostall.export(tmp_path / "run", 2, tmp_path / "x.safetensors")
    store_ranks(tmp_path / "run", 3, [[replica], [(Shard.whole("m.whole", "int8", (9,)), bytes(9))]])
    part = {0: [View("m.part", "m.rows", "float32", (2, 5), (5, 1), 0)]}
    with pytest.raises(FormatError, match=r"m\.whole is int16"):
        zerostall.export(tmp_path / "run", 3, tmp_path / "x.safetensors")
    store_ranks(
        tmp_path / "run",
        4,
        [[by_rows[0]], [by_rows[1]]],
        views=part,
    )
    with pytest.raises(FormatError, match=r"looks into a part of m\.rows"):
        zerostall.export(tmp_path / "run", 4, tmp_path / "x.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.pt", "o.safetensors", "run"]


def model_run(where: Path) -> dict[str, np.ndarray]:
    """Step 1: two modules and an optimizer, over two ranks; returns the tensors of `model`."""
    random = np.random.default_rng(3)
    arrays = {f"layers.{n}.weight": random.standard_normal((40, 30)).astype(np.float32) for n in range(12)}
    arrays["count"] = np.arange(5)
    ranks: list[list[tuple[Shard, bytes]]] = [[], []]
    for name, array in arrays.items():
        halves = boxes(f"model.{name}", array, [[0, len(array) // 2, len(array)], *([0, n] for n in array.shape[1:])])
        for rank, half in zip(ranks, halves):
            rank.append(half)
    moment = np.ones((40, 30), np.float32)
    ranks[0].append((Shard.whole("optimizer.layers.0.weight.exp_avg", "float32", (40, 30)), moment.tobytes()))
    groups = [{"params": ["layers.0.weight"], "shapes": {}, "options": {"lr": 0.1}}]
    record = {"groups": groups, "state": {}, "extra": {}, "keys": ["exp_avg"], "host": []}
    values = {"parts": {"model": ("module", {}), "optimizer": ("optimizer", record)}, "rng": None}
    store_ranks(where, 1, ranks, values=values)
    return arrays


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    arrays = model_run(tmp_path / "run")
    out = tmp_path / "hub"
    out.mkdir()
    (out / "config.json").write_text("{}")
    told: list[tuple[int, int]] = []
    options = ExportOptions(weights=True, shard_size=3 * 4800, rename={r"^layers\.": "h."})
    done = zerostall.export(tmp_path / "run", None, out, options, progress=lambda *at: told.append(at))
    assert (done.tensors, done.files) == (13, 6) and told[-1][0] == told[-1][1]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6)]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["config.json", "model.safetensors.index.json", *files]
    )
    for name, array in arrays.items():
        name = name.replace("layers.", "h.")
        with safetensors.safe_open(out / index["weight_map"][name], "np") as file:
            assert np.array_equal(file.get_tensor(name), array)
    with safetensors.safe_open(out / files[0], "pt") as file:
        assert sum(file.get_slice(name).get_shape()[0] for name in file.keys()) <= 3 * 40 + 5

    with pytest.raises(StorageError, match="holds model-00001-of-00005"):
        zerostall.export(tmp_path / "run", None, out, options)
    (out / "model-of-mine.safetensors").write_text("mine")
    zerostall.export(tmp_path / "run", None, out, ExportOptions(weights=True, overwrite=True))
    names = {"config.json", "model-of-mine.safetensors", "model.safetensors.index.json"}
    assert {path.name for path in out.iterdir()} == {*names, "model-00001-of-00001.safetensors"}


def test_a_folder_that_cannot_be_finished_is_as_before(tmp_path: Path) -> None:
    model_run(tmp_path / "run")
    image = tmp_path / "run" / "step-000000000001" / "rank-00001.safetensors"
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    with pytest.raises(CorruptError, match="chunk 0"):
        zerostall.export(tmp_path / "run", 1, tmp_path / "new")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.safetensors").write_text("mine")
    with pytest.raises(CorruptError, match="chunk 0"):
        zerostall.export(tmp_path / "run", 1, tmp_path / "old", ExportOptions(overwrite=True))
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["model.safetensors"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_floats_are_cast_to_the_nearest_and_nothing_else_is(tmp_path: Path, dtype: str) -> None:
    edge = torch.tensor([1.00390625, 1.01171875, -0.0, float("inf"), float("nan"), 1e-45, 3.3895e38, 65520.0])
    noise = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 100
    tensors = {
        "w": torch.cat([edge, noise]),
        "d": torch.randn(300, dtype=torch.float64),
        "h": torch.randn(7).bfloat16(),
        "i": torch.arange(9),
        "b": torch.tensor([True, False]),
        "f8": torch.randn(5).to(torch.float8_e4m3fn),
        "c": torch.randn(3, dtype=torch.complex64),
        "empty": torch.empty(0, 3),
    }
    shards = [
        (
            Shard.whole(f"m.{name}", str(tensor.dtype).removeprefix("torch."), tensor.shape),
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"",
        )
        for name, tensor in tensors.items()
    ]
    store_ranks(tmp_path / "run", 1, [shards])
    wanted = getattr(torch, dtype)
    zerostall.export(tmp_path / "run", 1, tmp_path / "o.safetensors", ExportOptions(root="m", dtype=dtype))
    zerostall.export(tmp_path / "run", 1, tmp_path / "o.pt", ExportOptions(root="m", dtype=dtype))
    zerostall.export(tmp_path / "run", 1, tmp_path / "f.pt", ExportOptions(root="m", dtype=dtype, only=("m.*",)))
    found = [safetensors.torch.load_file(tmp_path / "o.safetensors")]
    found += [torch.load(tmp_path / name, weights_only=True) for name in ("o.pt", "f.pt")]
    for state in found:
        for name, tensor in tensors.items():
            if name == "c" and state is found[0]:
                continue  # safetensors has no complex numbers: two floats each
            right = tensor.to(wanted) if name in ("w", "d", "h", "empty") else tensor
            assert state[name].dtype == right.dtype and state[name].shape == right.shape
            if right.numel():
                assert torch.equal(state[name].view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)), name


def test_names_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    model_run(tmp_path / "run")
    with pytest.raises(ValueError, match="both become 'same'"):
        zerostall.export(tmp_path / "run", 1, tmp_path / "x.safetensors", ExportOptions(rename={"^.*$": "same"}))
    with pytest.raises(ValueError, match="leave out root"):
        ExportOptions(weights=True, root="model")
    with pytest.raises(ValueError, match="only a Hugging Face folder has shards"):
        zerostall.export(tmp_path / "run", 1, tmp_path / "x.pt", ExportOptions(shard_size=5))
    with pytest.raises(ValueError, match="run's own folder"):
        zerostall.export(tmp_path / "run", 1, tmp_path / "run")
    with pytest.raises(ValueError, match="sequence of patterns"):
        ExportOptions(only="model.*")  # pyright: ignore[reportArgumentType]
    store_ranks(tmp_path / "bare", 1, [[(Shard.whole("w", "int8", (1,)), b"1")]], values={"rng": None})
    with pytest.raises(CapabilityError, match="holds no module"):
        zerostall.export(tmp_path / "bare", 1, tmp_path / "x.safetensors", ExportOptions(weights=True))


def test_a_dcp_folder_that_dcp_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from zerostall.trainer.exchange import export_dcp

    monkeypatch.setattr(export_dcp, "_PART", 700)  # parts of a few rows
    readers: set[str] = set()
    read = export_dcp.read
    monkeypatch.setattr(
        export_dcp,
        "read",
        lambda part: (readers.add(threading.current_thread().name.rpartition("_")[0]), read(part))[1],
    )
    arrays = model_run(tmp_path / "run")
    out = tmp_path / "dcp"
    told: list[tuple[int, int]] = []
    options = ExportOptions(format="dcp", root="model", dtype="float64")
    done = zerostall.export(tmp_path / "run", 1, out, options, progress=lambda *at: told.append(at))
    assert readers == {"zerostall-export"}
    assert done.tensors == 13 and told[-1][0] == told[-1][1] and done.files == len(list(out.iterdir()))
    wanted = {name: torch.zeros(array.shape, dtype=torch.float64) for name, array in arrays.items() if name != "count"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wanted, checkpoint_id=out)
        dcp_to_torch_save(out, tmp_path / "o.pt")
    found = torch.load(tmp_path / "o.pt", weights_only=True)
    assert set(found) == set(arrays) and found["count"].dtype == torch.int64
    for name, array in arrays.items():
        assert np.array_equal(found[name].numpy(), array)
        assert name == "count" or np.array_equal(wanted[name].numpy(), array)
    zerostall.import_file(out, tmp_path / "back", 2)
    assert torch.equal(zerostall.load(tmp_path / "back")["model"]["layers.3.weight"], found["layers.3.weight"])

    with pytest.raises(StorageError, match=r"already"):
        zerostall.export(tmp_path / "run", 1, out, options)
    flat = ExportOptions(format="dcp", only=("optimizer.*",), rename={"optimizer": "o"}, overwrite=True)
    assert zerostall.export(tmp_path / "run", 1, out, flat).tensors == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(out, tmp_path / "o.pt")
    assert set(torch.load(tmp_path / "o.pt", weights_only=True)) == {"o.layers.0.weight.exp_avg"}

    image = tmp_path / "run" / "step-000000000001" / "rank-00001.safetensors"
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(CorruptError, match="chunk 0"):
        zerostall.export(tmp_path / "run", 1, out, ExportOptions(format="dcp", root="model", overwrite=True))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
