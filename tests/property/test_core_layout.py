"""Layouts: whatever the tensors, they lie where the format says, and every reader finds them."""

from __future__ import annotations

import hashlib
import json
import math
import random

import numpy as np
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from zerostall.core import checksum, layout, manifest, values
from zerostall.core import safetensors as headers
from zerostall.core.dtypes import DTYPES
from zerostall.core.layout import Shard, View
from zerostall.core.manifest import Manifest, RankFacts, Record

NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def shards(draw: st.DrawFn) -> list[Shard]:
    made = []
    for name in draw(st.lists(NAMES, unique=True, max_size=12)):
        dims = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)), max_size=4))
        shape = tuple(dim[0] for dim in dims)
        start = tuple(dim[1] for dim in dims)
        whole = tuple(sum(dim) for dim in dims)
        made.append(Shard(name, draw(st.sampled_from(sorted(DTYPES))), shape, whole, start))
    return made


@st.composite
def layouts(draw: st.DrawFn) -> layout.Layout:
    boxes = draw(shards())
    views = []
    bases = [box for box in boxes if 0 not in box.shape]
    if bases:
        for name in draw(st.lists(NAMES, unique=True, max_size=3)):
            base = draw(st.sampled_from(bases))
            items = math.prod(base.shape)
            first = draw(st.integers(0, items - 1))
            step = draw(st.integers(0, 3))
            count = 1 + (items - 1 - first) // step if step else 5
            start = first * DTYPES[base.dtype].itemsize
            if all(name != box.name for box in boxes):
                views.append(View(name, base.name, base.dtype, (count,), (step,), start))
    return layout.build(boxes, views)


@given(layouts())
def test_tensors_lie_where_the_format_says(made: layout.Layout):
    assert len(made.header) % layout.ALIGN == 0
    at = len(made.header)
    for before, entry in zip((None, *made.entries), made.entries, strict=False):
        itemsize = DTYPES[entry.dtype].itemsize
        assert entry.offset == at and at % itemsize == 0
        assert entry.nbytes == math.prod(entry.shape) * itemsize
        at += entry.nbytes
        if before is not None:
            assert (-DTYPES[before.dtype].itemsize, before.name) < (-itemsize, entry.name)
    assert at == made.nbytes


@given(layouts())
def test_a_layout_comes_back_from_its_file(made: layout.Layout):
    assert layout.decode(layout.encode(made), made.begins) == made
    assert (made.version == 1) == all(entry.shape == entry.global_shape for entry in made.entries)


def canonical(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


@given(layouts())
def test_any_json_writer_gives_the_same_digest_and_header(made: layout.Layout):
    body = canonical(json.loads(layout.encode(made))["body"])
    assert hashlib.sha256(body).hexdigest() == made.digest
    text = canonical(json.loads(made.header[8:]))
    assert made.header[8:].rstrip(b" ") == text
    assert len(made.header) == -(-(8 + len(text)) // 4096) * 4096
    assert int.from_bytes(made.header[:8], "little") == len(made.header) - 8


@given(shards(), st.randoms(use_true_random=False))
def test_order_does_not_matter(boxes: list[Shard], luck: random.Random):
    shuffled = list(boxes)
    luck.shuffle(shuffled)
    assert layout.build(shuffled) == layout.build(boxes)


@given(layouts(), st.randoms(use_true_random=False))
def test_safetensors_reads_every_image(made: layout.Layout, luck: random.Random):
    image = made.header + luck.randbytes(made.nbytes - len(made.header))
    with_codes = dict(safetensors.deserialize(image))
    assert set(with_codes) == {entry.name for entry in made.entries}
    for entry in made.entries:
        found = with_codes[entry.name]
        dtype = DTYPES[entry.dtype]
        assert found["dtype"] == dtype.code
        assert tuple(found["shape"]) == entry.shape + dtype.trailing
        assert bytes(found["data"]) == image[entry.offset : entry.offset + entry.nbytes]


@given(layouts())
def test_our_own_reader_agrees(made: layout.Layout):
    read = headers.decode(made.header, made.nbytes)
    assert read.nbytes == len(made.header)
    assert {(tensor.name, tensor.offset, tensor.nbytes) for tensor in read.tensors} == {
        (entry.name, entry.offset, entry.nbytes) for entry in made.entries
    }


@given(st.dictionaries(NAMES, st.sampled_from("bBhHiIqQefd?"), max_size=6), st.integers(0, 5))
def test_we_read_what_safetensors_writes(kinds: dict[str, str], length: int):
    arrays = {name: np.arange(length).astype(kind) for name, kind in kinds.items()}
    data = safetensors.numpy.save(arrays, {"a": "b"})
    header = headers.decode(data[: headers.header_nbytes(data[:8], len(data))], len(data))
    assert header.metadata == {"a": "b"}
    assert len(header.tensors) == len(arrays)
    for tensor in header.tensors:
        assert tensor.dtype == arrays[tensor.name].dtype.name
        assert tensor.shape == (length,)
        assert data[tensor.offset : tensor.offset + tensor.nbytes] == arrays[tensor.name].tobytes()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@given(st.binary(max_size=200), st.integers(1, 60))
@settings(max_examples=50)
def test_checksums_join(data: bytes, chunk: int):
    chunks = [crc32c(data[at : at + chunk]) for at in range(0, len(data), chunk)]
    assert checksum.whole(chunks, len(data), chunk) == crc32c(data)
    cut = chunk % (len(data) + 1)
    assert checksum.combine(crc32c(data[:cut]), crc32c(data[cut:]), len(data) - cut) == crc32c(data)


CRCS = st.integers(0, 2**32 - 1)
DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
METRICS = st.none() | st.floats(allow_nan=False)


@given(st.lists(CRCS, min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 4095), METRICS, DIGESTS, st.data())
def test_records_and_manifests_come_back(
    sums: list[int], pages: int, short: int, metric: float | None, digest: str, data: st.DataObject
):
    chunk = pages * 4096
    nbytes = max(4096, chunk * len(sums) - short)
    world = data.draw(st.integers(1, 5))
    record = Record(
        run=data.draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)),
        step=data.draw(st.integers(0, 2**63 - 1)),
        rank=data.draw(st.integers(0, world - 1)),
        world=world,
        layout=digest,
        nbytes=nbytes,
        chunk_bytes=chunk,
        checksums=sums,
        checksum=checksum.whole(sums, nbytes, chunk),
        values=values.encode({"x": metric}),
        metric=metric,
        created=data.draw(st.floats(0, 1e12)),
    )
    file = manifest.encode_record(record)
    assert manifest.decode_record(file) == record
    facts = manifest.facts(record, file)
    ranks = [
        facts if rank == record.rank else RankFacts(rank=rank, nbytes=4096, checksum=0, record=digest, layout=digest)
        for rank in range(world)
    ]
    whole = Manifest(
        run=record.run,
        step=record.step,
        world=world,
        ranks=tuple(ranks),
        metric=metric,
        created=record.created,
    )
    assert manifest.decode_manifest(manifest.encode_manifest(whole)) == whole
    assert manifest.record_difference(whole, record, file) == ""
