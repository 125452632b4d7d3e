"""Other people's checkpoints as steps: DCP folders, Hugging Face folders, torch_checkpointing, torch.save."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import zerostall
from zerostall import ImportOptions
from zerostall.errors import CorruptError, FormatError, SnapshotNotFoundError, StateError
from zerostall.flow import catalog


def save_dcp(state: dict[str, object], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def same(one: object, other: object) -> bool:
    """Whether two trees of tensors and values are equal, types included."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


EXTRA = {
    "t": torch.arange(12, dtype=torch.float64).reshape(3, 4),
    "turned": torch.arange(12).reshape(3, 4).t(),
    "slice": torch.arange(100)[10:20],
    "half": torch.randn(7, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "scalar": torch.tensor(3, dtype=torch.int16),
    "empty": torch.empty(0, 4),
    "complex": torch.randn(3, 2, dtype=torch.complex128, generator=torch.Generator().manual_seed(3)).t(),
    "x.y": {"deep": ["text", 1.5, None, True, 2**70, b"bytes"]},
    "list": [torch.ones(2), {"in": torch.zeros(1)}],
    "types": (torch.float32, torch.device("cpu")),
}


# ---------------------------------------------------------------------------------------------------- DCP


def test_a_dcp_folder_comes_in_as_it_was_saved(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_dcp({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": EXTRA}, tmp_path / "dcp")
    done = zerostall.import_file(tmp_path / "dcp", tmp_path / "run", 7)
    assert (done.step, done.aliases) == (7, 0)
    found = zerostall.load(tmp_path / "run", 7)
    assert set(found) == {"model", "optimizer", "extra"}
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in model.state_dict().items())
    assert same(found["extra"], EXTRA)
    assert found["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(found["optimizer"]["state"]["0"]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert all(verdict.clean for verdict in catalog.verify(tmp_path / "run"))


def test_a_flat_dcp_folder_is_a_model(tmp_path: Path) -> None:
    model, _ = trained()
    save_dcp(model.state_dict(), tmp_path / "dcp")
    options = ImportOptions(root="net", only=("*weight",), dtype="float16")
    assert zerostall.import_file(tmp_path / "dcp", tmp_path / "run", 0, options).tensors == 3
    found = zerostall.load(tmp_path / "run")["net"]
    assert set(found) == {"0.weight", "1.weight", "2.weight"}
    assert all(torch.equal(tensor, model.state_dict()[name].half()) for name, tensor in found.items())


def test_an_optimizer_with_named_parameters_becomes_one(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from zerostall.flow.inspection import inspect

    model, optimizer = trained()
    states = get_state_dict(model, optimizer)
    save_dcp({"model": states[0], "optimizer": states[1]}, tmp_path / "dcp")
    zerostall.import_file(tmp_path / "dcp", tmp_path / "run", 1)
    (rank,) = inspect(tmp_path / "run", 1).ranks
    assert {"model.0.weight", "optimizer.0.weight.exp_avg"} <= {content.name for content in rank.tensors}
    found = zerostall.load(tmp_path / "run")["optimizer"]
    wanted = states[1]
    assert set(found["state"]) == set(wanted["state"])
    for name, slot in wanted["state"].items():
        assert all(torch.equal(found["state"][name][key], value) for key, value in slot.items())
    (group,) = found["param_groups"]
    assert group == wanted["param_groups"][0]


def test_dcp_folders_that_try_tricks_are_refused(tmp_path: Path) -> None:
    save_dcp({"w": torch.ones(4), "n": 3}, tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    good = path.read_bytes()
    metadata = pickle.loads(good)

    def changed(change: object) -> bytes:
        fresh = pickle.loads(good)
        change(fresh)
        return pickle.dumps(fresh)

    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "w"]

    def place(**fields: object) -> object:
        def change(fresh: object) -> None:
            for index, info in fresh.storage_data.items():
                if index.fqn == "w":
                    for name, value in fields.items():
                        setattr(info, name, value)

        return change

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'mark'}",)

    cases = {
        "could lie anywhere": [place(relative_path=name) for name in ("../x", "/etc/passwd", "a/b", "..", "", "a\0b")],
        "behind the end": [place(offset=1 << 62), place(length=info.length + (1 << 40))],
        "at no place": [place(offset=-1), place(length="9"), place(offset=None)],
        "extension": [place(transform_descriptors=["zstd"])],
        "is missing": [place(relative_path="__9_0.distcp")],
        "would have to be run": [lambda fresh: setattr(fresh, "planner_data", Trap())],
        "not said where": [lambda fresh: fresh.storage_data.clear()],
        "no shape": [lambda fresh: setattr(fresh.state_dict_metadata["w"], "size", (-4,))],
        "not what was announced": [lambda fresh: setattr(fresh.state_dict_metadata["w"].chunks[0], "sizes", (5,))],
        "only 4 of 9 elements": [lambda fresh: setattr(fresh.state_dict_metadata["w"], "size", (9,))],
        "is not within": [lambda fresh: setattr(fresh.state_dict_metadata["w"], "size", (3,))],
        "leads through a value|there twice": [lambda fresh: fresh.planner_data.update(w=("n", "w"))],
        "no dict": [lambda fresh: setattr(fresh, "state_dict_metadata", [1])],
    }
    for words, changes in cases.items():
        for change in changes:
            path.write_bytes(changed(change))
            with pytest.raises(FormatError, match=words):
                zerostall.import_file(tmp_path / "dcp", tmp_path / "run", 1)
    for data in (b"", good[:-1], good[: len(good) // 2], pickle.dumps({"a": 1}), b"\x80\x04\x95" + b"\xff" * 8):
        path.write_bytes(data)
        with pytest.raises(FormatError):
            zerostall.import_file(tmp_path / "dcp", tmp_path / "run", 1)
    path.write_bytes(good)
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(FormatError, match="behind the end"):
        zerostall.import_file(tmp_path / "dcp", tmp_path / "run", 1)
    assert not (tmp_path / "mark").exists() and not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------ Hugging Face


def hub(folder: Path, weight_map: dict[str, str] | None = None) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    tensors = {f"h.{n}.weight": torch.full((3, 2), float(n)) for n in range(4)}
    for number in (1, 2):
        part = {name: tensors[name] for name in list(tensors)[number * 2 - 2 : number * 2]}
        metadata = {"format": "pt", **({"head.weight": "h.3.weight"} if number == 2 else {})}
        safetensors.torch.save_file(part, folder / f"model-{number:05d}-of-00002.safetensors", metadata)
    names = weight_map or {name: f"model-{n // 2 + 1:05d}-of-00002.safetensors" for n, name in enumerate(tensors)}
    index = {"metadata": {"total_size": 96}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_a_hugging_face_folder_or_its_index(tmp_path: Path) -> None:
    tensors = hub(tmp_path / "hub")
    for step, source in enumerate((tmp_path / "hub", tmp_path / "hub" / "model.safetensors.index.json")):
        done = zerostall.import_file(source, tmp_path / "run", step)
        assert (done.tensors, done.aliases) == (4, 1)
        found = zerostall.load(tmp_path / "run", step)["model"]
        assert same(found, {**tensors, "head.weight": tensors["h.3.weight"]}) or set(found) == {*tensors, "head.weight"}
        assert found["head.weight"].data_ptr() == found["h.3.weight"].data_ptr()
    options = ImportOptions(only=("*.[0-9]*.weight", "!*3*"), rename={r"\.h\.": ".layers."})
    with pytest.raises(ValueError, match="no tensor has such a name"):
        zerostall.import_file(tmp_path / "hub", tmp_path / "run", 5, options)
    options = ImportOptions(only=("*.weight", "!*3*"), rename={r"\.h\.": ".layers.", "^model": "gpt"})
    zerostall.import_file(tmp_path / "hub", tmp_path / "run", 5, options)
    assert set(zerostall.load(tmp_path / "run", 5)["gpt"]) == {*(f"layers.{n}.weight" for n in range(3)), "head.weight"}

    # As caches of downloads have them: links to elsewhere.
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in (tmp_path / "hub").iterdir():
        (linked / path.name).symlink_to(path)
    zerostall.import_file(linked, tmp_path / "run", 6)
    single = tmp_path / "single"
    single.mkdir()
    safetensors.torch.save_file(tensors, single / "model.safetensors")
    zerostall.import_file(single, tmp_path / "run", 7)
    assert same(zerostall.load(tmp_path / "run", 7)["model"], tensors)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("../model-00001-of-00002.safetensors", "could lie anywhere"),
        ("/etc/passwd", "could lie anywhere"),
        ("..", "could lie anywhere"),
        ("model-00002-of-00002.safetensors", "and it is not"),
        ("model-00009-of-00002.safetensors", "which is missing"),
        ("model.safetensors.index.json", "safetensors file"),
    ],
)
def test_an_index_that_tries_tricks_is_refused(tmp_path: Path, file: str, words: str) -> None:
    hub(tmp_path / "hub", {"h.0.weight": file})
    with pytest.raises(FormatError, match=words):
        zerostall.import_file(tmp_path / "hub", tmp_path / "run", 0)
    (tmp_path / "hub" / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(FormatError, match="no index"):
        zerostall.import_file(tmp_path / "hub", tmp_path / "run", 0)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------- torch.save and torch_checkpointing


def test_values_of_many_types_in_a_torch_file(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    state = {
        "a": {
            "order": OrderedDict(b=1, a=[torch.ones(2, dtype=torch.int16)]),
            "count": Counter("abba"),
            "set": {1, 2},
            "pair": (1, "two"),
            7: {"int": -(2**80), "inf": float("inf"), "c": 1 + 2j, "raw": bytearray(b"12")},
            "parameter": torch.nn.Parameter(torch.ones(3)),
        },
        "t": base,
        "same": base,
        "wide": torch.tensor([1.0, 2.0]).expand(3, 2),
        "group": {"of": defaultdict(list, {"x": [1]})},
        "u16": torch.ones(2, dtype=torch.uint16),
        "f8": torch.randn(3).to(torch.float8_e4m3fn),
        "epoch": 3,
    }
    for old in (False, True):
        if old:
            del state["f8"], state["u16"], state["group"]  # the old way has no such types
        torch.save(state, tmp_path / "m.pt", _use_new_zipfile_serialization=not old)
        zerostall.import_file(tmp_path / "m.pt", tmp_path / "run", int(old))
        found = zerostall.load(tmp_path / "run", int(old))
        wanted = {**state, "rest": {"epoch": 3}}
        del wanted["epoch"]
        assert set(found) == set(wanted)
        found["a"]["parameter"] = torch.nn.Parameter(found["a"]["parameter"])
        assert all(same(found[name], wanted[name]) for name in wanted if name != "f8")
        assert old or torch.equal(found["f8"].view(torch.uint8), state["f8"].view(torch.uint8))
        assert found["same"].data_ptr() == found["t"].data_ptr()
    step = zerostall.import_file(tmp_path / "m.pt", tmp_path / "run", 2, ImportOptions(key="a", only=("*order*",)))
    assert step.tensors == 1
    assert same(zerostall.load(tmp_path / "run", 2)["model"]["order"]["a"], [torch.ones(2, dtype=torch.int16)])


def test_a_folder_of_torch_checkpointing(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = tmp_path / "tc"
    folder.mkdir()
    for name, value in {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}.items():
        torch.save(value, folder / f"{name}_0.pt")
    (folder / "config_0.json").write_text('{"layers": 3}')
    safetensors.torch.save_file({"w": torch.ones(2)}, folder / "ema_0.safetensors")
    zerostall.import_file(folder, tmp_path / "run", 3)
    found = zerostall.load(tmp_path / "run")
    assert set(found) == {"model", "optimizer", "config", "ema", "rest"}
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in model.state_dict().items())
    assert same(found["optimizer"], optimizer.state_dict()) and found["rest"] == {"step": 3}
    zerostall.import_file(folder, tmp_path / "run", 4, ImportOptions(key="model"))
    assert set(zerostall.load(tmp_path / "run", 4)) == {"model"}
    assert not same(zerostall.load(tmp_path / "run", 4)["model"], {})


def test_what_is_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="no folder of"):
        zerostall.import_file(tmp_path / "empty", tmp_path / "run", 0)
    with pytest.raises(SnapshotNotFoundError):
        zerostall.import_file(tmp_path / "none", tmp_path / "run", 0)
    with pytest.raises(FormatError, match=r"holds no \.metadata"):
        zerostall.import_file(tmp_path / "empty", tmp_path / "run", 0, ImportOptions(format="dcp"))
    torch.save({"a.b": {"x": torch.ones(1)}, "a": {"b": {"x": object}}}, tmp_path / "m.pt")
    with pytest.raises(FormatError, match=r"builtin__\.object"):
        zerostall.import_file(tmp_path / "m.pt", tmp_path / "run", 0)
    loop: list[object] = []
    loop.append(loop)
    torch.save({"a": loop}, tmp_path / "m.pt")
    with pytest.raises(FormatError, match="too deep"):
        zerostall.import_file(tmp_path / "m.pt", tmp_path / "run", 0)
    laughs: list[object] = ["ha"]
    for _ in range(60):
        laughs = [laughs] * 10
    torch.save({"a": laughs}, tmp_path / "m.pt")
    with pytest.raises(FormatError, match="too often"):
        zerostall.import_file(tmp_path / "m.pt", tmp_path / "run", 0)
    assert not (tmp_path / "run").exists()


def test_a_tensor_that_claims_more_than_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "m.pt")
    data = (tmp_path / "m.pt").read_bytes()
    for old, new in ((b"K\x04\x85q", b"K\x05\x85q"), (b"K\x01\x85q", b"K\x02\x85q")):
        assert data.count(old) == 1
        (tmp_path / "x.pt").write_bytes(data.replace(old, new))
        with pytest.raises(FormatError, match="reaches out of its storage"):
            zerostall.import_file(tmp_path / "x.pt", tmp_path / "run", 0)
    wide = torch.ones(4).as_strided((2, 2, 2), (1, 1, 1))
    torch.save({"w": wide}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match="more elements than its storage"):
        zerostall.import_file(tmp_path / "x.pt", tmp_path / "run", 0)


def test_an_image_that_is_damaged_on_the_way_commits_nothing(tmp_path: Path) -> None:
    save_dcp({"w": torch.ones(4)}, tmp_path / "dcp")
    zerostall.import_file(tmp_path / "dcp", tmp_path / "run", 0)
    image = tmp_path / "run" / "step-000000000000" / "rank-00000.safetensors"
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    with pytest.raises(CorruptError):
        zerostall.load(tmp_path / "run")


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(StateError, match=r"two tensors would be called model\.x"):
        zerostall.import_file(tmp_path / "m.pt", tmp_path / "run", 0, ImportOptions(rename={r"\.[ab]$": ".x"}))


def test_names_that_are_whole_already_are_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What `export` writes has whole names, unless it was told a root."""
    tensors = {"model.layers.0.weight": torch.ones(2, 3), "optimizer.step": torch.ones(1)}
    safetensors.torch.save_file(tensors, tmp_path / "whole.safetensors")
    zerostall.import_file(tmp_path / "whole.safetensors", tmp_path / "run", 1)
    assert "--root ''" in caplog.text and "model.model" in caplog.text
    caplog.clear()
    zerostall.import_file(tmp_path / "whole.safetensors", tmp_path / "run", 2, ImportOptions(root=""))
    assert set(zerostall.load(tmp_path / "run", 2)) == {"model", "optimizer"}
    del tensors["optimizer.step"]
    tensors["lm_head.weight"] = torch.ones(3)  # as a whole language model is laid out
    safetensors.torch.save_file(tensors, tmp_path / "hub.safetensors")
    zerostall.import_file(tmp_path / "hub.safetensors", tmp_path / "run", 3)
    assert not caplog.text
