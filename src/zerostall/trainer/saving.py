"""What `save` returns: one snapshot on its way through the tiers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

import msgspec

from zerostall.errors import ReplacedError, WaitTimeoutError, ZerostallError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Desk:
    """Where the savings of one checkpointer ask, and are told.

    Attributes:
        condition: guards all of them; notified when one has got somewhere.
        tiers: those there are, nearest first.
        urge: somebody waits for a saving in a tier, for so long.
        hurry: somebody waits for the newest to be captured.
        seen: the thread that saves has come by.
        reported: the user has been told of an error.
        free: locks that Ctrl-C has left with this thread are free; those who tell would wait for them.
    """

    condition: threading.Condition
    tiers: tuple[str, ...] = ("host", "disk")
    urge: Callable[[Saving, str, float | None], None] = lambda saving, tier, timeout: None
    hurry: Callable[[], None] = lambda: None
    seen: Callable[[], None] = lambda: None
    reported: Callable[[ZerostallError], None] = lambda error: None
    free: Callable[[], None] = lambda: None


class Saving(msgspec.Struct, eq=False, weakref=True):
    """The progress of one save.

    Attributes:
        step: the step that was given to `save`.
        created: seconds since 1970, when `save` was called; tells this save from others of its number.
        skipped: why the save was skipped, or "" when it was accepted. Falsy when accepted; with many ranks it may turn
            out later that another one has skipped the step.
    """

    step: int
    _desk: Desk
    created: float = 0.0
    skipped: str = ""
    _replaces: bool = False  # the ledger's: was there one of this number before?
    _lost: bool = False  # likewise: its capture came to nothing, and that was seen to
    _tiers: frozenset[str] = frozenset()
    _errors: dict[str, ZerostallError] = {}  # never changed, but replaced
    _awaited: tuple[int, ...] = ()  # ranks of which the agent has heard nothing of this save

    @property
    def tiers(self) -> frozenset[str]:
        """Tiers in which this step is clean by now: "host", "disk", "remote"."""
        return self._tiers

    def wait(self, tier: str = "disk", timeout: float | None = None) -> None:
        """Wait until this step is clean in `tier`, and ask for it to be carried there before anything newer.

        Args:
            tier: "host" (outlives the trainer), "disk" (outlives the machine's power) or "remote" (outlives the
                machine, where the run has a remote tier).
            timeout: seconds; None waits for as long as it takes.

        Raises:
            WaitTimeoutError: not there in time; it may still get there.
            ReplacedError: a newer snapshot took its place first, or the save was skipped.
            TornError: a tensor changed while it was captured.
            StorageError: the disk or the store refused; the agent goes on trying with the newest snapshot.
        """
        tiers = self._desk.tiers
        if tier not in tiers:
            raise ValueError(f"no tier {tier!r}: this run has {', '.join(map(repr, tiers))}")
        if timeout is not None and not isinstance(timeout, Real):
            raise TypeError(f"timeout={timeout!r} is not a number of seconds")
        if self.skipped:
            raise ReplacedError(f"step {self.step} was skipped: {self.skipped}", hint="look at Saving.skipped")
        start = time.monotonic()
        self._desk.free()
        self._desk.hurry()
        if tier != "host":
            self._desk.urge(self, tier, timeout)
        try:
            self._await(tier, None if timeout is None else timeout - (time.monotonic() - start))
        finally:
            self._desk.seen()
        self._await(tier, 0.0)  # what was only seen now is raised now

    def _await(self, tier: str, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._desk.condition:
            while tier not in self._tiers or tier in self._errors:
                error = self._errors.get(tier)
                if error is not None:
                    self._desk.reported(error)
                    raise error
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise self._late(tier)
                self._desk.condition.wait(left)

    def _late(self, tier: str) -> WaitTimeoutError:
        what = f"step {self.step} did not reach the tier {tier!r} in time"
        if not self._awaited or self._tiers:
            return WaitTimeoutError(what)
        ranks = ", ".join(map(str, self._awaited))
        return WaitTimeoutError(
            f"{what}: nothing has been heard of it from rank {ranks}",
            hint="they are slow, hang, or do not save this step: every rank saves the same ones",
        )

    def __repr__(self) -> str:
        fate = f"skipped: {self.skipped}" if self.skipped else f"tiers: {', '.join(sorted(self.tiers)) or 'none yet'}"
        wrong = dict.fromkeys(f"; {type(error).__name__}: {error.args[0]}" for error in self._errors.values())
        return f"<Saving step {self.step}, {fate}{''.join(wrong)}>"

    # What the checkpointer tells; the caller holds the condition.

    def _reached(self, tier: str) -> None:
        self._tiers |= {tier}
        if (error := self._errors.get(tier)) is not None:
            # Further on it failed only because it had not got here.
            self._errors = {name: other for name, other in self._errors.items() if other is not error}
        self._desk.condition.notify_all()

    def _failed(self, tier: str, error: ZerostallError) -> None:
        """The step will not reach `tier` (unless the agent, which goes on trying, says later that it has)."""
        further = self._desk.tiers[self._desk.tiers.index(tier) :]
        self._errors = self._errors | dict.fromkeys(further, error)
        self._tiers -= set(further)
        self._desk.condition.notify_all()
