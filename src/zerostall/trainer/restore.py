"""Putting a snapshot back: agree on a step that every rank can get, take the nearest clean copy, check all, write."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from zerostall import config, native
from zerostall.core import candidates
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.candidates import Copy, Past
from zerostall.errors import (
    AgentError,
    CorruptError,
    FormatError,
    MismatchError,
    SnapshotNotFoundError,
    VersionError,
    WaitTimeoutError,
)
from zerostall.telemetry import log
from zerostall.tiers.contract import Stored
from zerostall.trainer import collecting
from zerostall.trainer.arrivals import Arrivals, Coming
from zerostall.trainer.captures import plan_of
from zerostall.trainer.file_loads import File
from zerostall.trainer.pouring import Filed, Loading, Mapped, pour, through
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record
    from zerostall.trainer.devices import Devices
    from zerostall.trainer.link import Link
    from zerostall.trainer.mappings import Mappings
    from zerostall.trainer.state import Asked, RestoreReport, State
    from zerostall.trainer.world import World

T = TypeVar("T")
_COPIES = msgspec.json.Decoder(list[Copy])
_DAMAGE = msgspec.json.Decoder(list[tuple[str, str]])
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; see `Checkpointer.restore`."""

    step: int | None
    required: bool
    asked: Asked


@dataclass(frozen=True, slots=True)
class Outcome:
    """The step that was restored and its tier, None and "" when nothing was there; and every copy that was seen."""

    step: int | None
    seen: frozenset[Past]
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Where images come from."""

    world: World
    link: Link
    mappings: Mappings
    devices: Devices
    where: Path | str


def restore(source: Source, state: State, request: Request) -> Outcome:
    """Restore the newest step that every rank can get; raises as `Checkpointer.restore` says, and on every rank.

    Each rank takes its nearest copy. Where all of one rank's copies of a step are damaged, all go on to the next step.
    """
    world, where = source.world, source.where
    what = "restore()" if request.step is None else f"restore(step={request.step})"
    with world.excused(what), world.pulse():
        request.asked.insist()
        copies = _find(source.link, where)
    common = _agree(world, copies, request, what)
    damaged = dict(common.left_out)
    _say(where, damaged)
    state.begin()
    seen = frozenset(common.seen)
    for past in common.ordered:
        several = any(copy.world > 1 for copy in copies if copy.step == past.step)
        if world.size > 1 or several or state.has_owners or request.asked.only is not None:
            tier, news = _collect(source, state, request, past, copies)
            if tier:
                return Outcome(past.step, seen, tier)
            damaged |= dict(news)
            continue
        tier, mine = _bring(source, state, request, past, copies)
        news = _DAMAGE.decode(world.decide(msgspec.json.encode([] if tier else mine), _damage, what=what))
        if not news:
            if world.size > 1:
                log.info("%s: all %d ranks have restored step %d; this one from %s", where, world.size, past.step, tier)
            return Outcome(past.step, seen, tier)
        _say(where, {label: why for label, why in news if (label, why) not in mine})
        damaged |= dict(news)
    return _nothing(request, where, damaged, seen)


def _agree(world: World, copies: list[Copy], request: Request, what: str) -> candidates.Common:
    """What all ranks try, in which order."""

    def decide(everything: Sequence[bytes]) -> bytes:
        common = candidates.common([_COPIES.decode(one) for one in everything], request.step)
        return msgspec.json.encode(common)

    return msgspec.json.decode(world.decide(msgspec.json.encode(copies), decide, what=what), type=candidates.Common)


def _damage(everything: Sequence[bytes]) -> bytes:
    """What is damaged on any rank."""
    alone = len(everything) == 1
    named = [
        (label if alone else f"{label} of rank {rank}", why)
        for rank, one in enumerate(everything)
        for label, why in _DAMAGE.decode(one)
    ]
    return msgspec.json.encode(named)


def _find(link: Link, where: Path | str) -> list[Copy]:
    """The copies that this rank can get."""
    found, _ = _again(lambda: link.ask(m.Find), where)
    assert isinstance(found, m.Found)
    return [
        Copy(step=c.step, tier=c.tier, clean=c.clean, reason=c.reason, created=c.created, world=c.world)
        for c in found.copies
    ]


def _again(ask: Callable[[], T], where: Path | str) -> T:
    """Ask until an agent lives long enough to answer."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return ask()
        except AgentError as error:
            if attempt == _ATTEMPTS:
                raise
            log.warning("%s: restoring begins again: %s", where, error.args[0])
    raise AssertionError("unreachable")


def _bring(
    source: Source, state: State, request: Request, past: Past, copies: list[Copy]
) -> tuple[str, list[tuple[str, str]]]:
    """Put that step back from the nearest copy that is whole: its tier, "" for none; and what is wrong with the others.

    An agent that dies meanwhile says nothing about the copies: the next one is asked for all of them again.
    """
    damaged: list[tuple[str, str]] = []

    def attempt() -> str:
        for copy in candidates.order(copies, past.step).ordered:
            if copy.created != past.created or copy.label in dict(damaged):
                continue
            try:
                with _lent(source, copy) as (layout, image):
                    if past.created and image.record.created != past.created:
                        raise SnapshotNotFoundError(f"{copy.label} is another one of that number by now")
                    return _put_back(source.devices, state, request, layout, image, copy)
            except AgentError:
                copies[:] = _find(source.link, source.where)
                raise
            except (MismatchError, VersionError, WaitTimeoutError):
                raise
            except (FormatError, SnapshotNotFoundError, OSError) as error:
                damaged.append((copy.label, str(error.args[0] if error.args else error)))
                _say(source.where, dict(damaged[-1:]))
        return ""

    tier = _again(attempt, source.where)
    if not tier and not damaged:
        damaged.append((f"step {past.step}", "the agent that had it is gone"))
    return tier, damaged


def _collect(
    source: Source, state: State, request: Request, past: Past, copies: list[Copy]
) -> tuple[str, list[tuple[str, str]]]:
    """Put a step of several ranks back, or into several: this rank's tier, "" for none; and what is wrong with others.

    Every rank looks into its nearest tier first. What one fails with, all have failed with, and try the next together.
    """
    world = source.world
    damaged: list[tuple[str, str]] = []
    tiers: list[str] = []
    agents = turn = 0
    while True:
        if not tiers:
            order = candidates.order(copies, past.step).ordered
            tiers = [copy.tier for copy in order if copy.created == past.created] or ["disk"]
        tier = tiers[min(turn, len(tiers) - 1)]
        try:
            copy = Copy(past.step, tier, created=past.created)
            return collecting.collect(source, state, request, copy, f"step {past.step}"), []
        except (MismatchError, VersionError, WaitTimeoutError):
            raise
        except AgentError as error:
            agents += 1
            if agents == _ATTEMPTS:
                raise
            log.warning("%s: restoring begins again: %s", source.where, error.args[0])
            with world.excused("restore: what is there now"), world.pulse():
                copies[:] = _find(source.link, source.where)
            tiers = []
            continue
        except (FormatError, SnapshotNotFoundError, OSError) as error:
            damaged.append((f"step {past.step} in {tier}", str(error.args[0] if error.args else error)))
            _say(source.where, dict(damaged[-1:]))
        turn += 1
        left = world.decide(b"" if turn >= len(tiers) else b"more", lambda every: b"".join(every), what="restore: more")
        if not left:
            return "", damaged


def _say(where: Path | str, damaged: Mapping[str, str]) -> None:
    for what, why in damaged.items():
        log.warning("%s: %s is skipped: %s", where, what, why)


def _nothing(request: Request, where: Path | str, damaged: Mapping[str, str], seen: frozenset[Past]) -> Outcome:
    reasons = "; ".join(f"{what}: {why}" for what, why in damaged.items())
    if damaged:
        raise CorruptError(
            f"no clean copy is left in {where}: {reasons}",
            hint="see `zerostall verify`; a copy that failed half-way has overwritten part of this state: "
            "make it anew before you train on it",
        )
    if request.step is not None:
        known = ", ".join(map(str, sorted({past.step for past in seen}))) or "none"
        raise SnapshotNotFoundError(f"no step {request.step} in {where}; steps there: {known}")
    if request.required:
        raise SnapshotNotFoundError(f"nothing is saved in {where}")
    log.info("nothing is saved in %s yet: training begins at step 0", where)
    return Outcome(None, seen)


@contextlib.contextmanager
def _lent(source: Source, copy: Copy) -> Iterator[tuple[Layout, Mapped | Filed | Coming]]:
    """The image, in memory or a file that is open, or about to come, for as long as the block lasts."""
    link, mappings = source.link, source.mappings
    answer, fds = link.ask(lambda id: m.Fetch(id=id, step=copy.step, tier=copy.tier, as_file=True))
    assert isinstance(answer, m.Fetched | m.Opened | m.Coming)
    damaged = ""
    try:
        if isinstance(answer, m.Opened):
            with contextlib.closing(os.fdopen(fds[0], "rb", buffering=0)):
                yield _filed(answer, fds[0])
            return
        if isinstance(answer, m.Coming):
            with contextlib.ExitStack() as stack:
                record, layout = _described(answer)
                yield layout, Arrivals(link, mappings, stack).image(answer, fds[0], record)
            return
        lent = answer.memory
        if answer.passing:
            with mappings.passing(fds[0], lent.nbytes) as segment:
                yield _checked(answer, segment)
        else:
            yield _checked(answer, mappings.get(lent.key, fds[0], lent.nbytes))
    except CorruptError as error:
        damaged = m.plain(str(error.args[0]))
        raise
    finally:
        link.tell(m.Release(damaged), timeout=1.0)


def _filed(answer: m.Opened, fd: int) -> tuple[Layout, Filed]:
    layout = layouts.decode(answer.layout)
    record = manifests.decode_record(answer.record)
    path = Path(os.fsdecode(answer.path))
    if layout.digest != record.layout or layout.nbytes != record.nbytes:
        raise CorruptError(f"{path}: its record is of another layout")
    return layout, Filed(record, File(fd, path, record.nbytes, record.chunk_bytes, record.checksums))


def _described(answer: m.Fetched | m.Coming) -> tuple[Record, Layout]:
    record = manifests.decode_record(answer.record)
    layout = layouts.decode(answer.layout, record.begins)
    if layout.digest != record.layout or layout.nbytes != record.nbytes:
        raise CorruptError(f"the record of rank {record.rank} is of another layout")
    return record, layout


def _checked(answer: m.Fetched, segment: native.Segment) -> tuple[Layout, Mapped]:
    record, layout = _described(answer)
    if answer.offset + layout.nbytes > segment.nbytes:
        raise CorruptError("the image does not fit the memory it came in")
    return layout, Mapped(record, segment, answer.offset, answer.verified, answer.kept, answer.source)


def _put_back(
    devices: Devices, state: State, request: Request, layout: Layout, image: Mapped | Filed | Coming, copy: Copy
) -> str:
    """Write it; the tier that it came from."""
    start = time.perf_counter()
    threads = config.read_threads() if isinstance(image, Filed) else config.restore_threads()
    pool = native.Pool("restore", threads, awaited=True)  # training waits: all cores may help
    try:
        report, tier = _write(pool, devices, state, request, layout, image, copy)
    finally:
        pool.close()
    log.info("restored step %d in %s in %.3f s: %s", copy.step, tier, time.perf_counter() - start, report)
    return tier


def _write(
    pool: native.Pool,
    devices: Devices,
    state: State,
    request: Request,
    layout: Layout,
    image: Mapped | Filed | Coming,
    copy: Copy,
) -> tuple[RestoreReport, str]:
    record = image.record
    targets = state.targets(Stored(layout, record), request.asked)
    tier = copy.tier
    if isinstance(image, Filed) and targets.reads_image:
        image = image.mapped(pool)
    if not isinstance(image, Mapped):
        state.about_to_write(targets)
        loading = Loading(
            pool, devices, plan_of(layout, record.chunk_bytes), targets.tensors, targets.entries, image.file
        )
        if isinstance(image, Filed):
            loading.begin()
            loading.end()
            return state.accept(targets, memoryview(b"")), tier
        loose = targets.loose(record.chunk_bytes)
        image.fill(pool, loading, loose)
        loading.end()
        return state.settle(targets, loose), tier
    tier = image.source or tier
    if targets.views and not image.verified:
        # Aliases that are apart in the target are read from all over the image: it is checked whole, first.
        check = native.Verify(pool, image.address, record.nbytes, record.chunk_bytes, record.checksums)
        through(check)
        if check.bad:
            raise CorruptError(f"{copy.label}: chunk {check.bad[0]} of {len(record.checksums)} fails its checksum")
    state.about_to_write(targets)
    if targets.entries:
        plan = plan_of(layout, record.chunk_bytes)
        if pour(pool, devices, plan, targets.tensors, targets.entries, image, pin=True):
            tier = "peer"
    return state.accept(targets, image.segment.view(image.offset, layout.nbytes)), tier
