"""The small files of a run: its own, each rank's record of a step, and the manifest that commits the step.

A record names the layout its image has and the checksums of its bytes; the manifest holds the SHA-256 of every record.
So a manifest that is whole vouches for every byte of the step.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Literal

import msgspec

from zerostall.core import checksum
from zerostall.core.envelope import VERSION, seal, unseal
from zerostall.core.layout import CHUNK, Layout
from zerostall.core.quoting import quote
from zerostall.core.safetensors import ALIGN, MAX_BYTES
from zerostall.core.steps import MAX_RANK, MAX_STEP
from zerostall.core.values import Document
from zerostall.errors import FormatError

MAX_RUN_FILE = 1 << 20
MAX_RECORD_FILE = 1 << 30
MAX_MANIFEST_FILE = 1 << 28
"""The largest such files that are read, in bytes."""

MAX_VALUES = 1 << 28
"""The most bytes of small values that are written into a record; any message to the agent can carry these."""

_MAX_CHUNK = 1 << 32
_DIGEST = re.compile("[0-9a-f]{64}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank knows of its image of one step.

    Attributes:
        run: id of the run.
        step: number of finished training steps.
        rank, world: whose image it is, of how many.
        layout: the layout's digest.
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
    version: int = VERSION

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
        )


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says of one rank: its image's size, checksum and layout, and its record file's SHA-256."""

    rank: int
    nbytes: int
    checksum: int
    record: str
    layout: str


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
    version: int = VERSION


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
    version: int = VERSION


# JSON has no infinities and no NaN, and a metric may well be one.
_Odd = Literal["nan", "inf", "-inf"]


class _RecordBody(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    run: str
    step: int
    rank: int
    world: int
    layout: str
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
    _insist(_record_problem(record) or values_problem(len(bytes(record.values))))
    body = _RecordBody(
        version=VERSION,
        run=record.run,
        step=record.step,
        rank=record.rank,
        world=record.world,
        layout=record.layout,
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
        nbytes=body.nbytes,
        chunk_bytes=body.chunk_bytes,
        checksums=body.checksums,
        checksum=body.checksum,
        values=body.values,
        metric=_read(body.metric),
        created=body.created,
    )
    _refuse(source, _record_problem(record))
    return record


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest's file. ValueError for one that no reader would take."""
    _insist(_manifest_problem(manifest))
    body = _ManifestBody(
        version=VERSION,
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
    _refuse(source, _manifest_problem(manifest))
    return manifest


def encode_run(run: RunFacts) -> bytes:
    """Return a run's file. ValueError for one that no reader would take."""
    _insist(_run_problem(run))
    body = _RunBody(version=VERSION, run=run.run, name=run.name, fingerprint=run.fingerprint, created=run.created)
    return seal(msgspec.json.encode(body))


def decode_run(data: bytes, *, source: str = "run") -> RunFacts:
    """Read a run's file and check all of it. `source` and errors as in `decode_record`."""
    body, _ = unseal(data, _RUN, source=source, limit=MAX_RUN_FILE)
    run = RunFacts(
        version=body.version, run=body.run, name=body.name, fingerprint=body.fingerprint, created=body.created
    )
    _refuse(source, _run_problem(run))
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
    )


def record_difference(manifest: Manifest, record: Record, data: bytes) -> str:
    """Return in words why a record, read from `data`, is not the one a manifest vouches for; empty where it
    is.
    """
    if (record.run, record.step, record.world) != (manifest.run, manifest.step, manifest.world):
        return f"the record is of step {record.step} of run {record.run}, with {record.world} ranks"
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


def _common_problem(run: str, created: float) -> str:
    if not _RUN_ID.fullmatch(run):
        return f"a run's id has 1 to 128 letters, digits, '.', '_' and '-', not {quote(run)}"
    if not math.isfinite(created):
        return "the time it was created is no number"
    return ""


def _step_problem(step: int, world: int) -> str:
    if not 0 <= step <= MAX_STEP:
        return "a step is an integer from 0 to 2^63 - 1"
    if not 1 <= world <= MAX_RANK + 1:
        return "a run has from 1 to 2^31 ranks"
    return ""


def _image_problem(nbytes: int, crc: int, layout: str) -> str:
    if not ALIGN <= nbytes <= MAX_BYTES:
        return "an image has from 4096 to 2^63 - 1 bytes"
    if not 0 <= crc <= 0xFFFFFFFF:
        return "the image's checksum is no CRC-32C"
    if not _DIGEST.fullmatch(layout):
        return "the layout's digest is no SHA-256 in lower-case hex"
    return ""


def values_problem(nbytes: int) -> str:
    """Say why small values of so many bytes are not written, or return ''."""
    if nbytes <= MAX_VALUES:
        return ""
    return f"the small values take {nbytes} bytes as JSON; a record holds up to {MAX_VALUES}"


def _record_problem(record: Record) -> str:
    problem = (
        _common_problem(record.run, record.created)
        or _step_problem(record.step, record.world)
        or _image_problem(record.nbytes, record.checksum, record.layout)
    )
    if problem:
        return problem
    if not 0 <= record.rank < record.world:
        return f"of {record.world} ranks, this cannot be one"
    if not ALIGN <= record.chunk_bytes <= _MAX_CHUNK or record.chunk_bytes % ALIGN:
        return "a chunk's size is a multiple of 4096 up to 2^32"
    try:
        crc = checksum.whole(record.checksums, record.nbytes, record.chunk_bytes)
    except ValueError as error:
        return str(error)
    return "" if crc == record.checksum else "the image's checksum is not that of its chunks together"


def _manifest_problem(manifest: Manifest) -> str:
    problem = _common_problem(manifest.run, manifest.created) or _step_problem(manifest.step, manifest.world)
    if problem:
        return problem
    if len(manifest.ranks) != manifest.world:
        return f"{len(manifest.ranks)} ranks are listed, not {manifest.world}"
    for index, rank in enumerate(manifest.ranks):
        if rank.rank != index:
            return f"in place of rank {index} another is listed"
        if problem := _image_problem(rank.nbytes, rank.checksum, rank.layout):
            return f"rank {index}: {problem}"
        if not _DIGEST.fullmatch(rank.record):
            return f"rank {index}: the record's digest is no SHA-256 in lower-case hex"
    return ""


def _run_problem(run: RunFacts) -> str:
    if problem := _common_problem(run.run, run.created):
        return problem
    if not _DIGEST.fullmatch(run.fingerprint):
        return "the fingerprint is no SHA-256 in lower-case hex"
    return ""
