"""Steps in a run's folder that were put and are not committed: another node may know that they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.drafts import may_be_committed
from zerostall.errors import FormatError, SnapshotNotFoundError, ZerostallError
from zerostall.telemetry import log
from zerostall.tiers.files import read_file
from zerostall.tiers.step_files import committed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerostall.core.manifest import Manifest
    from zerostall.tiers.disk import DiskTier


def drafts(where: Path) -> list[tuple[int, Path]]:
    """Each with the folder in which it was put, be that its own or one beside a committed step of its number."""
    found: list[tuple[int, Path]] = []
    with os.scandir(where) as entries:
        for entry in entries:
            staged = names.parse_staging(entry.name)
            step = staged[0] if staged is not None else names.parse_step(entry.name)
            if step is not None and entry.is_dir(follow_symlinks=False) and not committed(Path(entry.path)):
                found.append((step, Path(entry.path)))
    return found


def unsettled(disk: DiskTier, *, several: bool) -> list[tuple[int, Path]]:
    """Those that the node which had rank 0 before may have committed; see `core.drafts`.

    Args:
        several: the run's ranks are on several nodes now.
    """
    found = drafts(disk.where) if disk.where.exists() else []
    if not found:
        return []
    committed = disk.steps()
    own = any(disk.here(step) is not None for step in committed) if committed else several
    oldest = min(committed, default=None)
    return [(step, folder) for step, folder in found if may_be_committed(step, _recorded(folder), oldest, own=own)[0]]


def _recorded(folder: Path) -> frozenset[int]:
    """The ranks whose records are in the folder."""
    ranks = (names.parse_record(path.name) for path in folder.iterdir())
    return frozenset(rank for rank in ranks if rank is not None)


def ranks_in(folder: Path, manifest: Manifest) -> frozenset[int]:
    """The ranks whose images that the manifest speaks of were put in the folder; each has its record behind it."""
    found: set[int] = set()
    for path in folder.iterdir():
        rank = names.parse_record(path.name)
        if rank is None or rank >= manifest.world:
            continue
        try:
            data = read_file(path)
            record = manifests.decode_record(data, source=str(path))
        except (FormatError, OSError):
            continue
        if manifests.facts(record, data) == manifest.ranks[rank]:
            found.add(rank)
    return frozenset(found)


def committed_of(disk: DiskTier, steps: Iterable[int]) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """The manifests of those of these steps that are committed; and those of which nobody can say just now."""
    found: list[bytes] = []
    unsure: list[int] = []
    for step in steps:
        try:
            found.append(manifests.encode_manifest(disk.manifest(step)))
        except SnapshotNotFoundError:
            continue
        except (ZerostallError, OSError) as error:
            log.error("%s: step %d on other nodes stays as it is: %s", disk.where, step, error)
            unsure.append(step)
    return tuple(found), tuple(unsure)
