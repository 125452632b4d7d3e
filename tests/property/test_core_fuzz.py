"""Decoders meet hostile files: they read or refuse, by an error of ours, and never ask for much memory."""

from __future__ import annotations

import hashlib
import json
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerostall.core import checksum, layout, manifest, safetensors, values
from zerostall.core.layout import Shard, View
from zerostall.core.manifest import Manifest, Record, RunFacts
from zerostall.errors import FormatError

LAYOUT = layout.build(
    [
        Shard.whole("a", "float32", (2, 3)),
        Shard("b", "bfloat16", (2,), (8,), (6,)),
        Shard.whole("z", "complex64", ()),
    ],
    [View("v", "a", "float32", (2,), (3,), 4)],
)
RECORD = Record(
    run="r",
    step=3,
    rank=0,
    world=1,
    layout=LAYOUT.digest,
    nbytes=8192,
    chunk_bytes=4096,
    checksums=[1, 2],
    checksum=checksum.whole([1, 2], 8192, 4096),
    values=values.encode({"a": (1, {2.5}, {1: b"x"}), "t": values.TensorRef("a")}),
    metric=1.5,
)
RECORD_FILE = manifest.encode_record(RECORD)
FACTS = (manifest.facts(RECORD, RECORD_FILE),)
MANIFEST = Manifest(run="r", step=3, world=1, ranks=FACTS, metric=None)


def read_record(data: bytes) -> object:
    record = manifest.decode_record(data)
    return record, values.decode(record.values, values.TensorRef)


def read_values(data: bytes) -> object:
    return values.decode(data, values.TensorRef)


def read_header(data: bytes) -> object:
    return safetensors.decode(data[: safetensors.header_nbytes(data[:8], len(data))], len(data))


SEALED: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "layout": (layout.decode, layout.encode(LAYOUT)),
    "record": (read_record, RECORD_FILE),
    "manifest": (manifest.decode_manifest, manifest.encode_manifest(MANIFEST)),
    "run": (manifest.decode_run, manifest.encode_run(RunFacts(run="r", name="n", fingerprint="ab" * 32))),
}
IMAGE = LAYOUT.header + bytes(LAYOUT.nbytes - len(LAYOUT.header))
# Written into JSON as they are, for no JSON writer would make them.
RAW = [
    "[" * 50_000,
    "[" * 500 + "]" * 500,
    '{"a":' * 50_000,
    "1e999",
    "-0",
    "9" * 5000,
    "0." + "3" * 5000,
    '"\\ud800"',
    "NaN",
    "",
]
NUMBERS = [-1, 0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308]
TEXTS = ["", "x", "x" * 70_000, "../..", "0" * 64, *(f"@{index}@" for index in range(len(RAW)))]
LISTS = [[], [[]], [None], [0] * 1000, [2**63 - 1] * 65, [[1, 2]]]
OBJECTS = [
    {},
    {"$tuple": []},
    {"$dict": [[[], 1]]},
    {"$int": "f" * 20_000},
    {"$deque": [2**62, []]},
    {"$range": [0, 2**62, 1]},
    {"$decimal": "1e999999"},
    {"$set": [[1]]},
]
HOSTILE: list[Any] = [None, True, *NUMBERS, *TEXTS, *LISTS, *OBJECTS]


def spelled(text: str) -> bytes:
    for index, raw in enumerate(RAW):
        text = text.replace(f'"@{index}@"', raw)
    return text.encode("utf-8", "surrogatepass")


def seal(text: str) -> bytes:
    body = spelled(text)
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'","body":' + body + b"}\n"


def places(node: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [path] if path else []
    if isinstance(node, dict):
        for key, item in node.items():
            found += places(item, (*path, key))
    elif isinstance(node, list):
        for index, item in enumerate(node):
            found += places(item, (*path, index))
    return found


def with_change(node: Any, path: tuple[str | int, ...], value: object) -> Any:
    node = json.loads(json.dumps(node))
    at = node
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return node


def survives(read: Callable[[bytes], object], data: bytes) -> None:
    tracemalloc.start()
    try:
        read(data)
    except FormatError as error:
        assert len(str(error)) < 3_000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 * len(data) + 2_000_000


@pytest.mark.parametrize("kind", SEALED)
def test_every_field_may_be_anything(kind: str):
    read, data = SEALED[kind]
    body = json.loads(data)["body"]
    for path in places(body):
        for value in HOSTILE:
            survives(read, seal(json.dumps(with_change(body, path, value))))


@pytest.mark.parametrize("kind", SEALED)
def test_every_field_may_be_missing_or_double(kind: str):
    read, data = SEALED[kind]
    body = json.loads(data)["body"]
    for key in body:
        survives(read, seal(json.dumps({name: item for name, item in body.items() if name != key})))
        text = json.dumps(body)
        survives(read, seal(text[:-1] + f', "{key}": ' + json.dumps(body[key]) + "}"))
    for raw in RAW:
        survives(read, seal(raw))
        survives(read, raw.encode())
        survives(read, b'{"sha256":"", "body":' + raw.encode() + b"}")


CHANGES = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8), st.binary(max_size=8)), min_size=1, max_size=4)


def mutated(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    for place, gone, new in changes:
        at = int(place * len(data))
        data = data[:at] + new + data[at + gone :]
    return data


@pytest.mark.parametrize("kind", SEALED)
@given(changes=CHANGES)
def test_any_bytes_may_be_changed(kind: str, changes: list[tuple[float, int, bytes]]):
    read, data = SEALED[kind]
    survives(read, mutated(data, changes))
    body = re.sub(rb'^\{"sha256":"[0-9a-f]*","body":|\}\n$', b"", data)
    survives(read, seal(mutated(body, changes).decode("utf-8", "replace")))


@given(CHANGES)
@settings(max_examples=300)
def test_any_bytes_of_a_header_may_be_changed(changes: list[tuple[float, int, bytes]]):
    length = len(IMAGE.rstrip(b"\0").rstrip(b" "))
    survives(read_header, mutated(IMAGE[:length], changes) + IMAGE[length:])


@given(st.binary(max_size=100), st.integers(0, 2**64 - 1))
def test_a_header_may_be_anything(data: bytes, length: int):
    survives(read_header, data)
    survives(read_header, length.to_bytes(8, "little") + data)
    survives(read_header, len(data).to_bytes(8, "little") + data)


def test_every_field_of_a_header_may_be_anything():
    header = json.loads(LAYOUT.header[8:])
    for path in places(header):
        for value in HOSTILE:
            data = spelled(json.dumps(with_change(header, path, value)))
            survives(read_header, len(data).to_bytes(8, "little") + data + IMAGE[len(LAYOUT.header) :])


@pytest.mark.parametrize("tag", sorted(values._READ))
def test_every_tag_may_hold_anything(tag: str):
    hostile = [json.dumps(value) for value in HOSTILE] + [
        f"[{json.dumps(a)},{json.dumps(b)}]" for a in HOSTILE for b in (0, [])
    ]
    for text in hostile:
        for index, raw in enumerate(RAW):
            text = text.replace(f'"@{index}@"', raw)
        survives(
            lambda data: values.decode(data, values.TensorRef), f'{{"${tag}":{text}}}'.encode("utf-8", "surrogatepass")
        )


def test_a_deep_stack_is_no_crash():
    deep: object = 1
    for _ in range(values.MAX_DEPTH):
        deep = [deep]
    document = values.encode(deep)

    def down(levels: int) -> object:
        return down(levels - 1) if levels else values.decode(document, values.TensorRef)

    refused = 0
    for levels in range(500, 960, 20):
        try:
            down(levels)
        except FormatError:
            refused += 1
        except RecursionError:
            pass  # not even the call itself had room
    assert refused


def test_large_files_are_refused_before_they_are_parsed():
    with pytest.raises(FormatError, match="more than"):
        manifest.decode_run(b" " * (manifest.MAX_RUN_FILE + 1))
