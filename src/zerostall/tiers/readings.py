"""What was read of a committed step, checked: the same for every tier that holds runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.core import manifest as manifests
from zerostall.errors import CorruptError, SnapshotNotFoundError
from zerostall.tiers.contract import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, RankFacts


def manifest_of(step: int, data: bytes, source: str) -> Manifest:
    """The manifest of that step. FormatError, CorruptError where it is damaged, or another's."""
    manifest = manifests.decode_manifest(data, source=source)
    if manifest.step != step:
        raise CorruptError(f"{source} is the manifest of step {manifest.step}")
    return manifest


def facts_of(manifest: Manifest, rank: int, where: Path | str) -> RankFacts:
    """What the manifest says of a rank. SnapshotNotFoundError where it has no such rank."""
    if not 0 <= rank < manifest.world:
        raise SnapshotNotFoundError(f"step {manifest.step} in {where} has no rank {rank} (world {manifest.world})")
    return manifest.ranks[rank]


def stored_of(manifest: Manifest, data: bytes, source: str, layout: Callable[[str, Sequence[int]], Layout]) -> Stored:
    """Layout and record of a rank's image, from the record's bytes. CorruptError where they do not fit the manifest."""
    record = manifests.decode_record(data, source=source)
    if problem := manifests.record_difference(manifest, record, data):
        raise CorruptError(f"{source}: {problem}")
    found = layout(record.layout, record.begins)
    if found.nbytes != record.nbytes:
        raise CorruptError(f"{source}: {record.nbytes} bytes, but its layout has {found.nbytes}")
    return Stored(found, record)
