"""Images of one rank of another node's run, in a folder of this node's disk: each is committed by itself.

    <where>/layouts/…                                      as in a run's folder
    <where>/step-000000000012/rank-00003.safetensors       the image
    <where>/step-000000000012/rank-00003.json              its record
    <where>/step-000000000012/replica.json                 the commit, last: what the image is part of

No manifest: of the other ranks nothing is here. Whether all of them can be had is for the manager to say.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import envelope
from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.errors import CorruptError, FormatError, SnapshotNotFoundError
from zerostall.tiers.contract import Stored
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.draft_folders import new_beside, swap
from zerostall.tiers.files import (
    discard,
    fsync_folder,
    read_file,
    remove_tree,
    storage_errors,
    write_whole,
)
from zerostall.tiers.image_reads import read_image
from zerostall.tiers.leftovers import bring_back_swapped, staged_folders

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerostall import native
    from zerostall.tiers.contract import Image

_MOST_BYTES = 1 << 16


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """What a lone image is part of.

    Attributes:
        created: when this rank saved it, and `began` when rank 0 did.
        attempt: what the manager called the attempt at the time.
        record: SHA-256 of the record's file.
        where, name: the run's folder on the node that it trained on, and what its user calls it.
    """

    run: str
    rank: int
    world: int
    step: int
    created: float
    began: float
    attempt: str
    record: str
    nbytes: int
    where: str = ""
    name: str = ""
    version: int = envelope.FIRST


_REPLICA = msgspec.json.Decoder(Replica)


class LoneImages:
    """One thread writes, any may read."""

    def __init__(self, where: Path, pool: native.Pool) -> None:
        self.where = where
        self._disk = DiskTier(where, pool)
        self._threads = pool.threads

    def put(self, image: Image, replica: Replica) -> None:
        """Store the image durably; it is there when this returns.

        Another image of that step stays until this one is whole, and then goes.

        Raises:
            StorageError: the disk refuses. Nothing of it is left then, and what was there still is.
        """
        step, folder = replica.step, self._folder(replica.step)
        replaces = (folder / names.REPLICA).exists()
        if replaces:
            self._disk.join(step, folder := new_beside(self.where, step))
        try:
            self._disk.put(image)
            data = envelope.seal(msgspec.json.encode(replica))
            with storage_errors(folder, f"step {step}", len(data)):
                write_whole(folder / names.REPLICA, data)
                if replaces:
                    remove_tree(swap(self.where, step, folder))
                else:
                    fsync_folder(self.where)
        except BaseException:
            self._disk.abandon(step)
            raise
        self._disk.leave(step)

    def replicas(self) -> list[Replica]:
        """What is here, the oldest step first; what was not finished is removed."""
        bring_back_swapped(self.where, lambda folder: self._replica(folder).created)
        for _, folder in staged_folders(self.where):
            remove_tree(folder)
        found: list[Replica] = []
        with contextlib.suppress(FileNotFoundError):
            for folder in sorted(self.where.iterdir()):
                if names.parse_step(folder.name) is None:
                    continue
                try:
                    found.append(self._replica(folder))
                except (FormatError, SnapshotNotFoundError):
                    remove_tree(folder)
        return found

    def open(self, replica: Replica) -> Stored:
        """Layout and record, checked. CorruptError where they are not what was stored."""
        path = self._folder(replica.step) / names.record_file(replica.rank)
        try:
            data = read_file(path)
        except FileNotFoundError:
            raise SnapshotNotFoundError(f"{path} is missing") from None
        record = manifests.decode_record(data, source=str(path))
        if manifests.facts(record, data).record != replica.record:
            raise CorruptError(f"{path} is not the record that was stored")
        return Stored(self._disk.layout(manifests.facts(record, data)), record)

    def get(self, replica: Replica, stored: Stored, address: int, *, chunks: Sequence[int] | None = None) -> None:
        """See `tiers.contract.RunTier.get`."""
        path = self._folder(replica.step) / names.image_file(replica.rank)
        read_image(path, stored.record, address, threads=self._threads, direct=True, chunks=chunks)

    def evict(self, step: int, only: Replica | None = None) -> None:
        """Remove the step's image; that very one, where it is named, and no other that has come in its place."""
        folder = self._folder(step)
        if only is not None:
            try:
                if self._replica(folder) != only:
                    return
            except SnapshotNotFoundError:
                return
            except FormatError:
                pass  # damaged: nobody can use it
        if folder.exists() and discard(folder / names.REPLICA):
            remove_tree(folder)

    def written(self, step: int) -> float:
        """When the step's image was stored, in seconds since 1970."""
        return (self._folder(step) / names.REPLICA).stat().st_mtime

    def _folder(self, step: int) -> Path:
        return self.where / names.step_folder(step)

    def _replica(self, folder: Path) -> Replica:
        path = folder / names.REPLICA
        try:
            data = read_file(path)
        except FileNotFoundError:
            raise SnapshotNotFoundError(f"{path} is missing") from None
        replica, _ = envelope.unseal(data, _REPLICA, source=str(path), limit=_MOST_BYTES)
        staged = names.parse_staging(folder.name)
        if replica.step != (staged[0] if staged else names.parse_step(folder.name)):
            raise FormatError(f"{path} is of step {replica.step}")
        return replica
