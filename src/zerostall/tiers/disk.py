"""The disk tier: a folder of steps, each committed by its manifest.

Order of writing (docs/format.md): image, fsync · record, fsync · the step's folder, fsync · manifest under another
name, fsync, rename, fsync of the folder · fsync of the folder above. Order of deleting: the manifest first. So a kill
at any point leaves a step whole or not there at all.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import disks
from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.candidates import Past
from zerostall.errors import FormatError, SnapshotNotFoundError, StepExistsError
from zerostall.telemetry import log
from zerostall.tiers.draft_folders import DraftFolders, new_beside
from zerostall.tiers.drafts import unsettled
from zerostall.tiers.files import (
    discard,
    fsync_folder,
    make_folder,
    read_file,
    require_room,
    storage_errors,
    write_by,
    write_file,
    write_whole,
)
from zerostall.tiers.holding import run_of
from zerostall.tiers.image_bytes import FileBytes
from zerostall.tiers.image_reads import read_image
from zerostall.tiers.image_writes import AT_ONCE, write_image
from zerostall.tiers.layout_files import LayoutFiles
from zerostall.tiers.leftovers import Leftovers, bring_back_swapped, remove_partials
from zerostall.tiers.modes import OWN, Modes
from zerostall.tiers.other_disks import OtherDisks
from zerostall.tiers.retention_facts import RetentionFacts
from zerostall.tiers.step_files import StepFiles, committed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from zerostall import native
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, RankFacts, Record, RunFacts
    from zerostall.core.retention import StepFacts
    from zerostall.tiers.contract import Image, Pace, Stored


class DiskTier:
    """Images in the folder `where`; see `contract.Tier`.

    One process writes (the agent that holds the folder's lock, see `flow.folder_lock`); any number may read. Not
    thread-safe for writing.

    Attributes:
        modes: of what is made.
        layouts: the run's layouts on disk.
    """

    name = "disk"

    def __init__(self, where: Path, pool: native.Pool, *, direct: bool = True) -> None:
        self.where = where
        self._pool = pool
        self._direct = direct
        self.modes = OWN
        self.layouts = LayoutFiles(where)
        self.others = OtherDisks(where, direct=direct)
        self._files = StepFiles(where, self.layouts.get, self.others)
        self._left = Leftovers()
        self._drafts = DraftFolders(self._files, self._left)
        self._facts = RetentionFacts(self._files)

    def use(self, modes: Modes) -> None:
        """From now on, what is made gets these modes."""
        self.modes = self.layouts.modes = self.others.modes = modes

    # -------------------------------------------------------------------------------------------------- verbs

    def put(self, image: Image, pace: Pace = AT_ONCE) -> None:
        def write(fd: int) -> Record:
            write_image(fd, image, self._pool, self.where, direct=self._direct, pace=pace)
            return image.record

        record = image.record
        if self.others.put(image, pace):
            self._begin(record.step, image.layout)
            self.put_record(record)
        else:
            self.put_by(record.step, record.rank, image.layout, write)

    def put_by(self, step: int, rank: int, layout: Layout, write: Callable[[int], Record]) -> Record:
        """As `put`, of an image that `write` puts into the open file by itself; it returns the image's record."""
        folder = self._begin(step, layout)
        image, beside = folder / names.image_file(rank), folder / names.record_file(rank)
        with storage_errors(image, f"step {step}", layout.nbytes):
            require_room(self.where, layout.nbytes)
            record = write_by(image, write, self.modes)
        with storage_errors(beside, f"step {step}", layout.nbytes):
            write_file(beside, manifests.encode_record(record), self.modes)
        with storage_errors(folder, f"step {step}", layout.nbytes):
            fsync_folder(folder)
        return record

    def commit(
        self, manifest: Manifest, *, replace: bool = False, pin: bool = False, here: Collection[int] | None = None
    ) -> None:
        """See `contract.Tier`; `pin` marks the step so that retention never evicts it.

        `here`: only these ranks' images are in this folder, the others in folders of other nodes.
        A step that a try before this one committed, and could not say so, may be replaced.
        """
        final = self._folder(manifest.step)
        folder = self._drafts.folder(manifest.step)
        if not folder.is_dir():
            raise FormatError(f"step {manifest.step} has no images to commit in {self.where}")
        if folder != final and not replace and self.created(manifest.step) != manifest.created:
            raise StepExistsError(
                f"step {manifest.step} is committed in {self.where} already", hint="save with if_exists='replace'"
            )
        data = manifests.encode_manifest(manifest)
        with storage_errors(folder, f"step {manifest.step}", len(data)):
            if pin:
                write_file(folder / names.PINNED, b"", self.modes)
            if here is not None:
                ranks = disks.RanksHere(run=manifest.run, step=manifest.step, ranks=tuple(sorted(here)))
                write_file(folder / names.RANKS, disks.encode(ranks), self.modes)
            write_whole(folder / names.MANIFEST, data, self.modes)
            if folder != final:
                self._drafts.take_place(manifest.step)
                self._remove_kept(manifest.step)
            fsync_folder(self.where)
        self._drafts.leave(manifest.step)

    def abandon(self, step: int) -> None:
        """Undo what was `put` of a step and not committed: a full disk gets its room back. Never raises."""
        self._drafts.abandon(step)
        self._sweep(step)

    def steps(self) -> list[int]:
        return self._files.steps()

    def links(self) -> list[int]:
        """Steps that are left out, for their folders are links."""
        return self._files.links()

    def manifest(self, step: int) -> Manifest:
        return self._files.manifest(step)

    def open(self, step: int, rank: int) -> Stored:
        return self._files.open(step, rank)

    def get(self, step: int, rank: int, address: int, *, chunks: Sequence[int] | None = None) -> Stored:
        stored = self.open(step, rank)
        path = self._files.image(step, rank)
        threads = self._pool.threads
        read_image(path, stored.record, address, threads=threads, direct=self._direct, chunks=chunks)
        return stored

    def evict(self, step: int) -> None:
        """A failure is logged, never raised: what is left over is invisible and goes with the next start."""
        folder = self._folder(step)
        self._facts.forget(step)
        if discard(folder / names.MANIFEST):
            self._left.remove(folder)
            self._remove_kept(step)

    # -------------------------------------------------------------------------------------- beyond the contract

    def open_of(self, manifest: Manifest, rank: int) -> Stored:
        """As `open`, of a committed step whose manifest was read."""
        return self._files.open_of(manifest, rank)

    def lanes(self, images: Sequence[Image]) -> list[list[Image]]:
        """The images of a step by the disk that each goes to: those of one are `put` in order, others meanwhile."""
        for step in {image.record.step for image in images}:
            self.draft(step, sum(image.record.nbytes for image in images if image.record.step == step))
        return self.others.deal(images)

    def draft(self, step: int, needed: int = 0) -> Path:
        """The folder in which images of a step are put until it is committed, for several processes to write to it.

        Raises:
            StorageError: it cannot be made; where there is no room it says how many bytes are `needed`.
        """
        folder = self._drafts.begin(step)
        with storage_errors(folder, f"step {step}", needed):
            make_folder(folder, self.modes)
        return folder

    def join(self, step: int, folder: Path) -> None:
        """Put images of a step into the folder that another process's `draft` gave."""
        self._drafts.join(step, folder)

    def leave(self, step: int) -> None:
        """What was put there is the other process's to commit."""
        self._drafts.leave(step)

    def missing_draft(self, manifest: Manifest, here: Collection[int] | None = None) -> str:
        """As `missing`, of a step that is not committed yet; `here`: of these ranks' images alone."""
        return self._files.missing(manifest, self._drafts.begin(manifest.step), here)

    def here(self, step: int) -> frozenset[int] | None:
        """The ranks whose images are in this folder and not in another node's; None where all ranks' are."""
        return self._files.here(step)

    def put_record(self, record: Record) -> None:
        """Write a record once more, of an image that was put and is not committed yet."""
        folder = self._drafts.begin(record.step)
        with storage_errors(folder, f"step {record.step}", 0):
            write_file(folder / names.record_file(record.rank), manifests.encode_record(record), self.modes)
            fsync_folder(folder)

    def image_path(self, step: int, rank: int) -> Path:
        """The file of a committed step's image, which need not be there."""
        return self._files.image(step, rank)

    def bytes_of(self, step: int, rank: int, stored: Stored) -> FileBytes:
        return FileBytes(self._files.image(step, rank), stored.record.nbytes)

    def missing(self, manifest: Manifest) -> str:
        return self._files.missing(manifest)

    def run_facts(self) -> RunFacts | None:
        path = self.where / names.RUN
        try:
            return manifests.decode_run(read_file(path, manifests.MAX_RUN_FILE), source=str(path))
        except FileNotFoundError:
            return None

    def found_run(self, facts: RunFacts) -> RunFacts:
        there = self.run_facts()
        if there is not None:
            return there
        if (told := run_of(self.where)) is not None:
            facts = msgspec.structs.replace(facts, run=told.facts.run)  # run.json was lost
        data = manifests.encode_run(facts)
        with storage_errors(self.where / names.RUN, "the run's name", len(data)):
            write_whole(self.where / names.RUN, data, self.modes)
        return facts

    def layout(self, facts: RankFacts) -> Layout:
        return self.layouts.get(facts.layout, facts.begins)

    def pin(self, step: int, pinned: bool = True) -> None:
        """Mark a committed step so that retention never evicts it (or no longer)."""
        marker = self._folder(step) / names.PINNED
        if pinned:
            if step not in self.steps():
                raise SnapshotNotFoundError(f"no step {step} in {self.where}")
            if not marker.exists():
                self._mark(marker)
            return
        marker.unlink(missing_ok=True)
        fsync_folder(marker.parent)

    def _mark(self, marker: Path) -> None:
        try:
            write_file(marker, b"", self.modes)
            fsync_folder(marker.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                marker.unlink()
            raise

    def pinned(self, step: int, *, rewound: bool = False) -> bool:
        folder = self.where / names.rewound_folder(step) if rewound else self._folder(step)
        return (folder / names.PINNED).exists()

    def facts(self, steps: Iterable[int]) -> dict[int, StepFacts]:
        return self._facts.of(steps)

    def strangers(self, steps: Iterable[int], *, rewound: bool = False) -> set[int]:
        if rewound:
            return {step for step in steps if self._files.stranger(self.where / names.rewound_folder(step))}
        return self._facts.strangers(steps)

    def created(self, step: int, rank: int | None = None) -> float:
        """When the committed step (or one rank's image of it) was saved; 0.0 if it cannot say.

        Tells it from others of its number.
        """
        try:
            return self.manifest(step).created if rank is None else self.open(step, rank).record.created
        except (FormatError, SnapshotNotFoundError, OSError):
            return 0.0

    def set_aside(self, past: Iterable[Past]) -> list[int]:
        """Rename these very steps so that they count no longer: the run has left the past they belong to."""
        known = set(past)
        if not known:
            return []
        numbers = {one.step for one in known}
        aside = [step for step in self.steps() if step in numbers and Past(step, self.created(step)) in known]
        for step in aside:
            target = self.where / names.rewound_folder(step)
            if self._files.stranger(target):
                log.warning("%s: step %d of another run, set aside before, gives its place up", self.where, step)
            if (target.is_symlink() or discard(target / names.MANIFEST)) and not self._left.remove(target):
                out_of_the_way = new_beside(self.where, step)
                target.rename(out_of_the_way)
                self._left.leave(out_of_the_way)
            self._left.spare(target)
            self._folder(step).rename(target)
        if aside:
            fsync_folder(self.where)
            for step in aside:
                self._sweep(step)
        return aside

    def rewound(self) -> list[int]:
        """Steps that were set aside."""
        return self._files.rewound()

    def forget_rewound(self, step: int) -> None:
        self._left.remove(self.where / names.rewound_folder(step))
        self._remove_kept(step)

    def clear_leftovers(self, *, drafts: bool = True, several: bool = False) -> list[str]:
        """Remove what dead writers left: staging folders and steps without a manifest. Only for the lock's holder.

        `drafts`: False leaves steps that were put, for another node may say that they are committed; `several`: rank
        0's node of several leaves those of which one may.
        """
        bring_back_swapped(self.where, _created)
        spared = {folder for _, folder in unsettled(self, several=several)} if drafts else set[Path]()
        cleared = []
        for entry in self._files.entries() if drafts else ():
            folder = Path(entry.path)
            unfinished = names.parse_step(entry.name) is not None and not committed(folder)
            if folder not in spared and (unfinished or names.parse_staging(entry.name) is not None):
                self._left.remove(folder)
                cleared.append(entry.name)
        for folder in (self.where, self.where / names.LAYOUTS):
            cleared += remove_partials(folder)
        for step in self.others.steps():
            self._sweep(step)
        if cleared:
            log.info("%s: removed what unfinished saves had left: %s", self.where, ", ".join(sorted(cleared)))
        return cleared

    def remove_again(self) -> None:
        """Try once more to remove what could not be removed before."""
        self._left.remove_again()

    # ------------------------------------------------------------------------------------------------ internals

    def _folder(self, step: int) -> Path:
        return self._files.folder(step)

    def _begin(self, step: int, layout: Layout) -> Path:
        """The folder in which an image's record, and its image if that goes nowhere else, are put."""
        folder = self.draft(step, layout.nbytes)
        with storage_errors(folder, f"step {step}", layout.nbytes):
            self.layouts.write(layout)
        return folder

    def _sweep(self, step: int) -> None:
        """Images on other disks that no step of that number speaks of; never raises."""
        if self.others.places() and (wanted := self._files.spoken_of(step)) is not None:
            self.others.sweep(step, wanted)

    def _remove_kept(self, step: int) -> None:
        """The images of a step that are elsewhere, once no step of that number has them."""
        self._sweep(step)
        folder = self._files.kept(step)
        if folder.exists() and not self._files.needs_kept(step):
            self._left.remove(folder)


def _created(folder: Path) -> float:
    path = folder / names.MANIFEST
    return manifests.decode_manifest(read_file(path), source=str(path)).created
