"""The files of a committed step on disk that vouch for an image: read anew, and put in their place again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.layout import Layout
from zerostall.core.manifest import Manifest, Record
from zerostall.errors import FormatError, SnapshotNotFoundError, VersionError
from zerostall.tiers.files import read_file, storage_errors, write_whole
from zerostall.tiers.step_files import committed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerostall.tiers.disk import DiskTier


def check(disk: DiskTier, step: int, rank: int) -> None:
    """Read anew what vouches for an image: manifest, record, both files of the layout. Raises as `DiskTier.open`."""
    record = disk.open(step, rank).record
    disk.layouts.check(record.layout, record.begins)


def write_again(disk: DiskTier, part: Manifest | Record | Layout) -> None:
    """Put a damaged file in its place again; `part` is what was in it.

    For the run's writer: since the damage was found, the step may have gone, or another of its number have come.

    Raises:
        SnapshotNotFoundError: the step is not there any more.
        StorageError: the disk refuses.
    """
    if isinstance(part, Layout):
        with storage_errors(disk.where, "a layout", 0):
            disk.layouts.write_again(part)
        return
    if isinstance(part, Manifest):
        name, data = names.MANIFEST, manifests.encode_manifest(part)
    else:
        name, data = names.record_file(part.rank), manifests.encode_record(part)
    folder = disk.where / names.step_folder(part.step)
    if not committed(folder):
        raise SnapshotNotFoundError(f"no step {part.step} in {disk.where}")
    if not _of_the_step_there(disk, part):
        raise SnapshotNotFoundError(f"another step {part.step} is in {disk.where} by now")
    with storage_errors(folder, f"step {part.step}", len(data)):
        write_whole(folder / name, data, disk.modes)


def _of_the_step_there(disk: DiskTier, part: Manifest | Record) -> bool:
    """Does it belong to the step of its number that is there now?"""
    try:
        manifest = disk.manifest(part.step)
    except VersionError:
        return False
    except FormatError:
        there = list(records(disk, part.step))
        return isinstance(part, Manifest) and bool(there) and all(speaks_of(part, record) for record in there)
    return manifest == part if isinstance(part, Manifest) else speaks_of(manifest, part)


def records(disk: DiskTier, step: int) -> Iterator[Record]:
    """Those of a committed step's folder that are whole, by rank."""
    folder = disk.where / names.step_folder(step)
    ranks = sorted(rank for path in folder.glob("rank-*.json") if (rank := names.parse_record(path.name)) is not None)
    for rank in ranks:
        try:
            record = manifests.decode_record(read_file(folder / names.record_file(rank)))
        except (FormatError, OSError):
            continue
        if (record.step, record.rank) == (step, rank):
            yield record


def speaks_of(manifest: Manifest, record: Record) -> bool:
    """Is the record the very one that the manifest names?"""
    same = (manifest.run, manifest.step, manifest.world) == (record.run, record.step, record.world)
    return same and manifest.ranks[record.rank] == manifests.facts(record, manifests.encode_record(record))
