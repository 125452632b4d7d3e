"""Steps in a run's folder that were put and are not committed: another node may know that they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.errors import FormatError
from zerostall.tiers.files import read_file
from zerostall.tiers.step_files import committed

if TYPE_CHECKING:
    from zerostall.core.manifest import Manifest


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
