"""What vouches for an image on disk, its step's manifest, its record and its layout: written anew where it is damaged.

Each is known by its digest to something else: the manifest names the records' and the records name the layouts'. So
what another copy gives is that very file or is not taken. Of a manifest nobody has the digest: it is what all records
of the folder say together, and that it was there at all, damaged as it is, proves that the step was committed.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.errors import FormatError, SnapshotNotFoundError, StorageError, VersionError, ZerostallError
from zerostall.telemetry import log
from zerostall.tiers import vouching
from zerostall.tiers.files import read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerostall.agent.run import Run
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, Record
    from zerostall.tiers.contract import Stored
    from zerostall.tiers.disk import DiskTier

_WRITE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Voucher:
    """A file that was damaged.

    Attributes:
        what, damage: which one, and what is wrong with it.
        source: what it was made again from; "" where nobody has it.
    """

    what: str
    damage: str
    source: str


class Vouchers:
    """For the thread that mends; the run's own writer writes, so nothing is written into a step that is on its way out.

    Args:
        manifests_here: manifests that this node's memory has of a step. Any thread.
        elsewhere: what a rank's image at a step is, by its copies elsewhere, and what messages call these.
    """

    def __init__(
        self,
        manifests_here: Callable[[Run, int], list[Manifest]],
        elsewhere: Callable[[Run, int, int], Iterator[tuple[str, Stored]]],
    ) -> None:
        self._manifests_here = manifests_here
        self._elsewhere = elsewhere

    def make_good(self, run: Run, step: int, rank: int) -> list[Voucher]:
        """Look at what vouches for a rank's image, and write anew what is damaged of it. What was."""
        found: list[Voucher] = []
        manifest = self._manifest(run, step, found)
        record = self._record(run, manifest, rank, found) if manifest is not None and rank < manifest.world else None
        if record is not None:
            self._layout(run, record, found)
        return found

    def _manifest(self, run: Run, step: int, found: list[Voucher]) -> Manifest | None:
        disk = run.folder.disk
        try:
            return disk.manifest(step)
        except (SnapshotNotFoundError, VersionError):
            return None
        except FormatError as error:
            damage = str(error.args[0])
        if not _is_file(disk, step, names.MANIFEST):
            return None
        records = list(vouching.records(disk, step))
        for source, manifest in self._manifests(run, step, records):
            if manifest.run != run.folder.facts.run:
                continue  # a step of another run that was put here is nothing to be made good
            if records and all(vouching.speaks_of(manifest, record) for record in records):
                return manifest if self._write(run, manifest, Voucher("the manifest", damage, source), found) else None
        found.append(Voucher("the manifest", damage, ""))
        return None

    def _manifests(self, run: Run, step: int, records: list[Record]) -> Iterator[tuple[str, Manifest]]:
        for manifest in self._manifests_here(run, step):
            yield "this node's memory", manifest
        if records and [record.rank for record in records] == list(range(records[0].world)):
            yield "the records beside it", manifests.of_records(records)
        if (remote := run.fetches.remote) is not None:
            try:
                yield "the tier remote", remote.manifest(step)
            except (ZerostallError, OSError) as error:
                log.info("step %d in the remote tier: %s", step, error)

    def _record(self, run: Run, manifest: Manifest, rank: int, found: list[Voucher]) -> Record | None:
        disk, step = run.folder.disk, manifest.step
        try:
            return _record_of(disk, manifest, rank)
        except (VersionError, SnapshotNotFoundError):
            return None  # written by a newer zerostall; in another node's folder
        except FormatError as error:
            damage = str(error.args[0])
        if not _is_file(disk, step, names.record_file(rank)):
            return None
        for source, stored in self._elsewhere(run, rank, step):
            if vouching.speaks_of(manifest, stored.record):
                voucher = Voucher("its record", damage, source)
                return stored.record if self._write(run, stored.record, voucher, found) else None
        found.append(Voucher("its record", damage, ""))
        return None

    def _layout(self, run: Run, record: Record, found: list[Voucher]) -> None:
        disk, step, rank = run.folder.disk, record.step, record.rank
        try:
            vouching.check(disk, step, rank)
            return
        except (FormatError, SnapshotNotFoundError, StorageError) as error:
            damage = str(error.args[0])
        for source, layout in self._layouts(run, record):
            if layout.digest == record.layout:
                self._write(run, layout, Voucher("its layout", damage, source), found)
                return
        found.append(Voucher("its layout", damage, ""))

    def _layouts(self, run: Run, record: Record) -> Iterator[tuple[str, Layout]]:
        try:
            yield "what is known of it", run.folder.disk.open(record.step, record.rank).layout
        except (ZerostallError, OSError) as error:
            log.debug("%s", error)
        for source, stored in self._elsewhere(run, record.rank, record.step):
            yield source, stored.layout

    @staticmethod
    def _write(run: Run, part: Manifest | Record | Layout, voucher: Voucher, found: list[Voucher]) -> bool:
        """On the thread that alone writes to the folder. Whether it is in its place."""
        written, failures = threading.Event(), list[Exception]()

        def write() -> None:
            try:
                run.folder.hold()
                vouching.write_again(run.folder.disk, part)
            except Exception as error:  # noqa: BLE001 - whoever waits says so
                failures.append(error)
            finally:
                written.set()

        run.trickle.meanwhile(write)
        if not written.wait(_WRITE_SECONDS):
            failures.append(StorageError(f"{run.where} has not taken it for {_WRITE_SECONDS:.0f} s"))
        if failures:
            log.error("%s: %s cannot be written anew: %s", run.where, voucher.what, failures[0])
        found.append(Voucher(voucher.what, voucher.damage, "" if failures else voucher.source))
        return not failures


def _is_file(disk: DiskTier, step: int, name: str) -> bool:
    """Whether it may be written anew: a link or a folder in its place was put there by somebody."""
    path = disk.where / names.step_folder(step) / name
    return not os.path.lexists(path) or (path.is_file() and not path.is_symlink())


def _record_of(disk: DiskTier, manifest: Manifest, rank: int) -> Record:
    """The record beside the manifest, if it is the one that the manifest speaks of."""
    path = disk.where / names.step_folder(manifest.step) / names.record_file(rank)
    try:
        data = read_file(path)
    except FileNotFoundError:
        return disk.open(manifest.step, rank).record  # elsewhere, or nowhere
    record = manifests.decode_record(data, source=str(path))
    if problem := manifests.record_difference(manifest, record, data):
        raise FormatError(f"{path}: {problem}")
    return record
