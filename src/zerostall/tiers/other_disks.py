"""Folders on other disks that hold images of a run (docs/format.md, 7.7): found by readers, dealt over by the writer.

In `images/step-…` below each, images have the names that they have in object stores: by what is in them. No such folder
says which step is committed, so one that is lost, full or another's costs no more than the images that it held.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core import disks
from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.disks import DiskOf, Room, RunDisks
from zerostall.errors import FormatError, RunMismatchError, StorageError
from zerostall.telemetry import log, say_once
from zerostall.tiers import kept
from zerostall.tiers.files import (
    free_bytes,
    fsync_folder,
    make_folder,
    read_file,
    storage_errors,
    write_by,
    write_whole,
)
from zerostall.tiers.image_writes import AT_ONCE, write_image
from zerostall.tiers.modes import OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from zerostall.core.manifest import RankFacts
    from zerostall.tiers.contract import Image, Pace


@dataclass(slots=True)
class _Disk:
    """A folder that images are dealt to.

    Attributes:
        problem: in words why nothing goes there, since `since`; empty where it may.
    """

    folder: Path
    problem: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class _Known:
    """What `disks.json` said when it was that file."""

    stamp: tuple[int, int, int] | None = None
    folders: tuple[Path, ...] = ()
    run: str = ""


_NOTHING = _Known()


class OtherDisks:
    """Those of one run's folder. Any process may read; the one that holds the folder's lock deals, writes and sweeps.

    Attributes:
        modes: of what is made.
        clock: seconds, never set back.
    """

    def __init__(self, where: Path, *, direct: bool = True) -> None:
        self.modes = OWN
        self.clock: Callable[[], float] = time.monotonic
        self._where = where
        self._direct = direct
        self._known = _NOTHING
        self._ours: set[tuple[Path, str]] = set()
        self._run = ""
        self._used: list[_Disk] = []
        self._dealt: dict[tuple[int, int], _Disk] = {}
        self._told: dict[Path, str] = {}

    # ------------------------------------------------------------------------------------------------- reading

    def folders(self) -> list[Path]:
        """Those that are there now and say that they are this run's."""
        known = self._look()
        return [folder for folder in known.folders if self._is_ours(folder, known.run)]

    def image(self, step: int, rank: RankFacts) -> Path | None:
        """The file of an image that a manifest speaks of, if one of them has it."""
        return next((path for path in self._paths(step, rank) if os.path.lexists(path)), None)

    def places(self) -> str:
        """What messages call them; empty where there are none."""
        return ", ".join(map(str, self._look().folders))

    def steps(self) -> set[int]:
        """Those of which there is something."""
        found = set[int]()
        for folder in self.folders():
            with contextlib.suppress(OSError), os.scandir(folder / names.IMAGES) as entries:
                found.update(step for entry in entries if (step := names.parse_step(entry.name)) is not None)
        return found

    def _paths(self, step: int, rank: RankFacts) -> Iterator[Path]:
        for folder in self.folders():
            of_step = folder / kept.folder(step)
            if not (of_step.is_symlink() or of_step.parent.is_symlink()):
                yield of_step / names.kept_image(rank.rank, rank.record)

    def _look(self) -> _Known:
        """What the run's folder says; read again where it is another file. Any thread."""
        path = self._where / names.DISKS
        try:
            facts = path.lstat()
        except OSError:
            self._known = _NOTHING
            return _NOTHING
        known, stamp = self._known, (facts.st_ino, facts.st_mtime_ns, facts.st_size)
        if known.stamp != stamp:
            try:
                told = disks.decode_run_disks(read_file(path, disks.MAX_FILE), source=str(path))
            except (FormatError, OSError) as error:
                say_once(f"disks:{path}", "%s: images on other disks are not found: %s", self._where, error)
                known = _Known(stamp)
            else:
                known = _Known(stamp, tuple(self._where / folder for folder in told.folders), told.run)
            self._known = known
        return known

    def _is_ours(self, folder: Path, run: str) -> bool:
        if (folder, run) not in self._ours:
            try:
                if _run_of(folder) == run:
                    self._ours.add((folder, run))
            except (FormatError, OSError) as error:
                say_once(f"disk:{folder}", "%s: what %s has is left out: %s", self._where, folder, _words(error))
        return (folder, run) in self._ours

    # ------------------------------------------------------------------------------------------------- writing

    def use(self, folders: Sequence[Path], run: str) -> None:
        """From now on, deal images over these, too. One that is not there is left out, with a line in the log.

        Raises:
            RunMismatchError: one is another run's.
            StorageError: the run's own folder cannot note them.
        """
        if [disk.folder for disk in self._used] == list(folders) and self._run == run:
            return
        self._run, self._used, self._dealt = run, [_Disk(folder) for folder in folders], {}
        for disk in self._used:
            self._open(disk)

    def deal(self, images: Sequence[Image]) -> list[list[Image]]:
        """Decide which disk each image of a step goes to; those of one disk together, in the order to write them in."""
        if not self._used:
            return [list(images)]
        everywhere = [None, *self._used]
        rooms = [Room(free_bytes(self._where)), *map(self._room, self._used)]
        decision = disks.deal([image.record.nbytes for image in images], rooms)
        lanes: dict[int, list[Image]] = {}
        self._dealt.clear()
        for image, number in zip(images, decision.disks, strict=True):
            lanes.setdefault(number, []).append(image)
            if (disk := everywhere[number]) is not None:
                self._dealt[image.record.step, image.record.rank] = disk
        self._tell(
            {
                self._where if (one := everywhere[number]) is None else one.folder: why
                for number, why in decision.left_out
            }
        )
        return [lanes[number] for number in sorted(lanes)]

    def put(self, image: Image, pace: Pace = AT_ONCE) -> bool:
        """Write an image to the disk that it was dealt to.

        False where that is the run's own, or has just failed: then it is left out for a while.
        """
        record = image.record
        disk = self._dealt.pop((record.step, record.rank), None)
        if disk is None:
            return False
        name = names.kept_image(record.rank, manifests.facts(record, manifests.encode_record(record)).record)
        path = disk.folder / kept.folder(record.step) / name
        try:
            with storage_errors(path, f"step {record.step}", record.nbytes):
                self._write(path, image, pace)
        except StorageError as error:
            self._fail(disk, str(error.args[0]))
            return False
        return True

    def sweep(self, step: int, wanted: set[str]) -> None:
        """Remove what there is of a step but the images of these names. Never raises."""
        for folder in self.folders():
            of_step = folder / kept.folder(step)
            try:
                if of_step.is_symlink() or of_step.parent.is_symlink():
                    continue
                with os.scandir(of_step) as entries:
                    found = [entry.name for entry in entries]
                for name in found:
                    ours = names.parse_kept(name) is not None or names.parse_partial(name) is not None
                    if ours and name not in wanted:
                        (of_step / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    of_step.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("%s: could not be swept and is left: %s", of_step, error.strerror)

    def _write(self, path: Path, image: Image, pace: Pace) -> None:
        make_folder(path.parent, self.modes)
        partial = path.with_name(names.partial_file(path.name, secrets.token_hex(4)))
        with contextlib.closing(native.Pool("disk-write", 8)) as pool:  # one disk that is slow holds up no other
            write_by(partial, lambda fd: write_image(fd, image, pool, path, direct=self._direct, pace=pace), self.modes)
        partial.replace(path)
        fsync_folder(path.parent)

    def _room(self, disk: _Disk) -> Room:
        again = disk.problem and self.clock() - disk.since >= disks.AGAIN_SECONDS
        if again or (not disk.problem and disk.folder not in self._look().folders):  # the run's folder was made anew
            with contextlib.suppress(RunMismatchError):
                self._open(disk)
        if disk.problem:
            return Room(0, disk.problem)
        try:
            return Room(free_bytes(disk.folder))
        except OSError as error:
            self._fail(disk, _words(error))
            return Room(0, disk.problem)

    def _open(self, disk: _Disk) -> None:
        """Have the folder there, as this run's, and have the run's own folder know it."""
        listed = self._look()
        try:
            if (disk.folder / names.RUN).exists():
                raise RunMismatchError(f"{disk.folder} is a run's own folder", hint="give its images another one there")
            try:
                run = _run_of(disk.folder)
            except FileNotFoundError:
                if disk.folder in listed.folders:
                    raise StorageError(f"its {names.DISK} is not there: is its disk mounted?") from None
                make_folder(disk.folder, self.modes)
                write_whole(disk.folder / names.DISK, disks.encode(DiskOf(run=self._run)), self.modes)
                run = self._run
        except RunMismatchError as error:
            disk.problem, disk.since = str(error.args[0]), self.clock()
            raise
        except (FormatError, OSError) as error:
            self._fail(disk, _words(error))
            return
        if run != self._run:
            disk.problem, disk.since = f"it is the run {run}'s", self.clock()
            raise RunMismatchError(
                f"{disk.folder} has images of the run {run}", hint="give every run a folder of its own on each disk"
            )
        if disk.problem:
            log.info("%s: %s takes images again", self._where, disk.folder)
        disk.problem = ""
        before = listed.folders if listed.run == self._run else ()
        if disk.folder not in before:
            self._note([*before, disk.folder])

    def _note(self, folders: Sequence[Path]) -> None:
        data = disks.encode(RunDisks(run=self._run, folders=tuple(dict.fromkeys(map(str, folders)))))
        path = self._where / names.DISKS
        with storage_errors(path, "the run's disks", len(data)):
            write_whole(path, data, self.modes)

    def _fail(self, disk: _Disk, problem: str) -> None:
        disk.problem, disk.since = problem, self.clock()
        self._tell({disk.folder: problem} | {one: why for one, why in self._told.items() if one != disk.folder})

    def _tell(self, left_out: dict[Path, str]) -> None:
        """A line for each disk that is left out, once for each reason of a kind."""
        for folder, problem in left_out.items():
            said = "%s: %s is left out, images go to other disks: %s", self._where, folder, problem
            if not say_once(f"left out:{folder}", *said) and folder not in self._told:
                log.warning(*said)
        self._told = left_out


def _run_of(folder: Path) -> str:
    """Whose images a folder holds. FileNotFoundError where nothing says so."""
    path = folder / names.DISK
    return disks.decode_disk_of(read_file(path, disks.MAX_FILE), source=str(path)).run


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or (error.args[0] if error.args else error))
