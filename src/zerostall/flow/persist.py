"""Host memory to disk: one committed step, then retention."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.core import retention
from zerostall.core.retention import Keep, StepFacts
from zerostall.errors import CorruptError, FormatError, StorageError, ZerostallError
from zerostall.telemetry import log

if TYPE_CHECKING:
    from zerostall.core.manifest import Manifest
    from zerostall.tiers.contract import Image
    from zerostall.tiers.disk import DiskTier


@dataclass(frozen=True, slots=True)
class Order:
    """What to write: the images of all ranks of one step.

    Attributes:
        replace: a committed step of that number may be replaced.
        aside: set these committed steps aside first: the run has left the past they belong to.
    """

    manifest: Manifest
    images: tuple[Image, ...]
    replace: bool = False
    pin: bool = False
    aside: tuple[int, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an order went; `error` is None when the step is durable."""

    step: int
    seconds: float
    error: ZerostallError | None = None


def persist(disk: DiskTier, order: Order) -> Outcome:
    """Write a step durably and commit it. Every failure is in the outcome, none is raised."""
    start = time.monotonic()
    try:
        aside = disk.set_aside(order.aside)
        if aside:
            log.warning("%s: training went back before steps %s: they are set aside", disk.where, aside)
        for image in order.images:
            disk.put(image)
        disk.commit(order.manifest, replace=order.replace)
        if order.pin:
            disk.pin(order.step)
    except ZerostallError as error:
        return Outcome(order.step, time.monotonic() - start, error)
    except OSError as error:
        wrapped = StorageError(f"cannot write step {order.step} to {disk.where}: {error}", errno=error.errno)
        return Outcome(order.step, time.monotonic() - start, wrapped)
    return Outcome(order.step, time.monotonic() - start)


def prune(disk: DiskTier, keep: Keep, protected: frozenset[int]) -> tuple[int, ...]:
    """Evict what retention does not keep; never raises. Returns the evicted steps."""
    evicted: tuple[int, ...] = ()
    try:
        facts = [_facts(disk, step) for step in disk.steps()]
        rewound = [StepFacts(step, pinned=disk.pinned(step, rewound=True)) for step in disk.rewound()]
        decision = retention.decide(facts, keep, protected, rewound=rewound)
        for step in decision.forget:
            log.info("%s: step %d, set aside, goes: %s", disk.where, step, decision.forget_reasons.get(step, ""))
            disk.forget_rewound(step)
        for step in decision.evict:
            log.info("%s: step %d goes: %s", disk.where, step, decision.reasons.get(step, ""))
            disk.evict(step)
        evicted = decision.evict
    except (OSError, ZerostallError) as error:
        log.warning("%s: old steps could not all be removed: %s", disk.where, error)
    return evicted


def _facts(disk: DiskTier, step: int) -> StepFacts:
    try:
        metric = disk.manifest(step).metric
    except (CorruptError, FormatError, OSError):
        metric = None  # a damaged step is as old as its number says, and best at nothing
    return StepFacts(step, metric=metric, pinned=disk.pinned(step))
