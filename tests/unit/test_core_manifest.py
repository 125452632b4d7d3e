"""Records, manifests and run files: round trips, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math

import msgspec
import pytest

from zerostall.core import checksum, manifest, soundness, values
from zerostall.core.manifest import Manifest, RankFacts, Record, RunFacts
from zerostall.errors import CorruptError, FormatError, VersionError

LAYOUT = "ab" * 32
CHUNK = 16 << 20
CHECKSUMS = [1, 2, 3]
NBYTES = 2 * CHUNK + 5
RECORD = Record(
    run="run-1",
    step=12,
    rank=1,
    world=2,
    layout=LAYOUT,
    nbytes=NBYTES,
    chunk_bytes=CHUNK,
    checksums=CHECKSUMS,
    checksum=checksum.whole(CHECKSUMS, NBYTES, CHUNK),
    values=values.encode({"epoch": 3, "t": (1,)}),
    metric=0.25,
    created=1.5e9,
)
FILE = manifest.encode_record(RECORD)
FACTS = manifest.facts(RECORD, FILE)
MANIFEST = Manifest(
    run="run-1",
    step=12,
    world=2,
    metric=0.25,
    created=1.5e9,
    ranks=(RankFacts(rank=0, nbytes=4096, checksum=7, record="cd" * 32, layout=LAYOUT), FACTS),
)
RUN = RunFacts(run="run-1", name="übung [1]", fingerprint="ef" * 32, created=1.5e9)


def resealed(data: bytes, **changes: object) -> bytes:
    body = json.loads(data)["body"] | changes
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    return b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'","body":' + text + b"}\n"


def test_round_trips():
    assert manifest.decode_record(FILE) == RECORD
    assert values.decode(manifest.decode_record(FILE).values, str) == {"epoch": 3, "t": (1,)}
    assert manifest.decode_manifest(manifest.encode_manifest(MANIFEST)) == MANIFEST
    assert manifest.decode_run(manifest.encode_run(RUN)) == RUN


@pytest.mark.parametrize("metric", [None, 0.0, -1.5, 5, math.inf, -math.inf, math.nan])
def test_any_metric_comes_back(metric: float | None):
    read = manifest.decode_manifest(manifest.encode_manifest(msgspec.structs.replace(MANIFEST, metric=metric))).metric
    assert read == metric or (read is not None and metric is not None and math.isnan(read) and math.isnan(metric))
    record = manifest.decode_record(manifest.encode_record(msgspec.structs.replace(RECORD, metric=metric)))
    assert record.metric == read or math.isnan(record.metric)


def test_the_digest_is_that_of_the_body_as_it_stands():
    text = FILE.decode()
    prefix, suffix = text.index('"body":') + 7, "}\n"
    assert json.loads(text)["sha256"] == hashlib.sha256(text[prefix : -len(suffix)].encode()).hexdigest()


def test_values_stand_last_so_that_a_reader_may_stop_early():
    assert FILE.endswith(b'"values":{"epoch":3,"t":{"$tuple":[1]}}}}\n')


def test_a_record_is_told_from_the_committed_one():
    assert manifest.record_difference(MANIFEST, RECORD, FILE) == ""
    other = msgspec.structs.replace(RECORD, created=2.0)
    assert "not the one that was committed" in manifest.record_difference(
        MANIFEST, other, manifest.encode_record(other)
    )
    for changes in ({"step": 13}, {"run": "other"}, {"world": 3}):
        changed = msgspec.structs.replace(RECORD, **changes)
        assert "the record is of step" in manifest.record_difference(MANIFEST, changed, FILE)
    alone = msgspec.structs.replace(MANIFEST, ranks=MANIFEST.ranks[:1])
    assert "no rank 1" in manifest.record_difference(alone, RECORD, FILE)


DECODERS = {
    "record": (manifest.decode_record, FILE),
    "manifest": (manifest.decode_manifest, manifest.encode_manifest(MANIFEST)),
    "run": (manifest.decode_run, manifest.encode_run(RUN)),
}


@pytest.mark.parametrize("kind", DECODERS)
def test_damage_is_corrupt_and_news_are_a_version(kind: str):
    decode, data = DECODERS[kind]
    for damaged in (
        b"",
        data[:-2],
        data[:50],
        data.replace(b"run-1", b"run-2"),
        data.upper(),
        b"[" * 1000,
        b"null",
        b"\xff\xfe",
    ):
        with pytest.raises(CorruptError) as caught:
            decode(damaged, source="here.json")
        assert "here.json" in str(caught.value)
    with pytest.raises(VersionError) as newer:
        decode(resealed(data, version=999), source="here.json")
    assert "999" in str(newer.value) and "here.json" in str(newer.value) and newer.value.hint
    for version in (0, -1, "1", None, 1.5, 10**400):
        with pytest.raises(FormatError):
            decode(resealed(data, version=version))
    for at in range(len(data) - 1):
        with pytest.raises(CorruptError):
            decode(data[:at])


def ranks_with(**changes: object) -> list[object]:
    ranks = json.loads(DECODERS["manifest"][1])["body"]["ranks"]
    return [ranks[0], ranks[1] | changes]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("record", {"step": -1}),
        ("record", {"step": 2**63}),
        ("record", {"step": 1.5}),
        ("record", {"rank": 2}),
        ("record", {"rank": -1}),
        ("record", {"world": 0}),
        ("record", {"world": 2**40}),
        ("record", {"layout": "x"}),
        ("record", {"layout": "AB" * 32}),
        ("record", {"layout": "../" * 20}),
        ("record", {"nbytes": 0}),
        ("record", {"nbytes": 2**64}),
        ("record", {"nbytes": NBYTES + 1}),
        ("record", {"chunk_bytes": 0}),
        ("record", {"chunk_bytes": 4097}),
        ("record", {"chunk_bytes": 2**40}),
        ("record", {"checksums": [1, 2]}),
        ("record", {"checksums": [1, 2, 2**32]}),
        ("record", {"checksums": [1, 2, -1]}),
        ("record", {"checksums": [1, 2, 4]}),
        ("record", {"checksums": None}),
        ("record", {"checksum": 5}),
        ("record", {"checksum": 10**50}),
        ("record", {"run": ""}),
        ("record", {"run": "../x"}),
        ("record", {"run": "a\nb"}),
        ("record", {"metric": "x"}),
        ("record", {"created": "now"}),
        ("manifest", {"world": 1}),
        ("manifest", {"world": 3}),
        ("manifest", {"ranks": []}),
        ("manifest", {"ranks": ranks_with(rank=0)}),
        ("manifest", {"ranks": ranks_with(record="x")}),
        ("manifest", {"ranks": ranks_with(layout=5)}),
        ("manifest", {"ranks": ranks_with(nbytes=-1)}),
        ("manifest", {"ranks": ranks_with(checksum=-1)}),
        ("manifest", {"ranks": [[]]}),
        ("manifest", {"step": None}),
        ("run", {"run": "a b"}),
        ("run", {"fingerprint": ""}),
        ("run", {"name": 5}),
    ],
)
def test_files_that_contradict_themselves_are_refused(kind: str, changes: dict[str, object]):
    decode, data = DECODERS[kind]
    with pytest.raises(FormatError) as caught:
        decode(resealed(data, **changes), source="here.json")
    assert "here.json" in str(caught.value) and not isinstance(caught.value, CorruptError)


def test_what_no_reader_would_take_is_not_written():
    for changes in ({"rank": 5}, {"checksum": 1}, {"run": "a b"}, {"created": math.nan}):
        with pytest.raises(ValueError):
            manifest.encode_record(msgspec.structs.replace(RECORD, **changes))
    with pytest.raises(ValueError):
        manifest.encode_manifest(msgspec.structs.replace(MANIFEST, world=7))
    with pytest.raises(ValueError):
        manifest.encode_run(msgspec.structs.replace(RUN, run=".."))


def test_a_record_that_no_message_could_carry_is_not_written(monkeypatch: pytest.MonkeyPatch):
    large = msgspec.structs.replace(RECORD, values=values.encode({"blob": bytes(3000)}))
    manifest.encode_record(large)
    monkeypatch.setattr(soundness, "MAX_VALUES", 2000)
    with pytest.raises(ValueError, match="a record holds up to 2000"):
        manifest.encode_record(large)


def test_fields_of_later_versions_are_passed_over():
    assert manifest.decode_manifest(resealed(DECODERS["manifest"][1], later=[{}])) == MANIFEST
