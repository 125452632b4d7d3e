"""From disk, or from host memory where a run has no disk, to the remote tier: the newest step, one at a time."""

from __future__ import annotations

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall import config
from zerostall.core import backoff
from zerostall.errors import CorruptError, RunMismatchError, SnapshotNotFoundError, StorageError, ZerostallError
from zerostall.flow.carry import Carried, Load, carry
from zerostall.flow.governor import Gate
from zerostall.flow.persist import prune
from zerostall.flow.step_times import StepTimes
from zerostall.flow.worker import Worker
from zerostall.telemetry import log
from zerostall.tiers.remote import RemoteTier
from zerostall.tiers.store import Store
from zerostall.tiers.uploads import AT_ONCE
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerostall.agent.berth import Berth
    from zerostall.agent.folder import RunFolder
    from zerostall.agent.loop_call import Post
    from zerostall.core.candidates import Past
    from zerostall.core.manifest import RunFacts
    from zerostall.flow.governor import Governor

_RESTORE_HANDS = 8
_LOOKED_AT = 16
"""Newest steps whose manifests are read at the start."""


@dataclass(slots=True)
class Cargo:
    """What may be carried: its steps, and how to get at one.

    Attributes:
        newest: the newest step that is there; None for none.
        has: whether a step is there.
        load: take hold of a step; called on the agent's loop. Closed when it is no longer needed.
        forget: what was there may have changed.
        created: when a step that is there was saved; 0.0 if that cannot be said.
    """

    newest: Callable[[], int | None]
    has: Callable[[int], bool]
    load: Callable[[int], Load]
    forget: Callable[[], None]
    created: Callable[[int], float]


@dataclass(slots=True)
class _Trip:
    """A step on its way."""

    step: int
    load: Load
    began: float


@dataclass(slots=True)
class _Awaited:
    """Who waits for a step: rank → when that rank saved it."""

    ranks: dict[int, float] = field(default_factory=dict)


class Carrier:
    """Driven by the agent's loop; its worker comes back through `post`.

    Attributes:
        tier: for reading, with threads of its own.
        facts: what run is there, once the store was asked; None where it is none yet.
        met: whether the store was asked.
        steps: the committed steps there, as far as this agent found or brought them.
        last_error: what went wrong last, until an upload works again.
    """

    def __init__(
        self,
        remote: m.RemoteRules,
        berths: Mapping[int, Berth],
        folder: RunFolder,
        cargo: Cargo,
        governor: Governor,
        post: Post,
        advance: Callable[[], None],
        tell: Callable[[int, m.Reached | m.Failed], None],
    ) -> None:
        self._berths = berths
        self._folder = folder
        self._cargo = cargo
        self._post = post
        self._advance = advance
        self._tell = tell
        self._hands = ThreadPoolExecutor(AT_ONCE, "upload")
        self._restore_hands = ThreadPoolExecutor(_RESTORE_HANDS, "download")
        self._gate = Gate(governor)
        self._times = StepTimes()
        store = Store(remote.url, remote.environment, timeout=config.store_timeout())
        self._target = RemoteTier(store, self._hands, self._gate)
        self.tier = RemoteTier(store, self._restore_hands)
        self.url = self.tier.where
        self.met = False
        self.facts: RunFacts | None = None
        self.steps: set[int] = set()
        self.last_error = ""
        self._trip: _Trip | None = None
        self._created: dict[int, float] = {}
        self._awaited: dict[int, _Awaited] = {}
        self._given_up: set[int] = set()
        self._dirty: list[tuple[Past, int | None]] = []
        self._failures = 0
        self._retry_at = 0.0
        self._untidy = 0
        self._meeting: list[Callable[[ZerostallError | None], None]] = []
        self._worker = Worker(f"carry {folder.where.name}")
        self.use(remote)

    def use(self, remote: m.RemoteRules) -> None:
        """What the trainer wants: how often, how many, how fast; and the credentials it has now."""
        self.interval = remote.every
        self.keep = remote.keep()
        self._gate.use(remote.rate)
        self.tier.store.environment.update(remote.environment)
        self._rules = remote

    # -------------------------------------------------------------------------------------------------- meeting

    def meet(self, then: Callable[[ZerostallError | None], None]) -> None:
        """Ask the store what run it holds and which steps; `then` is called on the loop, with what went wrong."""
        self._meeting.append(then)
        if len(self._meeting) > 1:
            return

        def look() -> None:
            found: tuple[RunFacts | None, dict[int, float]] | None = None
            wrong: ZerostallError | None = None
            try:
                facts = self.tier.told_run()
                steps = self.tier.steps()
                found = facts, dict.fromkeys(steps, 0.0) | self.tier.created_of(steps[-_LOOKED_AT:])
            except ZerostallError as error:
                wrong = error
            except Exception as error:  # noqa: BLE001 - a trainer waits
                log.exception("%s: could not be looked at", self.url)
                wrong = StorageError(f"{self.url} could not be looked at: {error!r}")
            self._post(lambda: self._found(found, wrong))

        self._worker.submit(look)

    def _found(self, found: tuple[RunFacts | None, dict[int, float]] | None, wrong: ZerostallError | None) -> None:
        if found is not None:
            self.facts, self._created = found
            # One that was saved anew meanwhile is carried again.
            self.steps = {
                step
                for step, created in self._created.items()
                if not created or not self._cargo.has(step) or self._cargo.created(step) in (0.0, created)
            }
            self.met, self.last_error = True, ""
            self._worker.submit(self._clear)
        elif wrong is not None:
            self.last_error = str(wrong.args[0])
        waiting, self._meeting = self._meeting, []
        for then in waiting:
            then(wrong)

    def _clear(self) -> None:
        with contextlib.suppress(StorageError):
            self._target.clear_leftovers()

    # --------------------------------------------------------------------------------------------- what goes next

    def next_step(self) -> int | None:
        """The step to carry next: an awaited one, the oldest first; else the newest."""
        for step in sorted(self._awaited):
            if step not in self.steps and step not in self._given_up and self._cargo.has(step):
                return step
        newest = self._cargo.newest()
        if newest is None or newest in self._given_up or self._is_there(newest):
            return None
        return newest

    def _is_there(self, step: int) -> bool:
        return step in self.steps

    def changed(self, step: int) -> None:
        """There is a new one of that step where steps come from."""
        self._cargo.forget()
        self.steps.discard(step)
        self._given_up.discard(step)

    def promise(self, rank: int, past: Past) -> None:
        """Somebody waits for this very image; it may be on its way to where steps come from."""
        if past.step in self.steps:
            self._tell(rank, m.Reached(step=past.step, created=past.created, tier="remote"))
            return
        self._awaited.setdefault(past.step, _Awaited()).ranks[rank] = past.created
        self._retry_at = 0.0

    def replaced(self, rank: int, past: Past) -> None:
        """It will not get to where steps come from: nobody need wait."""
        awaited = self._awaited.get(past.step)
        if awaited is not None and awaited.ranks.get(rank) == past.created:
            del self._awaited[past.step]

    def evict(self, past: Past, rank: int | None = None) -> None:
        """A step is dirty after all: it goes from the store, too, after what is under way.

        `past`: when it was saved, by that rank; by rank 0, where none is named.
        """
        self._cargo.forget()
        self._worker.submit(lambda: self._evict((past, rank)))

    def _evict(self, *more: tuple[Past, int | None]) -> None:
        """The worker's thread. What cannot be removed now is tried again after the next step."""
        dirty, self._dirty = [*self._dirty, *more], []
        for past, rank in dirty:
            step = past.step
            try:
                there = self._target
                created = (there.manifest(step) if rank is None else there.open(step, rank).record).created
                if created == past.created:
                    there.evict(step)
                    self._post(lambda step=step: self.steps.discard(step))
                    log.warning("%s: step %d, which is dirty after all, is removed", self.url, step)
            except SnapshotNotFoundError:
                continue
            except (ZerostallError, OSError) as error:
                self._dirty.append((past, rank))
                log.error("%s: step %d is dirty after all and cannot be removed: %s", self.url, step, error)

    def saved(self, step: int, created: float) -> None:
        """Training has come to that step: how long its steps take tells what uploads cost it."""
        stretch = self._times.saved(step, created)
        if stretch is not None and (news := self._gate.heed(stretch)):
            log.info("%s: %s", self.url, news)

    def hurry(self) -> None:
        """Nobody trains: the newest step goes now. Unless the last try has failed."""
        self._times.interrupted()
        if self._failures == 0:
            self._retry_at = 0.0

    def protected(self) -> frozenset[int]:
        """Steps that retention must leave where they come from."""
        trip = [self._trip.step] if self._trip else []
        return frozenset([*trip, *self._awaited])

    def carrying(self) -> int | None:
        return self._trip.step if self._trip else None

    def busy(self) -> bool:
        """Is a step on its way or about to go, or retention at work?"""
        return self._trip is not None or self._untidy > 0 or bool(self._meeting) or self.next_step() is not None

    def retry_in(self) -> float | None:
        """Seconds until `start` has something to do; None when it has not."""
        if self._trip is not None or self._retry_at == 0.0 or self.next_step() is None:
            return None
        return max(0.0, self._retry_at - time.monotonic())

    # ------------------------------------------------------------------------------------------------- carrying

    def start(self) -> None:
        """Send the next step on its way, if there is one and it is its time."""
        if self._trip is not None or time.monotonic() < self._retry_at:
            return
        step = self.next_step()
        if step is None:
            return
        trip = self._trip = _Trip(step, self._cargo.load(step), time.monotonic())
        self._untidy += 1
        facts = self._folder.facts

        def go() -> None:
            carried: Carried | None = None
            wrong: ZerostallError | None = None
            try:
                self._require_ours(facts)
                with self._times.under_way():
                    carried = carry(self._target, trip.load)
            except ZerostallError as error:
                wrong = error
            except Exception as error:  # noqa: BLE001 - the images must be let go, and the trainer must hear
                log.exception("%s: step %d could not be carried", self.url, step)
                wrong = StorageError(f"step {step} could not be carried to {self.url}: {error!r}")
            self._post(lambda: self._landed(carried, wrong))
            if carried is not None:
                gone = prune(self._target, self.keep, frozenset([step]))
                self._post(lambda: self.steps.difference_update(gone))
                self._evict()
                self._clear()
            self._post(self._tidied)

        self._worker.submit(go)

    def _require_ours(self, facts: RunFacts) -> None:
        """Raises RunMismatchError where another run is there."""
        there = self._target.found_run(facts)
        if there.run != facts.run:
            raise RunMismatchError(
                f"{self.url} belongs to the run {there.name or there.run}, {self._folder.where} to {facts.run}",
                hint="give every run a URL of its own",
            )

    def _tidied(self) -> None:
        self._untidy -= 1
        self._advance()

    def _landed(self, carried: Carried | None, wrong: ZerostallError | None) -> None:
        trip, self._trip = self._trip, None
        assert trip is not None
        waiting = self._awaited.get(trip.step, _Awaited())
        told = dict(trip.load.created) | waiting.ranks
        if carried is not None:
            self._failures, self.last_error = 0, ""
            self._awaited.pop(trip.step, None)
            self.steps = self.steps.difference(carried.aside) | {trip.step}
            self._created = {step: at for step, at in self._created.items() if step in self.steps}
            self._created[trip.step] = carried.manifest.created
        trip.load.close()
        if carried is not None:
            attached = any(berth.client for berth in self._berths.values())
            self._retry_at = trip.began + self.interval if attached and not self._awaited else 0.0
            for rank, created in told.items():
                self._tell(rank, m.Reached(step=trip.step, created=created, tier="remote"))
        elif wrong is not None:
            self._failed(trip.step, told, wrong)
        self._advance()

    def _failed(self, step: int, told: Mapping[int, float], error: ZerostallError) -> None:
        self._failures += 1
        self._retry_at = time.monotonic() + backoff.pause(self._failures, random.random())
        self.last_error = f"step {step}: {error.args[0]}"
        if not isinstance(error, StorageError):
            self._given_up.add(step)  # trying again would end the same way
            self._awaited.pop(step, None)
            if not isinstance(error, CorruptError):
                self._worker.submit(lambda: self._target.abandon(step))
        log.error("%s: step %d did not get there: %s", self.url, step, error)
        for rank, created in told.items():
            self._tell(rank, m.Failed.of(m.Refused.of(0, error), step, created, "remote"))

    # -------------------------------------------------------------------------------------------------- telling

    def report(self) -> m.TierReport:
        newest = max(self.steps, default=None)
        return m.TierReport(
            tier="remote",
            where=m.plain(self.url),
            newest=newest,
            created=self._created.get(newest, 0.0) if newest is not None else 0.0,
            steps=len(self.steps),
            every=self.interval,
            keep=self.keep.words(),
            moving=self.carrying(),
            waits=self._gate.reason,
            last_error=m.plain(self.last_error),
        )

    def when_tidy(self, call: Callable[[], None]) -> None:
        """Call on the loop's thread when what is under way, and the retention behind it, are done."""
        self._worker.submit(lambda: self._post(call))

    def close(self) -> None:
        """Break off what is under way: the store keeps the parts it has, and the next agent goes on from them."""
        self._gate.close()
        self._worker.close()
        self._hands.shutdown()
        self._restore_hands.shutdown()
        self._target.close()
        self.tier.close()
