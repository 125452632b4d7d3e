"""Host memory to disk: one committed step, then retention."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zerostall.core import retention
from zerostall.core.retention import Keep, StepFacts
from zerostall.errors import StorageError, ZerostallError
from zerostall.telemetry import log, say_once
from zerostall.tiers.image_writes import AtOnce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from zerostall.core.candidates import Past
    from zerostall.core.manifest import Manifest
    from zerostall.tiers.contract import Image, Pace, RunTier
    from zerostall.tiers.disk import DiskTier


class Others(Protocol):
    """Other nodes, which write their ranks' images of the step."""

    def write(self, folder: Path, aside: tuple[Past, ...]) -> None:
        """Have them write into this folder, or into the like of their own, in which these steps are set aside first."""

    def wait(self) -> None:
        """Wait until all have; raises what one has failed with."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to write: the images of all ranks of one step.

    Attributes:
        images: those of this node's ranks.
        others: those that have the rest, if there is any.
        replace: a committed step of that number may be replaced.
        aside: set these committed steps aside first: the run has left the past they belong to.
        here: only these ranks' images get into this folder, the others' into those of their own nodes; None for all.
    """

    manifest: Manifest
    images: tuple[Image, ...]
    replace: bool = False
    pin: bool = False
    aside: tuple[Past, ...] = ()
    others: Others | None = None
    here: frozenset[int] | None = None

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an order went; `error` is None when the step is durable."""

    step: int
    seconds: float
    error: ZerostallError | None = None


def persist(
    disk: DiskTier,
    order: Order,
    hold: Callable[[], object] = lambda: None,
    pace: Callable[[], Pace] = AtOnce,
) -> Outcome:
    """Write a step durably and commit it, once `hold` has made sure of the folder; each image at a `pace` of its own.

    Every failure is in the outcome, none is raised.
    """
    start = time.monotonic()
    try:
        hold()
        aside = disk.set_aside(order.aside)
        if aside:
            log.warning("%s: training went back before steps %s: they are set aside", disk.where, aside)
        with _by_others(disk, order):
            put_images(disk, order.images, pace)
        disk.commit(order.manifest, replace=order.replace, pin=order.pin, here=order.here)
    except Exception as error:  # noqa: BLE001 - the images must be let go, and the trainer must hear
        disk.abandon(order.step)
        return Outcome(order.step, time.monotonic() - start, _ours(error, order, disk))
    return Outcome(order.step, time.monotonic() - start)


def put_images(disk: DiskTier, images: Sequence[Image], pace: Callable[[], Pace] = AtOnce) -> None:
    """Write images, on several disks at once. Returns, or raises, when nothing is being written any more."""
    lanes = disk.lanes(images)

    def write(lane: Sequence[Image]) -> None:
        for image in lane:
            disk.put(image, pace())

    if len(lanes) == 1:
        write(lanes[0])
        return
    with ThreadPoolExecutor(len(lanes), "zerostall-disk") as threads:
        for written in [threads.submit(write, lane) for lane in lanes]:
            written.result()


@contextlib.contextmanager
def _by_others(disk: DiskTier, order: Order) -> Iterator[None]:
    """Have other nodes write their images meanwhile; at the end all are there, and seen from here."""
    if order.others is None:
        yield
        return
    folder = disk.draft(order.step)
    order.others.write(folder, order.aside)
    try:
        yield
    except BaseException:
        with contextlib.suppress(ZerostallError):
            order.others.wait()  # what is still being written must not get into a folder of the next try
        raise
    order.others.wait()
    if missing := disk.missing_draft(order.manifest, order.here):
        raise StorageError(
            f"step {order.step}: {missing}, though another node has written it",
            hint="a run on several nodes needs one folder that all of them share",
        )


def _ours(error: Exception, order: Order, disk: DiskTier) -> ZerostallError:
    if isinstance(error, ZerostallError):
        return error
    if not isinstance(error, OSError):
        log.exception("%s: step %d could not be written", disk.where, order.step)
    number = error.errno if isinstance(error, OSError) else None
    return StorageError(f"cannot write step {order.step} to {disk.where}: {error}", errno=number)


def prune(run: RunTier, keep: Keep, protected: frozenset[int]) -> tuple[int, ...]:
    """Evict what retention does not keep and what could not be removed before; never raises. Returns the evicted."""
    evicted: tuple[int, ...] = ()
    try:
        # A run may keep thousands of steps: a file is opened only for a rule that asks for what is in it, and only the
        # pins of those that would go are looked for.
        steps = _counted(run, run.steps(), keep.last)
        told = run.facts(steps) if keep.best is not None or keep.within is not None else None
        facts = [StepFacts(step) if told is None else told.get(step, StepFacts(step)) for step in steps]
        if told is not None:
            protected = protected.union(set(steps).difference(told))  # nobody can say just now what they are
        rewound = [StepFacts(step, pinned=run.pinned(step, rewound=True)) for step in run.rewound()]
        going = set(retention.decide(facts, keep, protected, rewound=rewound).evict)
        facts = [
            StepFacts(fact.step, fact.metric, fact.step in going and run.pinned(fact.step), fact.created)
            for fact in facts
        ]
        decision = retention.decide(facts, keep, protected, rewound=rewound)
        for step in _counted(run, decision.forget, rewound=True):
            log.info("%s: step %d, set aside, goes: %s", run.where, step, decision.forget_reasons.get(step, ""))
            run.forget_rewound(step)
        evict = _counted(run, decision.evict)
        for step in evict:
            log.info("%s: step %d goes: %s", run.where, step, decision.reasons.get(step, ""))
            run.evict(step)
        evicted = tuple(evict)
        run.remove_again()
    except (OSError, ZerostallError) as error:
        log.warning("%s: old steps could not all be removed: %s", run.where, error)
    return evicted


def _counted(run: RunTier, steps: Iterable[int], last: int = 0, *, rewound: bool = False) -> list[int]:
    """Those that are the run's own, as far as anybody asks: the newest `last` of more, where it is given.

    Another run's counts for nothing here, and is not this run's to remove.
    """
    own = list(steps)
    while len(own) > last and (strangers := run.strangers(own[-last:], rewound=rewound)):
        for step in strangers:
            said = "%s: step %d is another run's: it counts for nothing here and is left alone", run.where, step
            say_once(f"stranger:{run.where}:{step}", *said)
        own = [step for step in own if step not in strangers]
    return own
