"""What one step holds, tensor by tensor and value by value, without reading the tensors' bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.core import leaves
from zerostall.core.contents import Content, contents
from zerostall.errors import FormatError, StorageError
from zerostall.flow.catalog import opened_run
from zerostall.flow.present import read_step
from zerostall.tiers.disk import DiskTier

if TYPE_CHECKING:
    import os

    from zerostall.core.leaves import Leaf
    from zerostall.core.manifest import Manifest, Record, RunFacts
    from zerostall.tiers.contract import RunTier


@dataclass(frozen=True, slots=True)
class RankContents:
    """One rank's image of a step: its record, its tensors in natural order, its small values."""

    record: Record
    tensors: tuple[Content, ...]
    values: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class StepContents:
    """A step, whole."""

    manifest: Manifest
    pinned: bool
    ranks: tuple[RankContents, ...]


def inspect(where: str | os.PathLike[str], step: int | None = None) -> StepContents:
    """What a step (None: the newest clean one) holds, by its manifest, records and layouts.

    Raises:
        SnapshotNotFoundError: no such step.
        CorruptError: one of those files is damaged.
    """
    with opened_run(where) as run:
        return read_step(run, step, lambda step: _contents(run, step))


def _contents(run: RunTier, step: int) -> StepContents:
    committed = run.manifest(step)
    ranks = tuple(_rank(run, step, rank) for rank in range(committed.world))
    return StepContents(committed, run.pinned(step), ranks)


def _rank(run: RunTier, step: int, rank: int) -> RankContents:
    stored = run.open(step, rank)
    return RankContents(stored.record, contents(stored.layout), leaves.leaves(stored.record.values))


def run_facts(where: str | os.PathLike[str]) -> RunFacts | None:
    """What run a folder belongs to; None where it does not say, or where what it says is damaged."""
    with opened_run(where) as run:
        try:
            return run.run_facts()
        except (FormatError, StorageError):
            return None


def links(where: str | os.PathLike[str]) -> list[int]:
    """Steps that are left out, for their folders are links."""
    with opened_run(where) as run:
        return run.links() if isinstance(run, DiskTier) else []


def set_aside(where: str | os.PathLike[str]) -> list[int]:
    """Steps that training went back before; they no longer count, and go in time."""
    with opened_run(where) as run:
        return run.rewound()
