"""A step on disk of which this node's folder has some ranks' images and other nodes have the rest, read as one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from zerostall.core import manifest as manifests
from zerostall.errors import FormatError, ManagerError, SnapshotNotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, RankFacts
    from zerostall.tiers.contract import Readable, Stored
    from zerostall.tiers.disk import DiskTier


HEARD_SECONDS = 20.0
"""So long it may take until the manager has heard of all disks, where nodes have only just come up together."""

_AGAIN_SECONDS = 0.25


class Scattered:
    """See `tiers.contract.Readable`; the manifest is this node's, and what comes from elsewhere must be what it says.

    Args:
        here: the ranks whose images are in this node's folder.
        afar: where the others' are.
    """

    name = "disk"

    def __init__(self, disk: DiskTier, here: frozenset[int], afar: Readable, step: int) -> None:
        self._disk = disk
        self._here = here
        self._afar = afar
        self._step = step

    @property
    def where(self) -> Path | str:
        return self._disk.where

    def place_of(self, rank: int) -> Readable:
        """Where that rank's image is read."""
        return self._disk if rank in self._here else self._afar

    def manifest(self, step: int) -> Manifest:
        """Once other nodes were asked anew for what is not here.

        Raises:
            SnapshotNotFoundError: they have another step of that number, or none.
        """
        whole = self._disk.manifest(step)
        others = {facts for facts in whole.ranks if facts.rank not in self._here}
        deadline = time.monotonic() + HEARD_SECONDS
        while True:
            try:
                found = self._afar.manifest(step)
                break
            except (SnapshotNotFoundError, ManagerError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_SECONDS)
        if not others <= set(found.ranks):
            raise SnapshotNotFoundError(f"step {step} on other nodes is another one than in {self.where}")
        return whole

    def open(self, step: int, rank: int) -> Stored:
        stored = self.place_of(rank).open(step, rank)
        facts = manifests.facts(stored.record, manifests.encode_record(stored.record))
        if facts != self._disk.manifest(step).ranks[rank]:
            raise SnapshotNotFoundError(f"step {step} of rank {rank} is another one on its node than in {self.where}")
        return stored

    def get(self, step: int, rank: int, address: int, *, chunks: Sequence[int] | None = None) -> Stored:
        self.open(step, rank)
        return self.place_of(rank).get(step, rank, address, chunks=chunks)

    def layout(self, facts: RankFacts) -> Layout:
        try:
            return self._disk.layout(facts)
        except FormatError:  # each node's folder has its own ranks' layouts
            return self.place_of(facts.rank).open(self._step, facts.rank).layout
