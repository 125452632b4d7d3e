"""What was read of a committed step, checked: the same for every tier that holds runs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.manifest import RunFacts
from zerostall.errors import CorruptError, ForeignStepError, SnapshotNotFoundError
from zerostall.tiers.contract import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, RankFacts


def manifest_of(step: int, data: bytes, source: str, run: str | None = None) -> Manifest:
    """The manifest of that step of that run; None where nobody knows which run it should be of.

    Raises:
        FormatError, CorruptError: it is damaged, or another step's.
        ForeignStepError: it is another run's.
    """
    manifest = manifests.decode_manifest(data, source=source)
    if manifest.step != step:
        raise CorruptError(f"{source} is the manifest of step {manifest.step}")
    if run is not None and manifest.run != run:
        raise ForeignStepError(f"{source} is a step of another run, {manifest.run}: what it lies in is run {run}")
    return manifest


def run_told_by(found: Iterable[Manifest]) -> RunFacts | None:
    """The run that most of these manifests are of, by its id alone; of as many, the first's. None of none."""
    runs = Counter(manifest.run for manifest in found).most_common(1)
    return RunFacts(run=runs[0][0], name="", fingerprint=layouts.fingerprint([])) if runs else None


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
