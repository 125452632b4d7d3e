"""Putting a snapshot back: find the copies, take the nearest clean one, check everything, then write."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from zerostall.trainer.captures import plan_of
from zerostall.trainer.devices import Straightened
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from zerostall.core.matching import Strict
    from zerostall.trainer.devices import Devices
    from zerostall.trainer.link import Link
    from zerostall.trainer.mappings import Mappings
    from zerostall.trainer.state import RestoreReport, State

_ATTEMPTS = 4
_WORTH_PINNING = 64 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; see `Checkpointer.restore`."""

    step: int | None = None
    required: bool = False
    only: str | Sequence[str] | None = None
    rename: Mapping[str, str] | None = None
    strict: Strict = True
    prefixes: bool = False
    meta_to: str | torch.device | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The step that was restored and its tier, None and "" when nothing was there; and every copy that was seen."""

    step: int | None
    seen: frozenset[Past]
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Mapped:
    """An image in memory that this process has mapped."""

    stored: Stored
    segment: native.Segment
    address: int
    verified: bool


def restore(link: Link, mappings: Mappings, devices: Devices, state: State, request: Request, where: Path) -> Outcome:
    """Restore the newest clean copy that `request` allows; raises as `Checkpointer.restore` says.

    An agent that dies meanwhile says nothing about the copies: the next one is asked for all of them again.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _restore(link, mappings, devices, state, request, where)
        except AgentError as error:
            if attempt == _ATTEMPTS:
                raise
            log.warning("%s: restoring begins again: %s", where, error.args[0])
    raise AssertionError("unreachable")


def _restore(link: Link, mappings: Mappings, devices: Devices, state: State, request: Request, where: Path) -> Outcome:
    found, _ = link.ask(m.Find)
    assert isinstance(found, m.Found)
    seen = frozenset(Past(copy.step, copy.created) for copy in found.copies)
    copies = [Copy(step=c.step, tier=c.tier, clean=c.clean, reason=c.reason) for c in found.copies]
    choice = candidates.order(copies, request.step)
    damaged = dict(choice.left_out)
    for what, why in damaged.items():
        log.warning("%s: %s is skipped: %s", where, what, why)
    for copy in choice.ordered:
        label = f"step {copy.step} in {copy.tier}"
        try:
            with _mapped(link, mappings, copy) as mapped:
                _put_back(devices, state, request, mapped, label)
                return Outcome(copy.step, seen, copy.tier)
        except (MismatchError, VersionError, AgentError, WaitTimeoutError):
            raise
        except (FormatError, SnapshotNotFoundError, OSError) as error:
            damaged[label] = str(error.args[0] if error.args else error)
            log.warning("%s: %s is skipped: %s", where, label, damaged[label])
    return _nothing(request, where, damaged, seen)


def _nothing(request: Request, where: Path, damaged: Mapping[str, str], seen: frozenset[Past]) -> Outcome:
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
def _mapped(link: Link, mappings: Mappings, copy: Copy) -> Iterator[Mapped]:
    """The image in memory, for as long as the block lasts."""
    answer, fds = link.ask(lambda id: m.Fetch(id=id, step=copy.step, tier=copy.tier))
    assert isinstance(answer, m.Fetched)
    lent = answer.memory
    try:
        if answer.passing:
            with mappings.passing(fds[0], lent.nbytes) as segment:
                yield _checked(answer, segment)
        else:
            yield _checked(answer, mappings.get(lent.key, fds[0], lent.nbytes))
    finally:
        link.tell(m.Release(), timeout=1.0)


def _checked(answer: m.Fetched, segment: native.Segment) -> Mapped:
    layout = layouts.decode(answer.layout)
    record = manifests.decode_record(answer.record)
    if answer.offset + layout.nbytes > segment.nbytes or layout.digest != record.layout:
        raise CorruptError("the image does not fit the memory it came in")
    return Mapped(Stored(layout, record), segment, segment.address + answer.offset, answer.verified)


def _put_back(devices: Devices, state: State, request: Request, mapped: Mapped, label: str) -> None:
    start = time.perf_counter()
    pool = native.Pool("restore", config.restore_threads())  # training waits: all cores may help
    try:
        report = _write(pool, devices, state, request, mapped, label)
    finally:
        pool.close()
    log.info("restored %s in %.3f s: %s", label, time.perf_counter() - start, report)


def _write(
    pool: native.Pool, devices: Devices, state: State, request: Request, mapped: Mapped, label: str
) -> RestoreReport:
    stored = mapped.stored
    targets = state.targets(
        stored,
        only=request.only,
        rename=request.rename,
        strict=request.strict,
        prefixes=request.prefixes,
        meta_to=request.meta_to,
    )
    record = stored.record
    if targets.views and not mapped.verified:
        # Aliases that are apart in the target are read from all over the image: it is checked whole, first.
        check = native.Verify(pool, mapped.address, record.nbytes, record.chunk_bytes, record.checksums)
        check.wait(None)
        if check.bad:
            raise CorruptError(f"{label}: chunk {check.bad[0]} of {len(record.checksums)} fails its checksum")
    if targets.entries:
        straightened = Straightened(targets.tensors)
        tensors = native.Tensors(straightened.tensors, [False] * len(targets.tensors))
        tensors.refresh()
        if tensors.devices:
            devices.see(tensors.devices)
            _pin(devices, pool, mapped)
        # Checked once more on this last hop even where the agent has just checked: it costs nothing while copying.
        native.Scatter(
            pool,
            plan_of(stored.layout),
            tensors,
            mapped.address,
            targets.entries,
            checksums=record.checksums,
            streams=devices.now(),
        ).wait(None)
        straightened.pour()
    return state.accept(targets, mapped.segment.view(mapped.address - mapped.segment.address, stored.layout.nbytes))


def _pin(devices: Devices, pool: native.Pool, mapped: Mapped) -> None:
    """Register the image with CUDA, so that copy engines read it directly; not worth it for a small one."""
    segment, nbytes = mapped.segment, mapped.stored.layout.nbytes
    offset = mapped.address - segment.address
    if segment.pinned(offset) or nbytes < _WORTH_PINNING or offset % layouts.ALIGN:
        return
    end = min(segment.nbytes, -(-(offset + nbytes) // layouts.ALIGN) * layouts.ALIGN)
    devices.pin(segment, stretch=1 << 50, threads=pool.threads, offset=offset, nbytes=end - offset)
