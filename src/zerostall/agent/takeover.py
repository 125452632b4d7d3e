"""Taking a run's folder, and making memory agree with what others did to it while nobody held it here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.core import manifest as manifests
from zerostall.errors import FormatError, RunMismatchError, SnapshotNotFoundError, StorageError
from zerostall.telemetry import log
from zerostall.tiers.files import storage_errors

if TYPE_CHECKING:
    from zerostall.agent.standing import Standing
    from zerostall.core.manifest import RunFacts
    from zerostall.wire import messages as m


def take_folder(run: Standing, hello: m.Hello) -> None:
    """Have the folder for the trainer that says hello, unless it is had; it must be of the run that is meant.

    Raises:
        RunBusyError, RunMismatchError, StorageError, FormatError: it is another's, or no folder of a run.
    """
    if not run.folder.taken() or not run.folder.same():
        known, blank = run.folder.on_disk, run.folder.blank()
        run.folder.take(several=hello.nodes is not None)
        if blank and hello.nodes is not None and hello.nodes.elder is not None:
            run.folder.become(hello.nodes.elder.facts)
        elif blank and run.heir is not None:
            run.folder.inherit(run.heir.run, run.heir.name)
        if not run.url:
            _forget_strangers(run, known)
    _agree_with_remote(run)
    run.folder.check_name(hello.run, empty=not run.steps())
    run.folder.spread(hello.rules.disks)


def take_own_folder(run: Standing, facts: RunFacts) -> None:
    """Have a folder of this node's own for a run whose ranks are on several; rank 0's node says which run that is.

    Raises:
        RunBusyError, RunMismatchError, StorageError, FormatError: it is another's, or no folder of a run.
    """
    if run.folder.taken() and run.folder.same():
        return
    known, blank = run.folder.on_disk, run.folder.blank()
    run.folder.take(drafts=False)
    if blank:
        run.folder.become(facts)
    if run.folder.facts.run != facts.run:
        there = run.folder.facts.run
        run.folder.let_go()
        raise RunMismatchError(
            f"{run.where} is run {there} on this node, and run {facts.run} on rank 0's node",
            hint="move the folder that is not of this run aside, on that node: an empty one goes on with the others'",
        )
    _forget_strangers(run, known)


def take_again(run: Standing) -> None:
    """Have the folder once more for what is to be written, where nobody trains: nothing is made in its place.

    Raises:
        RunBusyError, RunMismatchError, StorageError, FormatError: it is not there, or another's.
    """
    with storage_errors(run.where, "the run's folder", 0, doing="read"):
        there = run.folder.run_there()
    if there is None:
        raise StorageError(f"{run.where} is not there, or empty", hint="mount it, or put it back")
    if there != run.folder.facts.run:
        raise RunMismatchError(f"{run.where} has become the folder of another run, {there}")
    known = run.folder.on_disk
    run.folder.take(drafts=False)
    _forget_strangers(run, known)


def forget_other_runs(run: Standing) -> None:
    """What is in memory of another run that had this folder is worth nothing."""
    for berth in run.berths.values():
        for step in berth.sealed_steps():
            tier = berth.tier_with(step)
            if tier is not None and tier.record_of(step).run != run.folder.facts.run:
                log.warning("%s: step %d in memory is another run's and is forgotten", run.where, step)
                berth.forget_step(step)


def _agree_with_remote(run: Standing) -> None:
    """A folder without steps takes the id of the run that is there; one with steps must have it.

    Raises:
        RunMismatchError: it has not.
    """
    facts = run.carrier.facts if run.carrier else None
    if facts is None or facts.run == run.folder.facts.run:
        return
    assert run.carrier is not None
    if run.folder.disk.steps() or any(berth.sealed_steps() for berth in run.berths.values()):
        raise RunMismatchError(
            f"{run.carrier.url} belongs to the run {facts.name or facts.run}, {run.where} to another one",
            hint="give every run a URL of its own, or begin in an empty folder to go on with that run",
        )
    run.folder.become(facts)


def _forget_strangers(run: Standing, known: set[int]) -> None:
    """While nobody held the folder here, another agent or its owner may have changed it: memory must agree with it.

    A step that the disk does not have is none; unless it never was there, to the end of what was `known`, and no
    other agent has had the folder (with a node that was lost, the rest of a step is missing to write it). Of one
    that is damaged there, memory may be all that is left.
    """
    for rank, berth in run.berths.items():
        for step in berth.sealed_steps():
            tier = berth.tier_with(step)
            assert tier is not None
            record = tier.record_of(step)
            try:
                there = run.folder.disk.manifest(step).ranks[rank : rank + 1]
            except SnapshotNotFoundError:
                if run.folder.undisturbed and step not in known:
                    continue
                there = ()
            except (FormatError, OSError):
                continue
            if there != (manifests.facts(record, manifests.encode_record(record)),):
                log.warning("%s: step %d in memory is not the run's any more and is forgotten", run.where, step)
                berth.forget_step(step)
