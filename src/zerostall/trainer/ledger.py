"""What a checkpointer knows of its steps: which are there, which are on their way, and what went wrong unreported."""

from __future__ import annotations

import bisect
import math
import time
from typing import TYPE_CHECKING

from zerostall.core.moments import moment
from zerostall.errors import RankError, ReplacedError, StepExistsError, TornError, ZerostallError
from zerostall.telemetry import Stats, log
from zerostall.wire import messages as m

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from zerostall.config import IfExists
    from zerostall.core.candidates import Past
    from zerostall.trainer.saving import Saving

_MOST_KNOWN = 10_000
_ALL_WAIT = "with when_busy='wait' no rank skips a save"


class Ledger:
    """Written on the training thread, the sealer's and the link's, under one condition.

    Attributes:
        frontier: a step beyond it may be saved without asking; infinite where none may.
        aside: steps to set aside before the next one is committed.
    """

    def __init__(
        self, where: Path | str, condition: threading.Condition, stats: Stats, tiers: tuple[str, ...] = ("host", "disk")
    ) -> None:
        self.tiers = tiers  # nearest first; in the second a step is durable
        self._home = tiers[1]
        self._where = where
        self._condition = condition
        self._stats = stats
        self._known: list[int] = []  # rising; the newest ones, for a run may save millions
        self._unread: int | None = None
        self.frontier = -1.0
        self.aside: tuple[Past, ...] = ()
        self._savings: dict[int, Saving] = {}
        self._urged: dict[Saving, str] = {}
        self._failure: ZerostallError | None = None
        self._failure_tier = ""
        self._last_skipped: int | None = None
        self._latest = 0.0
        self._ticks = time.monotonic()  # when that was

    def __str__(self) -> str:
        """How a run fares, in words."""
        newest = f"newest step {self._known[-1]}" if self._known else "no step yet"
        stats = self._stats
        odd = {"skipped": stats.skipped, "dirty": stats.dirty, "failed": stats.failed, "spoiled": stats.spoiled}
        return ", ".join(
            [newest, f"{stats.saves} saves", *(f"{number} {what}" for what, number in odd.items() if number)]
        )

    # ------------------------------------------------------------------------------------------ what is there

    def found(self, steps: tuple[int, ...]) -> None:
        """The folder holds these steps, and nobody has restored them yet."""
        with self._condition:
            self._known = sorted(steps)
            self._unread = max(steps, default=None)
            self._mark_frontier()

    def resume(self, step: int | None, seen: frozenset[Past]) -> None:
        """Training goes on from `step` (None: from nothing); newer ones of those seen are of a past it has left."""
        with self._condition:
            self.aside = tuple(sorted(past for past in seen if step is not None and past.step > step))
            self._known = sorted({past.step for past in seen.difference(self.aside)})
            self._unread = None
            latest = max([self._latest, *(past.created for past in seen)])
            if latest > self._latest:
                self._latest, self._ticks = latest, time.monotonic()
            self._mark_frontier()
        if self.aside:
            left = sorted({past.step for past in self.aside})
            log.warning("training goes on from step %s; the next save sets steps %s aside", step, left)

    def _mark_frontier(self) -> None:
        self.frontier = math.inf if self._unread is not None else self._known[-1] if self._known else -1

    def admit(self, step: int, if_exists: IfExists) -> bool | None:
        """May `step` be saved? True to replace one, False for a new one, None to skip it.

        Raises:
            StepExistsError: it is there, or would go behind a newer one, or the folder was not restored.
        """
        if if_exists not in ("error", "skip", "replace"):
            raise ValueError(f"if_exists={if_exists!r} is none of 'error', 'skip', 'replace'")
        with self._condition:
            if self._unread is not None:
                raise StepExistsError(
                    f"{self._where} holds snapshots up to step {self._unread} that were not restored",
                    hint="call restore() first to go on with them, or use a folder of its own",
                )
            newest = self._known[-1] if self._known else -1
            if step <= newest and self._knows(step):
                if if_exists == "error":
                    raise StepExistsError(f"step {step} is saved already", hint="say if_exists='replace' or 'skip'")
                return None if if_exists == "skip" else True
        if step < newest:
            raise StepExistsError(
                f"step {step} would go behind step {newest}, which is saved already",
                hint="restore(step=...) an older step to go on from there",
            )
        return False

    def _knows(self, step: int) -> bool:
        index = bisect.bisect_left(self._known, step)
        return index < len(self._known) and self._known[index] == step

    # ------------------------------------------------------------------------------------------ what is on its way

    def accept(self, saving: Saving) -> None:
        """It has begun. What was saved after what, and which of two of one number is meant, is told by when that was.

        So it is later than any that is known of, also where the clock has been set back in between.
        """
        condition = self._condition
        condition.acquire()  # as in `Shelf.take`
        try:
            ticks, now = time.monotonic(), saving.created or time.time()
            if now <= self._latest:
                now = moment(now, self._latest, ticks - self._ticks)
            saving.created = self._latest = now
            self._ticks = ticks
            step = saving.step
            if before := self._savings.get(step):
                self._replaced(before, self._home)
            if step > self.frontier:  # nothing goes behind a newer one
                self._known.append(step)
                self.frontier = step
                if len(self._known) > 2 * _MOST_KNOWN:
                    del self._known[:-_MOST_KNOWN]
            else:
                saving._replaces = self._knows(step)
            self._savings[step] = saving
        finally:
            condition.release()

    def newest(self) -> Saving | None:
        """The newest save that was accepted and not replaced."""
        with self._condition:
            return self._savings[max(self._savings)] if self._savings else None

    def skipped(self, step: int) -> None:
        """This rank has skipped a save."""
        with self._condition:
            self._last_skipped = step

    def await_newest(self, deadline: float) -> Saving | None:
        """Wait until the newest save is in every tier, and return it; says so if the very last one was skipped.

        Raises: what `Saving.wait` raises.
        """
        while (newest := self.newest()) is not None:
            try:
                for tier in self.tiers[1:]:
                    newest.wait(tier, timeout=max(0.0, deadline - time.monotonic()))
                break
            except ReplacedError:
                if not newest.skipped:
                    raise
                # Another rank has skipped it: the one before is the newest now.
        last = self._last_skipped
        if last is not None and (newest is None or newest.step < last):
            log.warning(
                "the last save, of step %d, was skipped: the newest snapshot is of step %s. Say when_busy='wait' for "
                "the last save of a run",
                last,
                newest.step if newest else "none",
            )
        return newest

    def urge(self, saving: Saving, tier: str) -> bool:
        """Somebody waits for it in `tier`; True when the agent should be told."""
        with self._condition:
            known = self._savings.get(saving.step) is saving or self._home in saving._tiers
            if not known or tier in saving._tiers:
                return False
            self._urged[saving] = tier
            return True

    def urged(self) -> list[tuple[Saving, str]]:
        with self._condition:
            return sorted(self._urged.items(), key=lambda item: item[0].step)

    def heard(self, event: m.FromAgent) -> None:
        """The agent says how a step fares."""
        with self._condition:
            match event:
                case m.Reached():
                    self._reached(event)
                case m.Failed():
                    self._failed(event)
                case m.Spoiled():
                    self._spoiled(event)
                case m.Awaiting():
                    if saving := self._saving_of(event):
                        saving._awaited = event.ranks
                        if not event.quiet:
                            log.warning("step %d: waiting for rank %s", event.step, ", ".join(map(str, event.ranks)))
                case m.Replaced():
                    if saving := self._saving_of(event):
                        self._replaced(saving, event.tier)
                case _:
                    log.warning("the agent said %s, which means nothing here", type(event).__name__)

    def dirty(self, saving: Saving, error: ZerostallError) -> None:
        """The capture of a step came to nothing. Told once more, where Ctrl-C came in between, it ends what is left."""
        with self._condition:
            if saving._lost:
                return
            self._failure, self._failure_tier = error, "host"
            self._take_off(saving)
            saving._failed("host", error)
            torn = isinstance(error, TornError)
            saving._lost = True  # after a call Ctrl-C may come: from here on there is none
            if torn:
                self._stats.dirty += 1
            else:
                self._stats.failed += 1

    def _take_off(self, saving: Saving) -> None:
        """It counts no longer: its step may be saved again."""
        self._urged.pop(saving, None)
        if self._savings.get(saving.step) is saving:
            if not saving._replaces:
                if self._knows(saving.step):
                    self._known.remove(saving.step)
                self._mark_frontier()
            del self._savings[saving.step]  # last: until then this is begun anew

    def _saving_of(self, event: m.Reached | m.Failed | m.Replaced | m.Spoiled | m.Awaiting) -> Saving | None:
        """The save that an event is about: None where it is of another of its number."""
        candidates = [self._savings.get(event.step), *self._urged]
        return next(
            (one for one in candidates if one is not None and (one.step, one.created) == (event.step, event.created)),
            None,
        )

    def _reached(self, event: m.Reached) -> None:
        saving = self._saving_of(event)
        if saving is None or event.tier in saving._tiers:
            return  # told again, after a connection broke, it makes nothing good that failed since
        saving._reached(event.tier)
        if event.tier in self.tiers[1:] and (self._failure_tier == "remote") == (event.tier == "remote"):
            self._failure = None  # newer and there: what failed before is made good
        if self._urged.get(saving) == event.tier:
            del self._urged[saving]
        if event.tier != self._home:
            return
        self.aside = ()
        newest = max(self._savings, default=-1)
        for old in [s for s, saving in self._savings.items() if s < newest and self._home in saving._tiers]:
            del self._savings[old]

    def _failed(self, event: m.Failed) -> None:
        error = m.rebuild_error(event.kind, event.message, hint=event.hint, errno=event.errno)
        log.error("step %d did not get to %s: %s", event.step, event.tier, error)
        self._stats.failed += 1
        self._failure, self._failure_tier = error, event.tier
        if saving := self._saving_of(event):
            self._urged.pop(saving, None)
            saving._failed(event.tier, error)

    def _spoiled(self, event: m.Spoiled) -> None:
        saving = self._saving_of(event)
        if saving is None:
            return
        if event.kind:
            error = m.rebuild_error(event.kind, f"step {event.step}: {event.reason}")
            log.error("%s", error)
            self.dirty(saving, error)
            return
        self._stats.spoiled += 1
        self._take_off(saving)
        if event.skipped:
            self._stats.skipped += 1
            self._last_skipped = event.step
            saving.skipped = f"rank {event.rank} skipped it: {event.reason}"
            saving._failed("host", ReplacedError(f"step {event.step}: {saving.skipped}", hint=_ALL_WAIT))
            return
        error = RankError(f"step {event.step} is not clean: rank {event.rank}: {event.reason}")
        log.error("%s", error)
        self._failure, self._failure_tier = error, "host"
        saving._failed("host", error)

    def _replaced(self, saving: Saving, tier: str) -> None:
        if self._urged.get(saving) == tier or tier not in saving._tiers:
            self._urged.pop(saving, None)
        if self._savings.get(saving.step) is saving and tier == self._home:
            del self._savings[saving.step]
        if tier not in saving._tiers:
            why = f"step {saving.step} was replaced by a newer one before it got to {tier}"
            saving._failed(tier, ReplacedError(why, hint="when_busy='wait' replaces nothing"))

    def forget(self) -> None:
        """Nobody tells of them any more: savings know who made them, and would keep it."""
        with self._condition:
            self._savings.clear()
            self._urged.clear()

    # ------------------------------------------------------------------------------------------- what went wrong

    def reported(self, error: ZerostallError) -> None:
        """The user has been told of this error."""
        with self._condition:
            if self._failure is error:
                self._failure = None

    def raise_unreported(self) -> None:
        """Raise the newest failure that nobody was told of."""
        with self._condition:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
