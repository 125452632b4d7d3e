"""Readers of other people's files against anything: an error of ours or a value, never more, and bounded."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forked import python
from zerostall.core import pickles
from zerostall.core.exchange import ImportOptions
from zerostall.core.mosaic import Mosaic, Tile
from zerostall.errors import FormatError, StateError, ZerostallError
from zerostall.flow.foreign_dcp import METADATA, read_dcp
from zerostall.flow.foreign_safetensors import read_huggingface
from zerostall.flow.forest import Forest
from zerostall.flow.merged_ranks import Merged
from zerostall.flow.readable import Plain
from zerostall.flow.torch_archive import Part, read_archive

FAST = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)

EDITS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 10_000), st.binary(min_size=1, max_size=9)), min_size=1, max_size=5
)


def edited(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    changed = bytearray(data)
    for kind, place, piece in edits:
        at = place % (len(changed) + 1)
        if kind == 0:
            changed[at : at + len(piece)] = piece
        elif kind == 1:
            del changed[at : at + len(piece)]
        else:
            changed[at:at] = piece
    return bytes(changed)


@FAST
@given(VALUES, st.integers(2, 5))
def test_plain_pickles_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert repr(pickles.read(data, (), source="p")) == repr(pickle.loads(data))


@FAST
@given(VALUES, st.integers(0, 5), EDITS)
def test_damaged_pickles(value: object, protocol: int, edits: list[tuple[int, int, bytes]]) -> None:
    data = edited(pickle.dumps([value, {1, 2}, OrderedDict(a=value)], protocol), edits)
    try:
        pickles.read(data, (), source="p")
    except FormatError as error:
        assert str(error).startswith("p") and len(str(error)) < 1000


@FAST
@given(st.binary(max_size=200))
def test_noise_is_no_pickle(data: bytes) -> None:
    with pytest.raises(FormatError):
        pickles.read(b"\x80\x04\xff" + data, (), source="p")
    try:
        pickles.read(data, (), source="p")
    except FormatError:
        pass


@pytest.mark.parametrize("call", [eval, exec, open, getattr, pickle.loads, __import__])
def test_nothing_that_runs_is_taken(call: object) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return call, ("1",)

    for protocol in range(6):
        with pytest.raises(FormatError, match=r"code would have to be run|is not one that is read"):
            pickles.read(pickle.dumps({"a": Trap()}, protocol), (), source="p")


def test_deep_keys_do_not_exhaust_the_stack() -> None:
    data = b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"Ns."
    with pytest.raises(FormatError, match="key"):
        pickles.read(data, (), source="p")
    pickles.read(b"\x80\x04" + b")" + b"\x85" * 200_000 + b".", (), source="p")


STATE = {
    "m": OrderedDict(w=torch.arange(6.0).reshape(2, 3), b=torch.ones(2).bfloat16()),
    "t": torch.arange(6).reshape(2, 3).t(),
    "u": torch.ones(2, dtype=torch.uint16),
    "v": [1, ("x", {"y": {1}})],
}


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


ARCHIVE = saved(STATE)


class Bounded(Plain):
    """Bytes that say when more is asked than there is, as a file does."""

    def read_into(self, view: memoryview, offset: int) -> None:
        if offset < 0 or offset + len(view) > len(self._data):
            raise FormatError("ends too early")
        super().read_into(view, offset)


@FAST
@given(EDITS)
def test_damaged_archives(edits: list[tuple[int, int, bytes]]) -> None:
    data = edited(ARCHIVE, edits)
    try:
        found = read_archive(Bounded(data), 0, len(data), "a")
        harvest = Forest(ImportOptions()).take(found)
        for tensor in harvest.tensors.values():
            assert tensor.nbytes <= 64 * len(data)
            tensor.read_into(memoryview(bytearray(tensor.nbytes)), 0)
        harvest.values()
    except (FormatError, StateError) as error:
        assert len(str(error)) < 2000


PARTS = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 2))
ways = ([Shard(0), Shard(1)], [_StridedShard(0, split_factor=2), Shard(0)], [Replicate(), Shard(0)])
torch.save(
    {f"w{n}": distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, way, src_data_rank=None)
     for n, way in enumerate(ways)},
    sys.argv[1],
)
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What one of four ranks has saved of tensors that are dealt out."""
    path = tmp_path_factory.mktemp("parts") / "model_1.pt"
    done = python("-c", PARTS, path)
    assert done.returncode == 0, done.stderr
    found = read_archive(Plain(data := path.read_bytes()), 0, len(data), "a", parts=True)
    assert isinstance(found, dict) and all(isinstance(part, Part) for part in found.values())
    return data


@FAST
@given(EDITS)
def test_damaged_parts(parts: bytes, edits: list[tuple[int, int, bytes]]) -> None:
    data = edited(parts, edits)
    try:
        found = read_archive(Bounded(data), 0, len(data), "a", parts=True)
        Forest(ImportOptions()).take(Merged(Path("a")).item("model", [(1, found)]))
    except (FormatError, StateError) as error:
        assert len(str(error)) < 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(STATE, checkpoint_id=path, no_dist=True)
    return path


@FAST
@given(EDITS, st.booleans())
def test_damaged_dcp_folders(folder: Path, edits: list[tuple[int, int, bytes]], metadata: bool) -> None:
    path = folder / (METADATA if metadata else "__0_0.distcp")
    good = path.read_bytes()
    path.write_bytes(edited(good, edits))
    try:
        harvest = Forest(ImportOptions()).take(read_dcp(folder))
        for tensor in harvest.tensors.values():
            if tensor.nbytes < 1 << 20:
                tensor.read_into(memoryview(bytearray(tensor.nbytes)), 0)
        harvest.values()
    except (ZerostallError, ValueError) as error:
        assert isinstance(error, ZerostallError) or "no tensor" in str(error)
    finally:
        path.write_bytes(good)


@FAST
@given(st.text(max_size=30) | st.sampled_from(["..", "../a", "/etc/passwd", "a/../../b", "\0", "a\\b", "~", "."]))
def test_no_index_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    from contextlib import ExitStack

    (tmp_path / "inner").mkdir(exist_ok=True)
    index = tmp_path / "inner" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with ExitStack() as stack, pytest.raises(FormatError):
        read_huggingface(index, stack)


@FAST
@given(st.data())
def test_mosaics(data: st.DataObject) -> None:
    """Any cut of a tensor into boxes, each lying in any order of dimensions, reads as the tensor does."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    full = torch.arange(int(torch.Size(shape).numel()), dtype=torch.int32).reshape(shape)
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))})
        found = [((*a, b), (*c, e - b)) for a, c in found for b, e in itertools.pairwise(cuts)]
    sources: list[list[int]] = []
    tiles: list[Tile] = []
    for start, size in found:
        part = full[tuple(slice(a, a + n) for a, n in zip(start, size))]
        order = data.draw(st.permutations(range(len(shape))))
        lying = part.permute(order).contiguous() if order else part
        strides = tuple(lying.stride(order.index(dim)) for dim in range(len(shape)))
        pad = data.draw(st.integers(0, 2))
        sources.append([-1] * pad + lying.reshape(-1).tolist())
        tiles.append(Tile(start, size, strides, len(sources) - 1, 4 * pad))
    mosaic = Mosaic.of(shape, 4, data.draw(st.permutations(tiles)))
    first = data.draw(st.integers(0, full.numel()))
    count = data.draw(st.integers(0, full.numel() - first))
    got = []
    for run in mosaic.runs(first, count):
        assert run.at == first + len(got) and (run.stride == 1 or not mosaic.in_order)
        got += [sources[run.source][run.offset // 4 + n * run.stride] for n in range(run.size)]
    assert got == full.reshape(-1)[first : first + count].tolist()
    if len(tiles) > 1:
        with pytest.raises(FormatError, match="stored nowhere"):
            list(Mosaic.of(shape, 4, tiles[1:]).runs(0, full.numel()))
