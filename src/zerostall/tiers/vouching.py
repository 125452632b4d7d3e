"""The files of a committed step on disk that vouch for an image: read anew, and put in their place again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.layout import Layout
from zerostall.core.manifest import Manifest, Record
from zerostall.errors import SnapshotNotFoundError
from zerostall.tiers.files import storage_errors, write_whole
from zerostall.tiers.step_files import committed

if TYPE_CHECKING:
    from zerostall.tiers.disk import DiskTier


def check(disk: DiskTier, step: int, rank: int) -> None:
    """Read anew what vouches for an image: manifest, record, both files of the layout. Raises as `DiskTier.open`."""
    record = disk.open(step, rank).record
    disk.layouts.check(record.layout, record.begins)


def write_again(disk: DiskTier, part: Manifest | Record | Layout) -> None:
    """Put a damaged file in its place again; `part` is what was in it.

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
    with storage_errors(folder, f"step {part.step}", len(data)):
        write_whole(folder / name, data, disk.modes)
