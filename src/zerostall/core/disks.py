"""Several disks for one run: which image goes to which, and the two small files that tell of it.

Images are dealt whole, so that each stays a file that anybody's tools can open.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import soundness
from zerostall.core.envelope import FIRST, seal, unseal
from zerostall.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_FILE = 1 << 20
MAX_RANKS_FILE = 1 << 24
MAX_DISKS = 1024

AGAIN_SECONDS = 60.0
"""A disk that failed is left out for that long, and then tried again."""


class Room(msgspec.Struct, frozen=True):
    """What a disk has for a step: bytes that are free, or in words why nothing goes there."""

    free: int
    problem: str = ""


class Deal(msgspec.Struct, frozen=True):
    """Which disk each image goes to, and which disks got less than their share, and why.

    Attributes:
        disks: the number of a disk for each image.
        left_out: disks with the reason, in words.
    """

    disks: tuple[int, ...]
    left_out: tuple[tuple[int, str], ...] = ()


def deal(sizes: Sequence[int], rooms: Sequence[Room]) -> Deal:
    """Deal the images of a step over disks: the largest first, each to the disk that has got least so far.

    Where all have room, none gets more than its even share and one image. The same images go to the same disks in
    every step, as long as the same disks have room. What fits nowhere goes to disk 0, the run's own, which says what
    it lacks.
    """
    got = [0] * len(rooms)
    chosen = [0] * len(sizes)
    left_out = {number: room.problem for number, room in enumerate(rooms) if room.problem}
    for image in sorted(range(len(sizes)), key=lambda image: (-sizes[image], image)):
        nbytes = sizes[image]
        fitting = []
        for number, room in enumerate(rooms):
            if room.problem:
                continue
            if got[number] + nbytes <= room.free:
                fitting.append(number)
            else:
                left_out.setdefault(number, f"{room.free} bytes free, {got[number] + nbytes} needed")
        disk = min(fitting, key=lambda number: (got[number], number), default=0)
        chosen[image] = disk
        got[disk] += nbytes
    return Deal(tuple(chosen), tuple(sorted(left_out.items())))


# -------------------------------------------------------------------------------------------------------- files


class RunDisks(msgspec.Struct, frozen=True, kw_only=True):
    """`disks.json` in a run's folder: where else its images may lie.

    Attributes:
        folders: absolute paths.
    """

    version: int = FIRST
    run: str
    folders: tuple[str, ...]


class DiskOf(msgspec.Struct, frozen=True, kw_only=True):
    """`disk.json` in such a folder: whose images it holds."""

    version: int = FIRST
    run: str


class RanksHere(msgspec.Struct, frozen=True, kw_only=True):
    """`ranks.json` in a step's folder: the ranks whose images are in it; those of all others are on other nodes."""

    version: int = FIRST
    run: str
    step: int
    ranks: tuple[int, ...]


_RANKS_HERE = msgspec.json.Decoder(RanksHere)
_RUN_DISKS = msgspec.json.Decoder(RunDisks)
_DISK_OF = msgspec.json.Decoder(DiskOf)


def encode(facts: RunDisks | DiskOf | RanksHere) -> bytes:
    """Return the file. ValueError for one that no reader would take."""
    if problem := _problem(facts):
        raise ValueError(problem)
    return seal(msgspec.json.encode(facts))


def decode_run_disks(data: bytes, *, source: str) -> RunDisks:
    """Read `disks.json`. `source` and errors as in `manifest.decode_record`."""
    facts, _ = unseal(data, _RUN_DISKS, source=source, limit=MAX_FILE)
    _refuse(source, _problem(facts))
    return facts


def decode_disk_of(data: bytes, *, source: str) -> DiskOf:
    """Read `disk.json`. `source` and errors as in `manifest.decode_record`."""
    facts, _ = unseal(data, _DISK_OF, source=source, limit=MAX_FILE)
    _refuse(source, _problem(facts))
    return facts


def decode_ranks_here(data: bytes, *, source: str) -> RanksHere:
    """Read `ranks.json`. `source` and errors as in `manifest.decode_record`."""
    facts, _ = unseal(data, _RANKS_HERE, source=source, limit=MAX_RANKS_FILE)
    _refuse(source, _problem(facts))
    return facts


def _problem(facts: RunDisks | DiskOf | RanksHere) -> str:
    if problem := soundness.run_id_problem(facts.run):
        return problem
    if isinstance(facts, DiskOf):
        return ""
    if isinstance(facts, RanksHere):
        rising = all(one < other for one, other in itertools.pairwise((-1, *facts.ranks)))
        return "" if rising and facts.step >= 0 else "its ranks or its step are no rising numbers"
    if len(facts.folders) > MAX_DISKS:
        return f"{len(facts.folders)} folders, more than {MAX_DISKS}"
    for folder in facts.folders:
        if (
            not folder.startswith("/")
            or "\0" in folder
            or any(part in ("", ".", "..") for part in folder[1:].split("/"))
        ):
            return f"{folder!r} is no absolute path"
    return "" if len(set(facts.folders)) == len(facts.folders) else "a folder is named twice"


def _refuse(source: str, problem: str) -> None:
    if problem:
        raise FormatError(f"{source}: {problem}")
