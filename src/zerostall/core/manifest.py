"""The small files of a run: its own, each rank's record of a step, and the manifest that commits the step.

A record names the layout its image has and the checksums of its bytes; the manifest holds the SHA-256 of every record.
So a manifest that is whole vouches for every byte of the step.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Literal

import msgspec

from zerostall.core import checksum, soundness
from zerostall.core.envelope import FIRST, seal, unseal
from zerostall.core.layout import CHUNK, Layout
from zerostall.core.values import Document
from zerostall.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_RUN_FILE = 1 << 20
MAX_RECORD_FILE = 1 << 30
MAX_MANIFEST_FILE = 1 << 28
"""The largest such files that are read, in bytes."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank knows of its image of one step.

    Attributes:
        run: id of the run.
        step: number of finished training steps.
        rank, world: whose image it is, of how many.
        layout: the layout's digest.
        begins: where this rank's boxes begin, as the layout numbers them; see `core.begins`.
        nbytes: of the image, header included.
        chunk_bytes: how many bytes each chunk has but the last.
        checksums: CRC-32C of each chunk.
        checksum: CRC-32C of the image.
        values: the rank's small values.
        metric: what the user said this step is worth, if anything.
        created: seconds since 1970, when `save` was called.
        version: of the format.
    """

    run: str
    step: int
    rank: int
    world: int
    layout: str
    nbytes: int
    chunk_bytes: int
    checksums: list[int]
    checksum: int
    values: Document
    metric: float | None = None
    created: float = 0.0
    begins: tuple[int, ...] = ()
    version: int = FIRST

    def extent(self, chunk: int) -> tuple[int, int]:
        """Where a chunk begins in the image, and its bytes."""
        start = chunk * self.chunk_bytes
        return start, min(self.chunk_bytes, self.nbytes - start)

    @classmethod
    def of(
        cls,
        layout: Layout,
        checksums: list[int],
        values: Document,
        *,
        run: str,
        step: int,
        rank: int = 0,
        world: int = 1,
        metric: float | None = None,
        created: float,
    ) -> Record:
        """The record of an image of that layout, whose chunks have these checksums."""
        return cls(
            run=run,
            step=step,
            rank=rank,
            world=world,
            layout=layout.digest,
            nbytes=layout.nbytes,
            chunk_bytes=CHUNK,
            checksums=checksums,
            checksum=checksum.whole(checksums, layout.nbytes, CHUNK),
            values=values,
            metric=metric,
            created=created,
            begins=layout.begins,
        )


class RankFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the manifest says of one rank: its image's size, checksum, layout and begins, and its record's SHA-256."""

    rank: int
    nbytes: int
    checksum: int
    record: str
    layout: str
    begins: tuple[int, ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The commit of a step: every rank, once. Fields as in Record.

    In memory of a node that is not rank 0's `ranks` are those of that node; what is written has all.
    """

    run: str
    step: int
    world: int
    ranks: tuple[RankFacts, ...]
    metric: float | None = None
    created: float = 0.0
    version: int = FIRST


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What run a folder belongs to.

    Attributes:
        run: its id; letters, digits, `.`, `_`, `-`.
        name: what the user calls it; may be empty.
        fingerprint: of the layout it began with, see `layout.fingerprint`.
        created: seconds since 1970.
    """

    run: str
    name: str
    fingerprint: str
    created: float = 0.0
    version: int = FIRST


# JSON has no infinities and no NaN, and a metric may well be one.
_Odd = Literal["nan", "inf", "-inf"]


class _RecordBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    version: int
    run: str
    step: int
    rank: int
    world: int
    layout: str
    begins: tuple[int, ...] = ()
    nbytes: int
    chunk_bytes: int
    checksums: list[int]
    checksum: int
    metric: float | _Odd | None
    created: float
    values: msgspec.Raw


class _ManifestBody(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    run: str
    step: int
    world: int
    metric: float | _Odd | None
    created: float
    ranks: tuple[RankFacts, ...]


class _RunBody(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    run: str
    name: str
    fingerprint: str
    created: float


_RECORD = msgspec.json.Decoder(_RecordBody)
_MANIFEST = msgspec.json.Decoder(_ManifestBody)
_RUN = msgspec.json.Decoder(_RunBody)


def encode_record(record: Record) -> bytes:
    """Return a record's file. ValueError for one that no reader would take."""
    _insist(soundness.record_problem(record) or soundness.values_problem(len(bytes(record.values))))
    body = _RecordBody(
        version=FIRST,
        run=record.run,
        step=record.step,
        rank=record.rank,
        world=record.world,
        layout=record.layout,
        begins=record.begins,
        nbytes=record.nbytes,
        chunk_bytes=record.chunk_bytes,
        checksums=record.checksums,
        checksum=record.checksum,
        metric=_written(record.metric),
        created=record.created,
        values=record.values,
    )
    return seal(msgspec.json.encode(body))


def decode_record(data: bytes, *, source: str = "record") -> Record:
    """Read a record's file and check all of it but its values, which `values.decode` reads.

    `source` is what messages call it. Raises CorruptError (damaged), VersionError (newer), FormatError (nonsense).
    """
    body, _ = unseal(data, _RECORD, source=source, limit=MAX_RECORD_FILE)
    record = Record(
        version=body.version,
        run=body.run,
        step=body.step,
        rank=body.rank,
        world=body.world,
        layout=body.layout,
        begins=body.begins,
        nbytes=body.nbytes,
        chunk_bytes=body.chunk_bytes,
        checksums=body.checksums,
        checksum=body.checksum,
        values=body.values,
        metric=_read(body.metric),
        created=body.created,
    )
    _refuse(source, soundness.record_problem(record))
    return record


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest's file. ValueError for one that no reader would take."""
    _insist(soundness.manifest_problem(manifest))
    body = _ManifestBody(
        version=FIRST,
        run=manifest.run,
        step=manifest.step,
        world=manifest.world,
        metric=_written(manifest.metric),
        created=manifest.created,
        ranks=manifest.ranks,
    )
    return seal(msgspec.json.encode(body))


def decode_manifest(data: bytes, *, source: str = "manifest") -> Manifest:
    """Read a manifest's file and check all of it. `source` and errors as in `decode_record`."""
    body, _ = unseal(data, _MANIFEST, source=source, limit=MAX_MANIFEST_FILE)
    manifest = Manifest(
        version=body.version,
        run=body.run,
        step=body.step,
        world=body.world,
        ranks=body.ranks,
        metric=_read(body.metric),
        created=body.created,
    )
    _refuse(source, soundness.manifest_problem(manifest))
    return manifest


def encode_run(run: RunFacts) -> bytes:
    """Return a run's file. ValueError for one that no reader would take."""
    _insist(soundness.run_problem(run))
    body = _RunBody(version=FIRST, run=run.run, name=run.name, fingerprint=run.fingerprint, created=run.created)
    return seal(msgspec.json.encode(body))


def decode_run(data: bytes, *, source: str = "run") -> RunFacts:
    """Read a run's file and check all of it. `source` and errors as in `decode_record`."""
    body, _ = unseal(data, _RUN, source=source, limit=MAX_RUN_FILE)
    run = RunFacts(
        version=body.version, run=body.run, name=body.name, fingerprint=body.fingerprint, created=body.created
    )
    _refuse(source, soundness.run_problem(run))
    return run


def facts(record: Record, data: bytes) -> RankFacts:
    """Return what a manifest says of a rank, from its record and that record's file."""
    digest = hashlib.sha256(data).hexdigest()
    return RankFacts(
        rank=record.rank,
        nbytes=record.nbytes,
        checksum=record.checksum,
        record=digest,
        layout=record.layout,
        begins=record.begins,
    )


def of_records(records: Sequence[Record]) -> Manifest:
    """The manifest of a step, from the records of all its ranks in order: the same bytes whoever makes it."""
    first = records[0]
    return Manifest(
        run=first.run,
        step=first.step,
        world=first.world,
        ranks=tuple(facts(record, encode_record(record)) for record in records),
        metric=first.metric,
        created=first.created,
    )


def record_difference(manifest: Manifest, record: Record, data: bytes) -> str:
    """Return in words why a record, read from `data`, is not the one a manifest vouches for; empty where it
    is.
    """
    if (record.run, record.step, record.world) != (manifest.run, manifest.step, manifest.world):
        named = "" if record.run == manifest.run else f", the manifest of run {manifest.run}"
        return f"the record is of step {record.step} of run {record.run}, with {record.world} ranks{named}"
    if record.rank >= len(manifest.ranks):
        return f"the manifest has no rank {record.rank}"
    if facts(record, data) != manifest.ranks[record.rank]:
        return f"the record of rank {record.rank} is not the one that was committed"
    return ""


def _written(metric: float | None) -> float | _Odd | None:
    if metric is None or math.isfinite(metric):
        return metric
    if math.isnan(metric):
        return "nan"
    return "inf" if metric > 0 else "-inf"


def _read(metric: float | _Odd | None) -> float | None:
    return float(metric) if isinstance(metric, str) else metric


def _insist(problem: str) -> None:
    if problem:
        raise ValueError(problem)


def _refuse(source: str, problem: str) -> None:
    if problem:
        raise FormatError(f"{source}: {problem}")
