"""The files of a run's steps in a folder: where they lie, and what they say, checked.

Images and records lie beside the manifest, or below `images/` where the folder is the copy of a bucket
(docs/format.md, 7.6); images may also lie on other disks (7.7).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.core import disks
from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.errors import CorruptError, FormatError, SnapshotNotFoundError, VersionError
from zerostall.telemetry import say_once
from zerostall.tiers import kept, readings
from zerostall.tiers.files import read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, RankFacts
    from zerostall.tiers.contract import Stored
    from zerostall.tiers.other_disks import OtherDisks


class StepFiles:
    """Reads; any process and thread may."""

    def __init__(self, where: Path, layout: Callable[[str, Sequence[int]], Layout], others: OtherDisks) -> None:
        self.where = where
        self._layout = layout
        self._others = others
        self._named: tuple[tuple[int, int, int] | None, str | None] = None, None

    def folder(self, step: int) -> Path:
        return self.where / names.step_folder(step)

    def kept(self, step: int) -> Path:
        """Where a bucket has the images of a step."""
        return self.where / kept.folder(step)

    def steps(self) -> list[int]:
        """The committed steps, rising."""
        found = ((names.parse_step(entry.name), Path(entry.path)) for entry in self.entries())
        return sorted(step for step, path in found if step is not None and committed(path))

    def rewound(self) -> list[int]:
        """Steps that were set aside."""
        found = (names.parse_rewound(entry.name) for entry in self.entries())
        return sorted(step for step in found if step is not None)

    def entries(self) -> list[os.DirEntry[str]]:
        """The folders in the run's folder."""
        try:
            with os.scandir(self.where) as entries:
                return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def links(self) -> list[int]:
        """Steps whose folder is a link: they are not looked at, and nobody finds that out by looking."""
        try:
            with os.scandir(self.where) as entries:
                found = [names.parse_step(entry.name) for entry in entries if entry.is_symlink()]
        except FileNotFoundError:
            return []
        return sorted(step for step in found if step is not None)

    def manifest(self, step: int) -> Manifest:
        path = self.folder(step) / names.MANIFEST
        try:
            data = read_file(path)
        except FileNotFoundError:
            raise SnapshotNotFoundError(f"no step {step} in {self.where}") from None
        return readings.manifest_of(step, data, str(path), self.run())

    def stranger(self, folder: Path) -> bool:
        """Is what is in the folder of a step, committed or set aside, another run's? False where nobody can say."""
        path, run = folder / names.MANIFEST, self.run()
        try:
            return run is not None and manifests.decode_manifest(read_file(path), source=str(path)).run != run
        except (FormatError, OSError):
            return False

    def run(self) -> str | None:
        """Which run run.json says this is, read again where it is another file.

        None where it is lost or damaged: whoever takes the folder says so, and asks the steps.
        """
        path = self.where / names.RUN
        try:
            about = path.lstat()
        except OSError:
            return None
        stamp = about.st_ino, about.st_mtime_ns, about.st_size
        known, run = self._named
        if known != stamp:
            try:
                run = manifests.decode_run(read_file(path, manifests.MAX_RUN_FILE), source=str(path)).run
            except (FormatError, OSError):
                run = None
            self._named = stamp, run
        return run

    def open(self, step: int, rank: int) -> Stored:
        """Layout and record of one rank's image, checked against the manifest."""
        return self.open_of(self.manifest(step), rank)

    def open_of(self, manifest: Manifest, rank: int) -> Stored:
        """As `open`, of a step whose manifest was read."""
        step = manifest.step
        facts = readings.facts_of(manifest, rank, self.where)
        path = self.folder(step) / names.record_file(rank)
        for place in (path, self.kept(step) / names.kept_record(rank, facts.record)):
            try:
                data = read_file(place)
            except FileNotFoundError:
                continue
            return readings.stored_of(manifest, data, str(place), self._layout)
        here = self.here(step)
        if here is not None and rank not in here:
            raise SnapshotNotFoundError(f"step {step} of rank {rank} is on another node's disk, not in {self.where}")
        raise CorruptError(f"{path} is missing")

    def here(self, step: int) -> frozenset[int] | None:
        """The ranks whose images are in this folder and not in another node's; None where all ranks' are."""
        path = self.folder(step) / names.RANKS
        try:
            return frozenset(disks.decode_ranks_here(read_file(path), source=str(path)).ranks)
        except FileNotFoundError:
            return None
        except VersionError:
            raise
        except FormatError as damage:
            # What is here tells as well; an image that is lost counts as another node's then, and is looked for there.
            say_once(f"ranks:{path}", "%s; the records beside it say whose images are here", damage.args[0])
            ranks = (names.parse_record(entry.name) for entry in path.parent.iterdir())
            return frozenset(rank for rank in ranks if rank is not None)

    def image(self, step: int, rank: int) -> Path:
        """The file of a rank's image of a committed step, which need not be there."""
        beside = self.folder(step) / names.image_file(rank)
        if os.path.lexists(beside):
            return beside
        facts = self.manifest(step).ranks[rank]
        elsewhere = self.kept(step) / names.kept_image(rank, facts.record)
        return elsewhere if os.path.lexists(elsewhere) else self._others.image(step, facts) or beside

    def missing(self, manifest: Manifest, draft: Path | None = None, here: Collection[int] | None = None) -> str:
        """In words, which image or record is not there in full; empty where all are.

        Args:
            draft: where it is written.
            here: look for the images of these ranks only.
        """
        afar = self.here(manifest.step) if draft is None else None
        if afar is not None and (others := [rank.rank for rank in manifest.ranks if rank.rank not in afar]):
            return f"images of {len(others)} ranks, rank {others[0]} the first, are on other nodes' disks"
        for rank in manifest.ranks if here is None else [manifest.ranks[rank] for rank in sorted(here)]:
            if problem := self._lacks(draft or self.folder(manifest.step), manifest.step, rank):
                return problem
        return ""

    def _lacks(self, folder: Path, step: int, rank: RankFacts) -> str:
        path, record = folder / names.image_file(rank.rank), folder / names.record_file(rank.rank)
        if not os.path.lexists(path) and os.path.lexists(self.kept(step)):
            path = self.kept(step) / names.kept_image(rank.rank, rank.record)
            record = path.with_name(names.kept_record(rank.rank, rank.record))
        if not os.path.lexists(path):
            path = self._others.image(step, rank) or path
        try:
            size = path.lstat().st_size
            record.lstat()
        except OSError as error:
            places = self._others.places()
            return f"{error.filename or path}: {error.strerror}" + (f" (nor is it on {places})" if places else "")
        return "" if size == rank.nbytes else f"{path} has {size} bytes, the manifest says {rank.nbytes}"

    def spoken_of(self, step: int) -> set[str] | None:
        """Names of the images that steps of that number, committed or set aside, have elsewhere than beside themselves.

        None where one is damaged: nobody knows what it has.
        """
        found: set[str] = set()
        for folder in (self.folder(step), self.where / names.rewound_folder(step)):
            path = folder / names.MANIFEST
            try:
                found |= kept.objects_of(manifests.decode_manifest(read_file(path), source=str(path)))
            except FileNotFoundError:
                continue
            except (FormatError, OSError):
                return None
        return found

    def needs_kept(self, step: int) -> bool:
        """Whether a step of that number, committed or set aside, has its images below `images/`."""
        folders = (self.folder(step), self.where / names.rewound_folder(step))
        return any(committed(folder) and not any(folder.glob("rank-*.safetensors")) for folder in folders)


def committed(folder: Path) -> bool:
    """Is a manifest there? One that cannot be looked at counts: it is for its reader to say what is wrong with it."""
    try:
        if folder.is_symlink():
            return False
        (folder / names.MANIFEST).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
