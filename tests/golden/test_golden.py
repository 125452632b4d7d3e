"""Golden files: what was written once is read for ever, by us and with nothing of ours."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from golden import make
from zerostall.core import disks, layout, manifest, steps, values
from zerostall.core import safetensors as headers
from zerostall.core.values import TensorRef

V1 = Path(__file__).parent / "v1"
V2 = V1.with_name("v2")
V3 = V1.with_name("v3")
DISKS = V1.with_name("disks")
STEP = V1 / "step-000000000007"


@pytest.mark.parametrize(("folder", "make_files"), [(V2, make.files), (V3, make.own_files)], ids=["v2", "v3"])
def test_the_current_writer_makes_the_same_bytes(folder: Path, make_files: Callable[[], dict[str, bytes]]):
    found = files(folder)
    made = make_files()
    assert sorted(found) == sorted(made)
    for name, data in made.items():
        assert found[name] == data, name


def test_what_tells_of_other_disks():
    made = make.disk_files()
    assert files(DISKS) == made
    assert disks.decode_run_disks(made["disks.json"], source="").folders[0] == "/mnt/nvme1/golden"
    assert disks.decode_disk_of(made["disk.json"], source="").run == make.RUN


def test_an_image_on_another_disk_is_found_by_docs_format_alone(tmp_path: Path):
    """Moved there with nothing of ours."""
    zerostall = pytest.importorskip("zerostall", exc_type=ImportError)
    run, disk = tmp_path / "run", tmp_path / "disk"
    shutil.copytree(V2, run)
    step = run / "step-000000000012"
    record = json.loads((step / "manifest.json").read_bytes())["body"]["ranks"][1]["record"]
    target = disk / "images" / step.name / f"rank-00001-{record[:16]}.safetensors"
    target.parent.mkdir(parents=True)
    (step / "rank-00001.safetensors").rename(target)
    assert zerostall.verify(run, 12)[0].problems
    for path, body in (
        (run / "disks.json", {"version": 1, "run": make.RUN, "folders": [str(disk)]}),
        (disk / "disk.json", {"version": 1, "run": make.RUN}),
    ):
        data = json.dumps(body, separators=(",", ":")).encode()
        path.write_bytes(b'{"sha256":"%s","body":%s}\n' % (hashlib.sha256(data).hexdigest().encode(), data))
    assert zerostall.verify(run, 12)[0].problems == ()


def test_what_version_1_says_in_full_is_still_written_in_version_1():
    old, new = files(V1), files(V2)
    alike = {name for name in old if new.get(name) == old[name]}
    assert {name for name in old if "step-000000000007" in name or name == "run.json"} < alike
    assert not any("step-000000000012" in name for name in alike)


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("run", "step", "world"), [(V1, 7, 1), (V1, 12, 2), (V2, 7, 1), (V2, 12, 2), (V3, 20, 2)], ids=str
)
def test_every_file_vouches_for_the_next(run: Path, step: int, world: int):
    folder = run / steps.step_folder(step)
    whole = manifest.decode_manifest((folder / steps.MANIFEST).read_bytes())
    assert (whole.run, whole.step, whole.world, whole.created) == (make.RUN, step, world, make.CREATED)
    for rank in range(world):
        data = (folder / steps.record_file(rank)).read_bytes()
        record = manifest.decode_record(data)
        assert manifest.record_difference(whole, record, data) == ""
        file = run / steps.LAYOUTS / steps.layout_file(record.layout)
        made = layout.decode(file.read_bytes(), record.begins, source=str(file))
        assert made.digest == record.layout and layout.encode(made) == file.read_bytes()
        assert whole.ranks[rank].begins == record.begins
        if step == 12:
            assert [(e.start, e.shape, e.global_shape) for e in made.entries] == [((rank, 0), (1, 2), (2, 2))]
        image = (folder / steps.image_file(rank)).read_bytes()
        assert image.startswith(made.header)
        assert len(image) == made.nbytes == record.nbytes
        assert make.crc32c(image) == record.checksum == whole.ranks[rank].checksum
        header = headers.decode(made.header, made.nbytes)
        assert [tensor.name for tensor in header.tensors if tensor.nbytes] == [e.name for e in made.entries if e.nbytes]


def test_small_values_come_back():
    record = manifest.decode_record((STEP / steps.record_file(0)).read_bytes())
    tree = values.decode(record.values, TensorRef)
    kind, found = tree["parts"]["state"]
    assert kind == "container"
    for name, value in make.VALUES.items():
        assert type(found[name]) is type(value)
        if name not in ("set", "floats"):
            assert repr(found[name]) == repr(value)
    assert found["set"] == {1, 2, 3}
    assert [struct.pack(">d", number) for number in found["floats"]] == [
        struct.pack(">d", number) for number in make.VALUES["floats"]
    ]
    assert found["a.b"] == TensorRef(r"state.a\.b")


def test_facts_of_the_run():
    run = manifest.decode_run((V1 / steps.RUN).read_bytes())
    assert (run.run, run.name, run.created) == (make.RUN, "golden", make.CREATED)


def test_a_reader_with_nothing_of_ours():
    """Checks a step and reads its tensors by docs/format.md alone: json, hashlib, struct."""

    def opened(path: Path) -> dict:
        data = path.read_bytes()
        body = data[data.index(b'"body":') + 7 : -2]
        file = json.loads(data)
        assert hashlib.sha256(body).hexdigest() == file["sha256"]
        assert file["body"]["version"] == 1
        return file["body"]

    whole = opened(STEP / "manifest.json")
    (rank,) = whole["ranks"]
    data = (STEP / "rank-00000.json").read_bytes()
    assert hashlib.sha256(data).hexdigest() == rank["record"]
    record = opened(STEP / "rank-00000.json")
    image = (STEP / "rank-00000.safetensors").read_bytes()
    chunk = record["chunk_bytes"]
    chunks = [image[at : at + chunk] for at in range(0, len(image), chunk)]
    assert [make.crc32c(part) for part in chunks] == record["checksums"]
    assert make.crc32c(image) == record["checksum"] == rank["checksum"]
    shape = opened(V1 / "layouts" / f"{record['layout']}.json")
    entries = {entry["name"]: entry for entry in shape["entries"]}
    weight = entries["model.weight"]
    raw = image[weight["offset"] : weight["offset"] + weight["nbytes"]]
    assert weight["dtype"] == "float32" and weight["shape"] == [2, 3]
    assert struct.unpack("<6f", raw) == (0, 1, 2, 3, 4, 5)
    (view,) = shape["views"]
    assert (view["name"], view["base"], view["shape"], view["strides"], view["start"]) == (
        "model.turned", "model.weight", [3, 2], [1, 3], 0,
    )  # fmt: skip


def test_a_reader_with_nothing_of_ours_finds_the_boxes_of_version_2():
    step = V2 / "step-000000000012"
    ranks = json.loads((step / "manifest.json").read_bytes())["body"]["ranks"]
    (shape,) = {rank["layout"] for rank in ranks}  # one layout for both
    (entry,) = json.loads((V2 / "layouts" / f"{shape}.json").read_bytes())["body"]["entries"]
    assert (entry["shape"], entry["global_shape"], entry["begins"]) == ([1, 2], [2, 2], [0])
    assert [rank["begins"] for rank in ranks] == [[0], [1]]
    assert json.loads((step / "rank-00001.json").read_bytes())["body"]["begins"] == [1]


def test_a_reader_with_nothing_of_ours_finds_what_is_a_ranks_own():
    step = V3 / "step-000000000020"
    ranks = json.loads((step / "manifest.json").read_bytes())["body"]["ranks"]
    (shape,) = {rank["layout"] for rank in ranks}  # one layout for both
    body = json.loads((V3 / "layouts" / f"{shape}.json").read_bytes())["body"]
    (own,) = (entry for entry in body["entries"] if entry["name"].endswith("[=own]"))
    assert (body["version"], own["name"], own["shape"]) == (3, "model.expert[=own]", [1])
    for rank, byte in make.OWN.items():
        image = (step / f"rank-{rank:05d}.safetensors").read_bytes()
        assert image[own["offset"] : own["offset"] + own["nbytes"]] == byte


def test_safetensors_reads_the_images():
    for rank, half in make.HALVES.items():
        found = safetensors.numpy.load_file(V1 / "step-000000000012" / f"rank-{rank:05d}.safetensors")
        np.testing.assert_array_equal(found["model.table"], np.frombuffer(half, np.int16).reshape(1, 2))


@pytest.mark.parametrize("run", [V1, V2], ids=["v1", "v2"])
def test_both_versions_are_put_together_from_two_ranks(run: Path):
    torch = pytest.importorskip("torch")
    zerostall = pytest.importorskip("zerostall", exc_type=ImportError)
    assert [verdict.problems for verdict in zerostall.verify(run)] == [(), ()]
    found = zerostall.load(run, 12)
    assert torch.equal(found["model"]["table"], torch.tensor([[1, 2], [3, 4]], dtype=torch.int16))


def test_what_is_each_ranks_own_is_told_apart_by_rank():
    torch = pytest.importorskip("torch")
    zerostall = pytest.importorskip("zerostall", exc_type=ImportError)
    whole_step = pytest.importorskip("zerostall.flow.whole_step", exc_type=ImportError)
    assert [verdict.problems for verdict in zerostall.verify(V3)] == [()]
    with whole_step.opened_step(V3, 20) as found:
        aliases = {name: tensor.alias for name, tensor in found.tensors.items()}
    assert aliases == {
        "model.table": "",
        **{f"model.expert[=rank {rank}]": "" for rank in make.OWN},
        **{f"model.same[=rank {rank}]": f"model.expert[=rank {rank}]" for rank in make.OWN},
    }
    loaded = zerostall.load(V3, 20)["model"]
    assert torch.equal(loaded["table"], torch.tensor([[1, 2], [3, 4]], dtype=torch.int16))
    assert loaded["expert"].item() == make.OWN[0][0] and loaded["same"].data_ptr() == loaded["expert"].data_ptr()


def test_the_whole_state_is_loaded():
    torch = pytest.importorskip("torch")
    contract = pytest.importorskip("zerostall.tiers.contract", exc_type=ImportError)
    load = pytest.importorskip("zerostall.trainer.state.load", exc_type=ImportError)
    record = manifest.decode_record((STEP / steps.record_file(0)).read_bytes())
    made = layout.decode((V1 / steps.LAYOUTS / steps.layout_file(record.layout)).read_bytes())
    image = bytearray((STEP / steps.image_file(0)).read_bytes())
    found = load.tree(contract.Stored(made, record), memoryview(image))
    weight, turned = found["model"]["weight"], found["model"]["turned"]
    assert torch.equal(weight, torch.arange(6.0).reshape(2, 3))
    assert torch.equal(turned, weight.T) and turned.data_ptr() == weight.data_ptr()
    assert found["model"]["scale"].item() == 1.5
    assert torch.equal(found["state"]["phase"], torch.tensor([1j, 2 - 3j]))
    assert found["state"]["count"].item() == -2
    assert found["state"]["mask"].tolist() == [True, False, True]
    assert found["state"]["codes"].dtype == torch.float8_e4m3fnuz
    assert found["state"]["empty"].shape == (0, 4)
    assert found["state"]["a.b"].tolist() == [7, 8]
    assert found["state"]["ordered"] == make.VALUES["ordered"]
