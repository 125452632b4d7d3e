"""What is wrong with a record, a manifest or a run's facts, in words; empty where nothing is."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from zerostall.core import checksum
from zerostall.core.quoting import quote
from zerostall.core.safetensors import ALIGN, MAX_BYTES
from zerostall.core.steps import MAX_RANK, MAX_STEP

if TYPE_CHECKING:
    from zerostall.core.manifest import Manifest, Record, RunFacts

MAX_VALUES = 1 << 28
"""The most bytes of small values that are written into a record; any message to the agent can carry these."""

_MAX_CHUNK = 1 << 32
_DIGEST = re.compile("[0-9a-f]{64}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def run_id_problem(run: str) -> str:
    return (
        "" if _RUN_ID.fullmatch(run) else f"a run's id has 1 to 128 letters, digits, '.', '_' and '-', not {quote(run)}"
    )


def _common_problem(run: str, created: float) -> str:
    if problem := run_id_problem(run):
        return problem
    if not math.isfinite(created):
        return "the time it was created is no number"
    return ""


def _step_problem(step: int, world: int) -> str:
    if not 0 <= step <= MAX_STEP:
        return "a step is an integer from 0 to 2^63 - 1"
    if not 1 <= world <= MAX_RANK + 1:
        return "a run has from 1 to 2^31 ranks"
    return ""


def _image_problem(nbytes: int, crc: int, layout: str, begins: tuple[int, ...]) -> str:
    if not ALIGN <= nbytes <= MAX_BYTES:
        return "an image has from 4096 to 2^63 - 1 bytes"
    if not 0 <= crc <= 0xFFFFFFFF:
        return "the image's checksum is no CRC-32C"
    if not _DIGEST.fullmatch(layout):
        return "the layout's digest is no SHA-256 in lower-case hex"
    if begins and not (min(begins) >= 0 and max(begins) <= MAX_BYTES):
        return "a begin is an integer from 0 to 2^63 - 1"
    return ""


def values_problem(nbytes: int) -> str:
    """Say why small values of so many bytes are not written, or return ''."""
    if nbytes <= MAX_VALUES:
        return ""
    return f"the small values take {nbytes} bytes as JSON; a record holds up to {MAX_VALUES}"


def record_problem(record: Record) -> str:
    problem = (
        _common_problem(record.run, record.created)
        or _step_problem(record.step, record.world)
        or _image_problem(record.nbytes, record.checksum, record.layout, record.begins)
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


def manifest_problem(manifest: Manifest) -> str:
    problem = _common_problem(manifest.run, manifest.created) or _step_problem(manifest.step, manifest.world)
    if problem:
        return problem
    if len(manifest.ranks) != manifest.world:
        return f"{len(manifest.ranks)} ranks are listed, not {manifest.world}"
    for index, rank in enumerate(manifest.ranks):
        if rank.rank != index:
            return f"in place of rank {index} another is listed"
        if problem := _image_problem(rank.nbytes, rank.checksum, rank.layout, rank.begins):
            return f"rank {index}: {problem}"
        if not _DIGEST.fullmatch(rank.record):
            return f"rank {index}: the record's digest is no SHA-256 in lower-case hex"
    return ""


def run_problem(run: RunFacts) -> str:
    if problem := _common_problem(run.run, run.created):
        return problem
    if not _DIGEST.fullmatch(run.fingerprint):
        return "the fingerprint is no SHA-256 in lower-case hex"
    return ""
