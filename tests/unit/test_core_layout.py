"""Layouts: where tensors lie, what their file says, and that other people's readers agree."""

from __future__ import annotations

import hashlib
import json
import math
import time

import numpy as np
import pytest
import safetensors.numpy

from zerostall.core import layout
from zerostall.core import safetensors as headers
from zerostall.core.dtypes import CODES, DTYPES
from zerostall.core.layout import Shard, View
from zerostall.errors import CorruptError, FormatError, StateError, VersionError


def resealed(data: bytes, **changes: object) -> bytes:
    """The same file with another body, its digest made right again."""
    body = json.loads(data)["body"] | changes
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    return b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'","body":' + text + b"}\n"


SHARDS = (
    Shard.whole("m.b", "uint8", (3,)),
    Shard.whole("m.a", "float32", (2, 3)),
    Shard.whole("m.z", "complex128", ()),
    Shard("m.part", "float16", (2, 4), (8, 4), (6, 0)),
    Shard.whole("m.empty", "float32", (0, 5)),
    Shard.whole("m.f4", "float4_e2m1fn_x2", (5,)),
)
VIEWS = (View("m.tied", "m.a", "float32", (3,), (2,), 4),)


def test_image_opens_with_safetensors():
    made = layout.build(SHARDS, VIEWS)
    image = bytearray(made.header.ljust(made.nbytes, b"\0"))
    values = {}
    for entry in made.entries:
        if entry.dtype == "float32":
            values[entry.name] = np.arange(math.prod(entry.shape), dtype=np.float32).reshape(entry.shape)
            image[entry.offset : entry.offset + entry.nbytes] = values[entry.name].tobytes()
    read = safetensors.numpy.load(bytes(image))
    assert set(read) == {shard.name for shard in SHARDS}
    for name, value in values.items():
        assert read[name].dtype == np.float32
        np.testing.assert_array_equal(read[name], value)
    assert read["m.z"].shape == (2,) and read["m.z"].dtype == np.float64
    assert read["m.f4"].shape == (5,) and read["m.f4"].dtype == np.uint8


def test_entries_are_aligned_sorted_and_leave_no_hole():
    made = layout.build(SHARDS, VIEWS)
    assert [entry.name for entry in made.entries] == ["m.z", "m.a", "m.empty", "m.part", "m.b", "m.f4"]
    assert len(made.header) % 4096 == 0
    at = len(made.header)
    for entry in made.entries:
        assert entry.offset == at
        assert entry.offset % DTYPES[entry.dtype].itemsize == 0
        at += entry.nbytes
    assert at == made.nbytes


def test_digest_does_not_depend_on_order_and_does_on_everything_else():
    made = layout.build(SHARDS, VIEWS)
    assert layout.build(SHARDS[::-1], VIEWS) == made
    others = [
        layout.build(SHARDS),
        layout.build(SHARDS[1:], VIEWS),
        layout.build((*SHARDS[:-1], Shard.whole("m.f5", "float4_e2m1fn_x2", (5,))), VIEWS),
        layout.build((*SHARDS[:-1], Shard.whole("m.f4", "uint8", (5,))), VIEWS),
        layout.build((*SHARDS[:-1], Shard.whole("m.f4", "float4_e2m1fn_x2", (5, 1))), VIEWS),
        layout.build((*SHARDS[:-3], Shard("m.part", "float16", (1, 4), (8, 4), (4, 0)), *SHARDS[-2:]), VIEWS),
        layout.build(SHARDS, (View("m.tied", "m.a", "float32", (3,), (1,), 4),)),
    ]
    assert len({other.digest for other in others} | {made.digest}) == len(others) + 1


def test_digest_is_that_of_the_documented_json():
    made = layout.build([Shard.whole("w", "float32", (2,))])
    row = '{"name":"w","dtype":"float32","shape":[2],"offset":4096,"nbytes":8}'
    body = '{"version":1,"nbytes":4104,"entries":[' + row + '],"views":[]}'
    assert made.digest == hashlib.sha256(body.encode()).hexdigest()
    assert layout.encode(made) == f'{{"sha256":"{made.digest}","body":{body}}}\n'.encode()


def test_file_round_trip():
    made = layout.build(SHARDS, VIEWS)
    assert layout.decode(layout.encode(made), made.begins) == made
    empty = layout.build(())
    assert empty.nbytes == 4096 == len(empty.header)
    assert layout.decode(layout.encode(empty)) == empty
    assert safetensors.numpy.load(empty.header) == {}


def test_header_names_the_layout():
    made = layout.build(SHARDS, VIEWS)
    header = headers.decode(made.header, made.nbytes)
    assert header.metadata["zerostall.layout"] == made.digest
    assert header.metadata["format"] == "pt"
    assert [tensor.name for tensor in header.tensors if tensor.nbytes] == [
        entry.name for entry in made.entries if entry.nbytes
    ]


@pytest.mark.parametrize(
    ("shards", "views", "words"),
    [
        ([Shard.whole("a", "qint8", (1,))], [], "'a': tensors of type qint8"),
        ([Shard.whole("a", "int8", (1,))] * 2, [], "'a': this name is there twice"),
        ([Shard.whole("", "int8", (1,))], [], "a name has"),
        ([Shard.whole("x" * 65_536, "int8", (1,))], [], "a name has"),
        ([Shard.whole("\ud800", "int8", (1,))], [], "no valid Unicode"),
        ([Shard.whole("__metadata__", "int8", (1,))], [], "for itself"),
        ([Shard.whole("a", "int8", (-1,))], [], "no integer"),
        ([Shard.whole("a", "int8", (np.int64(1),))], [], "no integer"),  # type: ignore[arg-type]
        ([Shard.whole("a", "int8", (1,) * 65)], [], "65 dimensions"),
        ([Shard.whole("a", "int8", (2**62, 2**62))], [], "too much for one file"),
        ([Shard("a", "int8", (2,), (3,), (2,))], [], "reaches out"),
        ([Shard("a", "int8", (2,), (3, 1), (0, 0))], [], "number of dimensions"),
        ([Shard("a", "int8", (2,), (2,), ())], [], "number of dimensions"),
        ([Shard.whole("a", "int8", (2,))], [View("v", "b", "int8", (), (), 0)], "no tensor of this layout"),
        ([Shard.whole("a", "int8", (2,))], [View("a", "a", "int8", (), (), 0)], "twice"),
        ([Shard.whole("a", "int8", (2,))], [View("v", "a", "int8", (2,), (2,), 0)], "reaches out of 'a'"),
        ([Shard.whole("a", "int8", (2,))], [View("v", "a", "int16", (), (), 1)], "reaches out of 'a'"),
        ([Shard.whole("a", "int8", (2,))], [View("v", "a", "int8", (2,), (-1,), 1)], "no integer"),
        ([Shard.whole("a", "int8", (2,))], [View("v", "a", "int8", (2,), (), 0)], "number of dimensions"),
        ([Shard.whole("a", "int8", (2,))], [View("v", "a", "odd", (), (), 0)], "type odd"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(shards: list[Shard], views: list[View], words: str):
    with pytest.raises(StateError) as caught:
        layout.build(shards, views)
    assert words in str(caught.value)


def test_all_problems_are_named_at_once():
    with pytest.raises(StateError) as caught:
        layout.build([Shard.whole(f"t{index}", "odd", ()) for index in range(30)])
    assert "'t0'" in str(caught.value) and "'t1'" in str(caught.value) and "and 10 more" in str(caught.value)


BEGINS = layout.build(SHARDS, VIEWS).begins
GOOD = layout.encode(layout.build(SHARDS, VIEWS))
ENTRIES = json.loads(GOOD)["body"]["entries"]


def entries_with(index: int, **changes: object) -> list[object]:
    return [entry | changes if at == index else entry for at, entry in enumerate(ENTRIES)]


@pytest.mark.parametrize(
    "changes",
    [
        {"nbytes": 1},
        {"nbytes": 2**70},
        {"nbytes": -4096},
        {"entries": ENTRIES[1:]},
        {"entries": ENTRIES[:-1]},
        {"entries": [*ENTRIES, ENTRIES[0]]},
        {"entries": []},
        {"entries": None},
        {"entries": {}},
        {"entries": entries_with(0, offset=0)},
        {"entries": entries_with(0, offset=-1)},
        {"entries": entries_with(0, offset=2**80)},
        {"entries": entries_with(1, offset=4096)},
        {"entries": entries_with(1, nbytes=23)},
        {"entries": entries_with(1, shape=[3, 2, 1, 0])},
        {"entries": entries_with(1, shape=[2**63 - 1] * 64)},
        {"entries": entries_with(1, shape=[-2, -3])},
        {"entries": entries_with(1, shape=[2.0, 3])},
        {"entries": entries_with(1, name="m.z")},
        {"entries": entries_with(1, name="m.tied")},
        {"entries": entries_with(1, name=5)},
        {"entries": entries_with(1, dtype="nope")},
        {"entries": entries_with(3, global_shape=[1, 4])},
        {"entries": entries_with(3, begins=[])},
        {"entries": entries_with(3, begins=[1])},
        {"entries": entries_with(3, begins=[-1])},
        {"entries": entries_with(3, begins=[0, 0])},
        {"entries": entries_with(1, begins=[0])},
        {"entries": entries_with(3, global_shape=[8])},
        {"views": [{"name": "v", "base": "none", "dtype": "int8", "shape": [], "strides": [], "start": 0}]},
        {"views": [{"name": "v"}]},
        {"version": 0},
        {"version": "1"},
        {"version": None},
    ],
)
def test_a_file_that_contradicts_itself_is_refused(changes: dict[str, object]):
    with pytest.raises(FormatError) as caught:
        layout.decode(resealed(GOOD, **changes), BEGINS, source="the-layout.json")
    assert "the-layout.json" in str(caught.value)


def test_ranks_that_are_cut_alike_have_one_layout_and_begins_of_their_own():
    def rank(row: int, column: int, size: int = 2) -> layout.Layout:
        parts = [
            Shard("m.w", "int8", (size, 3), (8, 3), (row, 0)),
            Shard("m.w[=box 1]", "int8", (1, 3), (8, 3), (row + 4, 0)),
            Shard("m.x", "int8", (size, 1), (8, 4), (row, column)),
            Shard("m.y", "int8", (size, 9), (8, 9), (row, 0)),
            Shard.whole("m.z", "int8", (2,)),
        ]
        return layout.build(parts)

    one, other = rank(0, 2), rank(2, 3)
    assert one.digest == other.digest and layout.encode(one) == layout.encode(other)
    assert one.header == other.header
    assert (one.begins, other.begins) == ((0, 4, 2), (2, 6, 3))
    assert not one.same(other) and one.same(rank(0, 2))
    assert rank(0, 2, size=1).digest != one.digest
    assert layout.decode(layout.encode(one), other.begins) == other
    assert layout.moved(one, other.begins) == other and layout.moved(other, one.begins) == one
    for wrong in [(), other.begins[:-1], (*other.begins, 1), (7, 7, 7), (-1, 0, 0)]:
        with pytest.raises(FormatError):
            layout.decode(layout.encode(one), wrong)
        with pytest.raises(FormatError):
            layout.moved(one, wrong)
    with pytest.raises(FormatError):
        layout.decode(layout.encode(layout.build([SHARDS[0]])), (0,))


def test_what_contradicts_itself_about_a_ranks_own_is_refused():
    own = Shard.whole("m.x[=own]", "int8", (4,))
    data = layout.encode(layout.build([own], [View("m.y[=own]", own.name, "int8", (4,), (1,), 0)]))
    assert layout.decode(data).version == 3
    body = json.loads(data)["body"]
    (entry,), (view,) = body["entries"], body["views"]
    with pytest.raises(FormatError, match="a rank's own, and yet a part"):
        layout.decode(resealed(data, entries=[entry | {"global_shape": [8], "begins": [0]}]), (4,))
    with pytest.raises(FormatError, match="one of them is a rank's own"):
        layout.decode(resealed(data, views=[view | {"name": "m.y"}]))


def test_a_newer_version_says_so():
    with pytest.raises(VersionError, match="999"):
        layout.decode(resealed(GOOD, version=999))


@pytest.mark.parametrize("data", [b"", GOOD[:-3], GOOD[:200], GOOD.replace(b"m.b", b"m.c"), b"[" * 100_000, b"\xff"])
def test_a_damaged_file_says_so(data: bytes):
    with pytest.raises(CorruptError):
        layout.decode(data)


def test_fields_of_later_versions_are_passed_over():
    made = layout.decode(resealed(GOOD, later={"a": [1]}), BEGINS)
    assert made.entries == layout.decode(GOOD, BEGINS).entries


def test_fingerprint_is_the_same_for_every_way_to_shard():
    whole = layout.build([Shard.whole("a", "int8", (4,))])
    halves = [layout.build([Shard("a", "int8", (2,), (4,), (at,))]) for at in (0, 2)]
    assert layout.fingerprint([whole]) == layout.fingerprint(halves)
    assert layout.fingerprint([whole]) != layout.fingerprint([layout.build([Shard.whole("a", "int8", (5,))])])


def test_100_000_tensors_take_no_more_than_seconds():
    shards = [Shard.whole(f"model.layers.{index}.weight", "float32", (64, 3)) for index in range(100_000)]
    clock = time.process_time
    start = clock()
    made = layout.build(shards)
    built = clock()
    data = layout.encode(made)
    encoded = clock()
    assert layout.decode(data) == made
    decoded = clock()
    assert max(built - start, encoded - built, decoded - encoded) < 5.0  # 0.2 s on a quiet machine
    assert len(data) < 30e6


# Other people's headers


def foreign(tensors: dict[str, object], nbytes: int, metadata: object = None, pad: int = 0) -> tuple[bytes, int]:
    header = json.dumps(({"__metadata__": metadata} if metadata is not None else {}) | tensors).encode() + b" " * pad
    return len(header).to_bytes(8, "little") + header, 8 + len(header) + nbytes


def slot(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("pad", range(9))
def test_data_of_any_alignment_is_found(pad: int):
    header, nbytes = foreign({"b": slot("F32", [2], 3, 11), "a": slot("U8", [3], 0, 3)}, 11, pad=pad)
    read = headers.decode(header, nbytes)
    assert [(tensor.name, tensor.offset, tensor.nbytes) for tensor in read.tensors] == [
        ("a", len(header), 3),
        ("b", len(header) + 3, 8),
    ]
    assert headers.header_nbytes(header[:8], nbytes) == len(header)


def test_every_code_of_safetensors_is_known():
    for code, dtype in CODES.items():
        size = dtype.itemsize * 6 // (2 if code == "F4" else 1)
        header, nbytes = foreign({"t": slot(code, [6], 0, size)}, size)
        (tensor,) = headers.decode(header, nbytes).tensors
        assert tensor.dtype == dtype.name
        assert tensor.shape == ((3,) if code == "F4" else (6,))


@pytest.mark.parametrize(
    ("tensors", "nbytes", "metadata"),
    [
        ({"a": slot("F32", [2], 0, 8)}, 9, None),
        ({"a": slot("F32", [2], 0, 8)}, 7, None),
        ({"a": slot("F32", [2], 4, 12)}, 12, None),
        ({"a": slot("F32", [2], 0, 8), "b": slot("U8", [4], 4, 8)}, 8, None),
        ({"a": slot("F32", [2], 0, 8), "b": slot("U8", [4], 9, 13)}, 13, None),
        ({"a": slot("F32", [2], 8, 0)}, 8, None),
        ({"a": slot("F32", [3], 0, 8)}, 8, None),
        ({"a": slot("F32", [-2], 0, -8)}, 0, None),
        ({"a": slot("F32", [2**62, 2**62], 0, 8)}, 8, None),
        ({"a": slot("F32", [1] * 65, 0, 4)}, 4, None),
        ({"a": slot("NOPE", [2], 0, 8)}, 8, None),
        ({"a": slot("F4", [3], 0, 1)}, 1, None),
        ({"a": slot("F4", [], 0, 1)}, 1, None),
        ({"a": slot("F32", [2], 0, 10**30)}, 8, None),
        ({"a": {"dtype": "F32"}}, 8, None),
        ({"a": 5}, 8, None),
        ({}, 0, {"a": 1}),
        ({}, 0, "x"),
        ({}, 5, None),
    ],
)
def test_foreign_headers_that_lie_are_refused(tensors: dict[str, object], nbytes: int, metadata: object):
    header, size = foreign(tensors, nbytes, metadata)
    with pytest.raises(FormatError):
        headers.decode(header, size)


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", (2**63).to_bytes(8, "little"), b"\x02" + b"\0" * 7 + b"{", b"\x02" + b"\0" * 7 + b"[]"],
)
def test_files_that_are_no_safetensors_are_refused(data: bytes):
    with pytest.raises(FormatError):
        headers.decode(data, len(data))
