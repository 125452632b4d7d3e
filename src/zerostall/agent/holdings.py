"""What this node holds, as the manager hears it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from zerostall.agent.notes import attempt_at, attempt_stored, copy_note, damage_notes
from zerostall.core import steps as names
from zerostall.errors import ZerostallError
from zerostall.telemetry import log
from zerostall.wire import cluster as w
from zerostall.wire.messages import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerostall.agent.berth import Berth
    from zerostall.agent.run import Run
    from zerostall.agent.runs import Runs
    from zerostall.core.manifest import Manifest
    from zerostall.tiers.disk import DiskTier


@dataclass(frozen=True, slots=True)
class Census:
    """One look at the node, taken on the agent's loop.

    `attempts` are those of clean steps in memory, by run, step and when rank 0 saved it: the disk knows no more of a
    step.
    """

    runs: tuple[w.RunNote, ...]
    guests: tuple[w.RunNote, ...]
    attempts: Mapping[tuple[str, int, float], str]
    disks: tuple[tuple[str, DiskTier], ...]
    host_bytes: int
    host_budget: int
    sealed_bytes: int
    stored_bytes: int
    stalls: tuple[int, ...] = ()


def take_census(runs: Runs, guests: tuple[w.RunNote, ...]) -> Census:
    """What the node holds in memory now, its own and its guests. On the loop's thread; reads no file."""
    trained = [run for run in runs if run.berths]
    return Census(
        runs=tuple(_run_note(run) for run in trained),
        guests=guests,
        attempts={
            (run.folder.facts.run, copy.step, copy.created): attempt_at(berth, copy.step)
            for run in trained
            for berth in run.berths.values()
            for copy in berth.clean_copies()
        },
        disks=tuple((run.folder.facts.run, run.folder.disk) for run in trained),
        host_bytes=runs.budget.lent,
        host_budget=runs.budget.limit,
        sealed_bytes=sum(run.tally.sealed_bytes for run in trained),
        stored_bytes=sum(run.tally.stored_bytes for run in trained),
        stalls=tuple(map(sum, zip(*(run.tally.stalls for run in trained), strict=True))),
    )


def _run_note(run: Run) -> w.RunNote:
    return w.RunNote(
        run=run.folder.facts.run,
        where=plain(str(run.where))[-1000:],
        name=run.folder.facts.name,
        world=run.world,
        ranks=tuple(_rank_note(berth) for _, berth in sorted(run.berths.items())),
        writing=run.trickle.writing(),
        error=plain(run.trickle.last_error)[:1000],
    )


def _rank_note(berth: Berth) -> w.RankNote:
    copies = {
        slot.step: copy_note(tier.record_of(slot.step), tier.name, attempt_at(berth, slot.step))
        for tier in reversed(berth.tiers())
        for slot in tier.slots.sealed()
        if not tier.damage(slot.step)
    }
    return w.RankNote(
        rank=berth.rank,
        home=True,
        trains=berth.client is not None,
        copies=tuple(copies[step] for step in sorted(copies)),
        nbytes=berth.current.layout.nbytes if berth.current else 0,
        damaged=tuple(damage_notes(berth)),
    )


@dataclass(frozen=True, slots=True)
class DiskNotes:
    """The committed steps in one run's folder.

    Attributes:
        whole: those of which all images are there.
        parts: of the others, each rank's image that is there, and when rank 0 saved the step.
    """

    whole: tuple[w.CopyNote, ...] = ()
    parts: tuple[tuple[int, float, w.CopyNote], ...] = ()


class DiskCensus:
    """The committed steps in the folders of the node's runs; on a thread of its own, since a disk may hang.

    A manifest is read once for each time it is written.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[int, DiskNotes]] = {}

    def look(self, disks: tuple[tuple[str, DiskTier], ...]) -> Mapping[str, DiskNotes]:
        """The steps of each run. What cannot be read is left out: the manager must not count on it."""
        found: dict[str, DiskNotes] = {}
        seen: dict[tuple[str, int], tuple[int, DiskNotes]] = {}
        for run, disk in disks:
            notes: list[DiskNotes] = []
            try:
                steps = disk.steps()
            except OSError as error:
                log.debug("%s cannot be listed: %s", disk.where, error)
                steps = []
            for step in steps:
                try:
                    written = (disk.where / names.step_folder(step) / names.MANIFEST).stat().st_mtime_ns
                    known = self._known.get((run, step))
                    if known is None or known[0] != written:
                        known = (written, _notes(disk, disk.manifest(step)))
                except (ZerostallError, OSError):
                    continue  # evicted meanwhile, or damaged: no copy
                seen[run, step] = known
                notes.append(known[1])
            whole = tuple(one for note in notes for one in note.whole)
            found[run] = DiskNotes(whole, tuple(part for note in notes for part in note.parts))
        self._known = seen
        return found


def _notes(disk: DiskTier, manifest: Manifest) -> DiskNotes:
    here, attempt = disk.here(manifest.step), attempt_stored(manifest)

    def note(created: float, nbytes: int) -> w.CopyNote:
        return w.CopyNote(step=manifest.step, attempt=attempt, tier="disk", created=created, nbytes=nbytes)

    if here is None:
        return DiskNotes((note(manifest.created, sum(facts.nbytes for facts in manifest.ranks)),))
    records = [disk.open(manifest.step, rank).record for rank in sorted(here)]
    return DiskNotes(parts=tuple((one.rank, manifest.created, note(one.created, one.nbytes)) for one in records))


def joined(census: Census, disks: Mapping[str, DiskNotes]) -> tuple[w.RunNote, ...]:
    """Memory and disk in one."""

    def named(run: str, copy: w.CopyNote, began: float) -> w.CopyNote:
        attempt = census.attempts.get((run, copy.step, began), copy.attempt)
        return msgspec.structs.replace(copy, attempt=attempt)

    own: list[w.RunNote] = []
    for note in census.runs:
        disk = disks.get(note.run, DiskNotes())
        parts: dict[int, list[w.CopyNote]] = {}
        for rank, began, copy in disk.parts:
            parts.setdefault(rank, []).append(named(note.run, copy, began))
        ranks = [msgspec.structs.replace(one, copies=(*one.copies, *parts.pop(one.rank, ()))) for one in note.ranks]
        ranks += [w.RankNote(rank, home=False, trains=False, copies=tuple(parts[rank])) for rank in sorted(parts)]
        whole = tuple(named(note.run, copy, copy.created) for copy in disk.whole)
        own.append(msgspec.structs.replace(note, ranks=tuple(ranks), whole=whole))
    return (*own, *census.guests)
