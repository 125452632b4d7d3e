"""Steps as other people's files, safetensors and torch.save: whole, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict, deque
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import zerostall
from unit.small_steps import DATA, image, store, whole
from zerostall import ExportOptions, ImportOptions, native
from zerostall.core.dtypes import DTYPES
from zerostall.core.layout import CHUNK, View
from zerostall.errors import (
    CorruptError,
    SnapshotNotFoundError,
    StorageError,
)
from zerostall.flow import importing

# ------------------------------------------------------------------------------------------ to safetensors


def test_every_type_and_shape_keeps_its_bytes_and_comes_back(tmp_path: Path) -> None:
    shapes = [(), (0,), (1,), (7,), (3, 0, 2), (5, 3)]
    shards = [whole(f"m.{dtype}.{n}", dtype, *shape) for dtype in DTYPES for n, shape in enumerate(shapes)]
    store(tmp_path / "run", 1, shards)
    done = zerostall.export(tmp_path / "run", 1, tmp_path / "out.safetensors")
    assert (done.tensors, done.aliases, done.step) == (len(shards), {}, 1)
    assert done.nbytes == (tmp_path / "out.safetensors").stat().st_size
    raw = (tmp_path / "out.safetensors").read_bytes()
    found = dict(safetensors.deserialize(raw))
    for shard in shards:
        size = int(np.prod(shard.shape)) * DTYPES[shard.dtype].itemsize
        assert bytes(found[shard.name]["data"]) == DATA[:size]

    zerostall.import_file(tmp_path / "out.safetensors", tmp_path / "back", 1, ImportOptions(root=""))
    before, after = (DiskView(tmp_path / name) for name in ("run", "back"))
    assert before == after


class DiskView:
    """What a run's step 1 holds, for comparison."""

    def __init__(self, where: Path) -> None:
        from zerostall.flow.inspection import inspect

        (rank,) = inspect(where, 1).ranks
        self.tensors = {content.name: (content.dtype, content.shape, content.alias_of) for content in rank.tensors}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DiskView) and self.tensors == other.tensors


def test_other_names_of_one_tensor_are_noted_and_other_views_written_out(tmp_path: Path) -> None:
    base = whole("m.emb", "float32", 60, 50)
    views = [
        View("m.head", "m.emb", "float32", (60, 50), (50, 1), 0),
        View("m.flipped", "m.emb", "float32", (50, 60), (1, 50), 0),
        View("m.part", "m.emb", "float32", (10, 50), (50, 1), 50 * 4 * 7),
        View("m.odd", "m.emb", "float32", (6, 2, 5), (500, 3, 10), 8),
        View("m.bits", "m.emb", "int64", (3,), (2,), 16),
        View("m.wide", "m.emb", "float32", (4, 3), (0, 1), 0),
        View("m.none", "m.emb", "float32", (0, 3), (3, 1), 0),
        View("m.one", "m.emb", "float32", (), (), 12),
    ]
    store(tmp_path / "run", 1, [base], views)
    done = zerostall.export(tmp_path / "run", 1, tmp_path / "o.safetensors", ExportOptions(root="m"))
    assert done.aliases == {"head": "emb"}
    with safetensors.safe_open(tmp_path / "o.safetensors", "np") as file:
        assert file.metadata() == {"head": "emb", "format": "pt"}
        found = {name: file.get_tensor(name) for name in file.keys()}
    emb = np.frombuffer(DATA[:12000], np.float32).reshape(60, 50)
    flat = emb.reshape(-1)
    assert set(found) == {"emb", "flipped", "part", "odd", "bits", "wide", "none", "one"}
    wanted = {
        "emb": emb,
        "flipped": emb.T,
        "part": emb[7:17],
        "odd": np.lib.stride_tricks.as_strided(flat[2:], (6, 2, 5), (2000, 12, 40)),
        "bits": flat.view(np.int64)[2:8:2],
        "wide": np.stack([flat[:3]] * 4),
        "none": np.empty((0, 3), np.float32),
        "one": flat[3].reshape(()),
    }
    for name, array in wanted.items():
        assert found[name].shape == array.shape and found[name].tobytes() == np.ascontiguousarray(array).tobytes()


def test_an_alias_without_its_base_is_written_out(tmp_path: Path) -> None:
    view = View("a.twin", "m.w", "complex128", (3, 2), (2, 1), 0)
    turned = View("a.turned", "m.w", "complex128", (2, 3), (1, 2), 0)
    store(tmp_path / "run", 1, [whole("m.w", "complex128", 3, 2)], [view, turned])
    zerostall.export(tmp_path / "run", 1, tmp_path / "o.safetensors", ExportOptions(only=("a.*",)))
    found = dict(safetensors.deserialize((tmp_path / "o.safetensors").read_bytes()))
    array = np.frombuffer(DATA[:96], np.complex128).reshape(3, 2)
    assert bytes(found["a.twin"]["data"]) == array.tobytes()
    assert bytes(found["a.turned"]["data"]) == np.ascontiguousarray(array.T).tobytes()


def test_tensors_over_chunk_borders(tmp_path: Path) -> None:
    store(tmp_path / "run", 1, [whole("m.big", "int16", CHUNK // 2 + 12_345), whole("m.w", "float32", 1000)])
    told: list[tuple[int, int]] = []
    out = tmp_path / "o.safetensors"
    done = zerostall.export(tmp_path / "run", 1, out, progress=lambda *at: told.append(at))
    assert told[-1] == (done.nbytes, done.nbytes) and len(told) > 2
    found = safetensors.torch.load_file(out)
    assert found["m.big"].numpy().tobytes()[: len(DATA)] == DATA
    assert found["m.w"].numpy().tobytes() == DATA[:4000]


def test_names_as_a_module_has_them(tmp_path: Path) -> None:
    names = ["model.layers.0.weight", "model.a\\.b", "model.c[3].d", "ema.layers.0.weight"]
    store(tmp_path / "run", 1, [whole(name, "float32", 2) for name in names])
    zerostall.export(tmp_path / "run", 1, tmp_path / "o.safetensors", ExportOptions(root="model"))
    assert set(safetensors.torch.load_file(tmp_path / "o.safetensors")) == {"layers.0.weight", "a.b", "c[3].d"}
    zerostall.export(tmp_path / "run", 1, tmp_path / "p.safetensors", ExportOptions(only=("*.weight",)))
    assert set(safetensors.torch.load_file(tmp_path / "p.safetensors")) == {names[0], names[3]}


def test_what_selects_nothing_or_too_much_is_refused(tmp_path: Path) -> None:
    store(tmp_path / "run", 1, [whole("model.a\\.b", "float32", 2), whole("model.a.b", "float32", 2)])
    out = tmp_path / "o.safetensors"
    with pytest.raises(ValueError, match="names begin with model"):
        zerostall.export(tmp_path / "run", 1, out, ExportOptions(only=("modl.*",)))
    with pytest.raises(ValueError, match="only nothing"):
        zerostall.export(tmp_path / "run", 1, out, ExportOptions(only=("*", "nothing*")))
    with pytest.raises(ValueError, match="rename x: found in no name"):
        zerostall.export(tmp_path / "run", 1, out, ExportOptions(rename={"x": "y"}))
    with pytest.raises(ValueError, match="dtype is one of"):
        ExportOptions(dtype="int8")
    with pytest.raises(ValueError, match="root mod: no tensor"):
        zerostall.export(tmp_path / "run", 1, out, ExportOptions(root="mod"))
    with pytest.raises(ValueError, match=r"would both become 'a\.b'"):
        zerostall.export(tmp_path / "run", 1, out, ExportOptions(root="model"))
    with pytest.raises(ValueError, match="says no format"):
        zerostall.export(tmp_path / "run", 1, tmp_path / "o.gguf")
    with pytest.raises(SnapshotNotFoundError, match="steps there: 1"):
        zerostall.export(tmp_path / "run", 2, out)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# ------------------------------------------------------------------------------------------ whole or not at all


def test_nothing_is_written_over_unless_told(tmp_path: Path) -> None:
    store(tmp_path / "run", 1, [whole("m.w", "float32", 9)])
    out = tmp_path / "o.safetensors"
    out.write_text("mine")
    for suffix in (".safetensors", ".pt"):
        target = out.with_suffix(suffix)
        target.write_text("mine")
        with pytest.raises(StorageError, match="is there already"):
            zerostall.export(tmp_path / "run", 1, target)
        assert target.read_text() == "mine"
        zerostall.export(tmp_path / "run", 1, target, ExportOptions(overwrite=True))
        assert target.read_bytes() != b"mine"
    link = tmp_path / "link.safetensors"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is there already"):
        zerostall.export(tmp_path / "run", 1, link)
    with pytest.raises(StorageError, match="is a folder"):
        (tmp_path / "d.safetensors").mkdir()
        zerostall.export(tmp_path / "run", 1, tmp_path / "d.safetensors", ExportOptions(overwrite=True))
    with pytest.raises(StorageError, match="is no folder"):
        zerostall.export(tmp_path / "run", 1, tmp_path / "no" / "o.safetensors")
    with pytest.raises(ValueError, match="run's own folder"):
        zerostall.export(tmp_path / "run", 1, image(tmp_path / "run", 1), ExportOptions(overwrite=True))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_damaged_step_leaves_no_file(tmp_path: Path, suffix: str) -> None:
    store(tmp_path / "run", 1, [whole("m.big", "uint8", CHUNK + 100), whole("m.w", "float32", 9)])
    store(tmp_path / "run", 2, [whole("m.w", "float32", 9)])
    with image(tmp_path / "run", 1).open("r+b") as file:
        file.seek(CHUNK + 50)
        file.write(b"\xff\x00\xff")
    out = (tmp_path / "o").with_suffix(suffix)
    out.write_text("old")
    with pytest.raises(CorruptError, match="chunk 1"):
        zerostall.export(tmp_path / "run", 1, out, ExportOptions(overwrite=True))
    assert out.read_text() == "old" and not list(tmp_path.glob(".*"))
    assert zerostall.export(tmp_path / "run", None, out, ExportOptions(overwrite=True)).step == 2


def test_memory_stays_at_a_few_chunks(tmp_path: Path) -> None:
    store(tmp_path / "run", 1, [whole(f"m.w{n}", "float32", 1 << 21) for n in range(40)])
    code = """
import sys
from pathlib import Path
import zerostall
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
before = peak()
zerostall.export(sys.argv[1], 1, sys.argv[2])
assert "torch" not in sys.modules and "numpy" not in sys.modules
print(peak() - before)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "o.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 << 20


# ------------------------------------------------------------------------------------------------- to torch


def training_state(where: Path) -> dict[str, object]:
    """A step 1 of a module's and a container's state, saved without an agent."""
    from zerostall.trainer.captures import plan_of
    from zerostall.trainer.state import State

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4))
    model.append(torch.nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    extra = {
        "epoch": 3,
        "best": float("-inf"),
        "seen": {1, 2},
        "path": PurePosixPath("a/b"),
        "recent": deque([1.5], 4),
        "order": OrderedDict(b=1, a=2),
        "pair": (torch.arange(3), None),
        "array": np.arange(4, dtype=np.int16),
        7: b"bytes",
    }
    roots = {"model": model, "extra": extra}
    state = State(roots, rng=True)
    survey = state.survey()
    sources = native.Tensors(survey.tensors, [False] * len(survey.tensors))

    def fill(segment: native.Segment, pool: native.Pool) -> None:
        sources.refresh()
        native.Capture(pool, plan_of(survey.layout), sources, segment.address, at_once=[]).wait(None)

    importing.store(where, 1, survey.layout, state.values(survey).encode(), fill)
    return roots


def test_a_torch_file_that_loads_without_running_code(tmp_path: Path) -> None:
    roots = training_state(tmp_path / "run")
    model, extra = roots["model"], roots["extra"]
    zerostall.export(tmp_path / "run", 1, tmp_path / "o.pt")
    found = torch.load(tmp_path / "o.pt", weights_only=True)
    assert set(found) == {"model", "extra"}
    assert found["model"]["0.weight"].data_ptr() == found["model"]["2.weight"].data_ptr()
    fresh = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4)))
    fresh.append(torch.nn.Linear(4, 4, bias=False))
    fresh.load_state_dict(found["model"])
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), model.state_dict().values()))
    got = found["extra"]
    assert (got["epoch"], got["best"], got["seen"], got["path"]) == (3, float("-inf"), {1, 2}, "a/b")
    assert (got["recent"], list(got["order"]), got[7]) == ([1.5], ["b", "a"], b"bytes")
    assert torch.equal(got["pair"][0], extra["pair"][0]) and got["pair"][1] is None
    assert torch.equal(got["array"], torch.arange(4, dtype=torch.int16))

    zerostall.export(tmp_path / "run", 1, tmp_path / "m.pt", ExportOptions(root="model"))
    fresh.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    zerostall.export(tmp_path / "run", 1, tmp_path / "w.pt", ExportOptions(root="model", only=("*.weight",)))
    assert set(torch.load(tmp_path / "w.pt", weights_only=True)) == {"0.weight", "1.weight", "2.weight"}
    with pytest.raises(ValueError, match="names begin with model, extra"):
        zerostall.export(tmp_path / "run", 1, tmp_path / "x.pt", ExportOptions(root="mdl"))


def test_load_gives_new_tensors_by_name(tmp_path: Path) -> None:
    roots = training_state(tmp_path / "run")
    found = zerostall.load(tmp_path / "run")
    assert set(found) == {"model", "extra"}
    assert type(found["extra"]["recent"]) is deque and found["extra"]["path"] == PurePosixPath("a/b")
    assert torch.equal(found["model"]["1.running_var"], roots["model"][1].running_var)
    assert set(zerostall.load(tmp_path / "run", 1, "model")) == {"model"}
    assert set(zerostall.load(tmp_path / "run", only=["ext*"])) == {"extra"}
    few = zerostall.load(tmp_path / "run", only=["model", "!model.1", "!*.bias"])
    assert set(few) == {"model"} and set(few["model"]) == {"0.weight", "2.weight"}
    assert set(zerostall.load(tmp_path / "run", only=["!model"])) == {"extra"}
    with pytest.raises(ValueError, match=r"only optimizer: step 1 holds nothing of that name; it holds model, extra"):
        zerostall.load(tmp_path / "run", 1, ["optimizer"])


def test_export_needs_no_torch_and_no_agent(tmp_path: Path) -> None:
    store(tmp_path / "run", 1, [whole("m.w", "float32", 2)])
    assert zerostall.export(tmp_path / "run", None, tmp_path / "o.safetensors").step == 1
