"""What is in a run, in a folder or below a URL: its steps, whether they are right, what is pinned. Needs no agent.

Other processes may write to the folder meanwhile: a step that goes while it is looked at is left out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerostall import config, native
from zerostall.core import pieces
from zerostall.errors import (
    CorruptError,
    FormatError,
    SnapshotNotFoundError,
    StorageError,
    ZerostallError,
)
from zerostall.flow import node_agent
from zerostall.flow.difference import Difference, Side, compare
from zerostall.flow.image_reader import ImageReader
from zerostall.flow.present import again, existing, listing, present, steady
from zerostall.flow.present import newest as newest_clean
from zerostall.flow.whole_difference import compare_wholes
from zerostall.telemetry import moment
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.files import real
from zerostall.tiers.holding import step_here
from zerostall.tiers.remote import RemoteTier
from zerostall.tiers.store import Store
from zerostall.tiers.urls import is_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerostall.core.layout import Layout
    from zerostall.tiers.contract import RunTier

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) now and then, on the caller's thread."""

_HANDS = 8


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One step of a run, as its manifest tells.

    Attributes:
        step: number of finished training steps.
        world: how many ranks it has; 0 where the manifest is damaged.
        nbytes: of all ranks' images.
        metric: what the user said it is worth, if anything.
        pinned: retention never evicts it.
        created: seconds since 1970, when `save` was called.
        clean: the manifest is whole and every image is there in full. `verify` reads the bytes, too.
        reason: why it is not clean.
    """

    step: int
    world: int
    nbytes: int
    metric: float | None
    pinned: bool
    created: float
    clean: bool
    reason: str = ""

    def __str__(self) -> str:
        words = [
            f"{self.nbytes} bytes" + (f" of {self.world} ranks" if self.world > 1 else ""),
            f"saved {moment(self.created)}" if self.clean else f"damaged: {self.reason}",
            *([] if self.metric is None else [f"metric {self.metric:.6g}"]),
            *(["pinned"] if self.pinned else []),
        ]
        return f"step {self.step}: {', '.join(words)}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What reading every byte of a step has shown.

    Attributes:
        nbytes: bytes that were read.
        problems: what is wrong, in words; empty where the step is clean.
        agent_told: this node's agent holds the run's folder, and has been told.
    """

    step: int
    nbytes: int
    problems: tuple[str, ...]
    agent_told: bool = False

    @property
    def clean(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        told = "; the agent is told" if self.agent_told else ""
        return f"step {self.step}: {self.nbytes} bytes read, {'; '.join(self.problems) or 'all well'}{told}"


def snapshots(where: str | os.PathLike[str]) -> list[Snapshot]:
    """The steps of a run, rising; those that are damaged as not clean, with the reason.

    Reads manifests and the sizes of files: quick, whatever the size of the images.

    Raises:
        SnapshotNotFoundError: there is no such run.
    """
    with opened_run(where) as run:
        return _snapshots(run)


def verify(
    where: str | os.PathLike[str], step: int | None = None, *, progress: Progress | None = None
) -> list[Verdict]:
    """Read every byte of a step, or of all steps, and check it. Memory: one chunk (16 MiB).

    The agent of this node is told of what is damaged in a folder that it holds: it makes that again from a good copy
    where there is one.

    Raises:
        SnapshotNotFoundError: there is no such run, or no such step.
    """
    with opened_run(where) as run:
        chosen = run.steps() if step is None else [existing(run, step)]
        known = {snapshot.step: snapshot for snapshot in _snapshots(run)}
        meter = _Meter(sum(known[step].nbytes for step in chosen if step in known), progress)
        verdicts = [steady(run, one, lambda one=one: _verdict(run, one, meter)) for one in chosen]
        left = [verdict for verdict in verdicts if verdict.clean or verdict.step in run.steps()]
        if step is not None and not left:
            raise SnapshotNotFoundError(f"step {step} of {run.where} was evicted while it was read")
        return _tell(run, left)


def newest(where: str | os.PathLike[str]) -> int:
    """The newest clean step of a run.

    Raises:
        SnapshotNotFoundError: there is no such run, or no clean step in it.
    """
    with opened_run(where) as run:
        return newest_clean(run)


def diff(where: str | os.PathLike[str], a: int, b: int, *, progress: Progress | None = None) -> Difference:
    """How two steps differ: names, shapes and types, small values, and how many elements of each tensor.

    Every byte is checked as it is read. Memory: a chunk of each.

    Raises:
        SnapshotNotFoundError: there is no such step.
        CorruptError: one of both is damaged.
    """
    return again(lambda: _diff(where, a, b, progress))


def _diff(where: str | os.PathLike[str], a: int, b: int, progress: Progress | None) -> Difference:
    with opened_run(where) as run, present(run, existing(run, a)), present(run, existing(run, b)):
        before, after = (Side(run, step, run.manifest(step)) for step in (a, b))
        meter = _Meter(before.nbytes + after.nbytes, progress)
        alike = [[(rank.layout, rank.begins) for rank in side.manifest.ranks] for side in (before, after)]
        by_rank = alike[0] == alike[1] or max(map(len, alike)) == 1
        return (compare if by_rank else compare_wholes)(before, after, meter.add)


def pin(where: str | os.PathLike[str], step: int, pinned: bool = True) -> None:
    """Mark a step so that retention never evicts it, or (`pinned=False`) take the mark away.

    Raises:
        SnapshotNotFoundError: there is no such step.
        StorageError: it cannot be written.
    """
    with opened_run(where) as run, present(run, existing(run, step)):
        try:
            run.pin(step, pinned)
        except OSError as error:
            if isinstance(error, (SnapshotNotFoundError, StorageError)):
                raise
            raise StorageError(f"cannot pin step {step} in {where}: {error.strerror}", errno=error.errno) from error


# ---------------------------------------------------------------------------------------------- for other tools


@contextlib.contextmanager
def opened_run(where: str | os.PathLike[str]) -> Iterator[RunTier]:
    """A run in a folder or below a URL, for reading.

    Raises:
        SnapshotNotFoundError: there is no such folder, or it is a step's, or nothing of a run is below the URL.
        StorageError: the store refused.
    """
    text = os.fspath(where)
    if is_url(text):
        with opened_remote(text, config.store_environment()) as remote:
            if remote.run_facts() is None and not remote.steps():
                raise SnapshotNotFoundError(f"{remote.where} holds no run")
            yield remote
        return
    path = real(text)
    if not path.is_dir():
        problem = "is a file, not a run's folder" if path.exists() else "does not exist"
        if path.is_symlink():  # still: it leads back to itself
            problem = "is a link that leads nowhere"
        raise SnapshotNotFoundError(f"{path} {problem}")
    if (step := step_here(path)) is not None:
        raise SnapshotNotFoundError(f"{path} is step {step} of a run", hint=f"name the run's folder, {path.parent}")
    pool = native.Pool("catalog", 1)
    try:
        yield DiskTier(path, pool)
    except PermissionError as error:
        raise StorageError(f"cannot read {error.filename or path}: {error.strerror}", errno=error.errno) from error
    finally:
        pool.close()


@contextlib.contextmanager
def opened_remote(url: str, environment: Mapping[str, str]) -> Iterator[RemoteTier]:
    """A run below a URL, for reading and writing, with threads of its own."""
    with ThreadPoolExecutor(_HANDS, "store") as hands:
        remote = RemoteTier(Store(url, environment, timeout=config.store_timeout()), hands)
        try:
            yield remote
        finally:
            remote.close()


# ------------------------------------------------------------------------------------------------------ within


def _snapshots(run: RunTier) -> list[Snapshot]:
    steps = run.steps()
    if isinstance(run, RemoteTier):  # every look takes a while there
        with ThreadPoolExecutor(_HANDS, "look") as hands:
            found = list(hands.map(lambda step: _snapshot(run, step), steps))
    else:
        found = [steady(run, step, lambda step=step: _snapshot(run, step)) for step in steps]
    return [one for one in found if one is not None]


def _snapshot(run: RunTier, step: int) -> Snapshot | None:
    """One step; None where it was evicted meanwhile."""
    pinned = run.pinned(step)
    try:
        manifest = run.manifest(step)
        reason = run.missing(manifest)
    except SnapshotNotFoundError:
        return None
    except (FormatError, StorageError) as error:
        if step not in run.steps():
            return None
        return Snapshot(step, 0, 0, None, pinned, 0.0, clean=False, reason=str(error.args[0]))
    if reason and step not in run.steps():
        return None
    return Snapshot(
        step=step,
        world=manifest.world,
        nbytes=sum(rank.nbytes for rank in manifest.ranks),
        metric=manifest.metric,
        pinned=pinned,
        created=manifest.created,
        clean=not reason,
        reason=reason,
    )


class _Meter:
    """Adds up what was read, and tells whoever wants to know."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self.add(0)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, max(self._total, self._done))


def _verdict(run: RunTier, step: int, meter: _Meter) -> Verdict:
    try:
        manifest = run.manifest(step)
    except (FormatError, StorageError, SnapshotNotFoundError) as error:
        return Verdict(step, 0, (str(error.args[0]),))
    problems: list[str] = []
    found: list[Layout | None] = [None] * manifest.world
    nbytes = 0
    for rank in range(manifest.world):
        try:
            stored = run.open(step, rank)
            found[rank] = stored.layout
            with ImageReader(run.bytes_of(step, rank, stored), stored) as reader:
                nbytes += _read_all(reader, problems, meter)
        except (FormatError, StorageError, SnapshotNotFoundError) as error:
            problems.append(str(error.args[0]))
    if None not in found:
        try:
            pieces.gather(found).insist()
        except FormatError as error:
            problems.append(f"step {step}: {error.args[0]}")
    return Verdict(step, nbytes, tuple(problems))


def _tell(run: RunTier, verdicts: list[Verdict]) -> list[Verdict]:
    """Tell the node's agent what is damaged on its disk."""
    damaged = [(verdict.step, "; ".join(verdict.problems)) for verdict in verdicts if not verdict.clean]
    if not damaged or not isinstance(run, DiskTier):
        return verdicts
    told = False
    with contextlib.suppress(ZerostallError):  # whoever reads it finds it, too
        told = node_agent.told_of_damage(run.where, damaged)
    return [replace(verdict, agent_told=told and not verdict.clean) for verdict in verdicts]


def _read_all(reader: ImageReader, problems: list[str], meter: _Meter) -> int:
    bad: list[int] = []
    nbytes = 0
    for index in range(reader.chunks):
        try:
            nbytes += len(reader.chunk(index))
        except CorruptError:
            bad.append(index)
        meter.add(reader.chunk_size(index))
    if bad:
        problems.append(
            f"{reader.label}: {len(bad)} of {reader.chunks} chunks fail their checksum: chunk {listing(bad)}"
        )
    if 0 not in bad and (problem := reader.header_problem()):
        problems.append(problem)
    return nbytes
