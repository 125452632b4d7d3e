"""The course of a save on the training thread: admitted, taken, handed to those who finish it in the background.

A training step leaves nothing of all this in the caches, and a line of memory that must be fetched costs more than
what is done with it: so what `save` touches is little, each function of Python's a dozen lines of it, and what can be
done later is done by the sealer.
"""

from __future__ import annotations

import contextlib
from functools import partial
from threading import Lock, get_ident
from time import perf_counter
from typing import TYPE_CHECKING, get_args

from zerostall.config import WhenBusy
from zerostall.core.roll import Save
from zerostall.core.steps import MAX_STEP, step_number
from zerostall.errors import AgentError, ZerostallError
from zerostall.telemetry import log
from zerostall.trainer import interrupts
from zerostall.trainer.captures import Captures
from zerostall.trainer.flight import Flight, Wish
from zerostall.trainer.guard import Guard
from zerostall.trainer.options import metric_number, one_of
from zerostall.trainer.policies import Policies
from zerostall.trainer.saving import Desk, Saving
from zerostall.trainer.sealer import TOLD_SECONDS, Sealer
from zerostall.trainer.source_checks import SourceChecks
from zerostall.trainer.tears import Tears
from zerostall.wire import messages as m

if TYPE_CHECKING:
    import threading

    from zerostall.config import IfExists
    from zerostall.telemetry import Stats
    from zerostall.trainer.devices import Devices
    from zerostall.trainer.ledger import Ledger
    from zerostall.trainer.link import Link
    from zerostall.trainer.lockers import Lockers
    from zerostall.trainer.mappings import Mappings
    from zerostall.trainer.memory import Shelf
    from zerostall.trainer.options import Options
    from zerostall.trainer.pace import Pace
    from zerostall.trainer.state import State
    from zerostall.trainer.world import World

_TELL_SECONDS = 1.0
_NO_SLOT = "no slot is free: an older snapshot is still on its way"
_NONE_SPECIAL = Wish(None, pin=False, replace=False, aside=())


class Saves:
    """Driven by the training thread, but for what the sealer says and a saving asks.

    Attributes:
        guard: what keeps optimizers from changing what is still being read.
    """

    def __init__(
        self,
        state: State,
        options: Options,
        world: World,
        link: Link,
        mappings: Mappings,
        shelf: Shelf,
        ledger: Ledger,
        pace: Pace,
        stats: Stats,
        condition: threading.Condition,
        lockers: Lockers,
    ) -> None:
        self._options = options
        self._world = world
        self._link = link
        self._ledger = ledger
        self._pace = pace
        self._stats = stats
        self._looking = Lock()
        # What these call knows the ledger, the sealer and the guard, but not this: a circle would keep the model's
        # memory until the garbage collector comes by.
        self._sealer = sealer = Sealer(shelf, link, world, stats, partial(_dirty, ledger))
        policies = Policies(options.policy, options.freeze_bytes, stats)
        self.guard = Guard(state.optimizers, policies, stats, sealer)
        self._captures = Captures(
            state,
            options,
            policies,
            SourceChecks(options.source_checks, stats),
            link,
            mappings,
            shelf,
            condition,
            self.guard,
            sealer,
            lockers,
            alone=world.size == 1,
        )
        urge = partial(_urge, ledger, sealer, link)
        free = partial(_free, condition, sealer)
        self._desk = Desk(condition, ledger.tiers, urge, self.guard.hurry, self.guard.look_back, ledger.reported, free)

    def begin(self) -> None:
        """Hook the optimizers and start what seals: `end` and the guard's `remove` may follow wherever this ends."""
        self.guard.begin()
        self._sealer.begin()

    @property
    def devices(self) -> Devices:
        return self._captures.devices

    def save(
        self, step: int, metric: float | None, pin: bool, if_exists: IfExists, when_busy: WhenBusy | None
    ) -> Saving:
        """See `Checkpointer.save`."""
        start = perf_counter()
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            step = step_number(step)
        if metric is not None and type(metric) is not float:
            metric = metric_number(metric)  # now: later it would cost the snapshot
        if when_busy is not None:
            one_of("when_busy", when_busy, get_args(WhenBusy))
        ledger = self._ledger
        replace = False
        if step <= ledger.frontier or if_exists != "error":
            admitted = ledger.admit(step, if_exists)
            if admitted is None:
                return Saving(step, self._desk, skipped=f"step {step} is there already")
            replace = admitted
        name = self._pace.next(step)
        if self._pace.leave is not None and self._pace.last(step):
            when_busy = "wait"  # there will be no other
        when_busy = when_busy or self._options.when_busy
        taken, busy, skipped = None, self._pace.held(name) if self._world.size > 1 else "", True
        try:
            if not busy or when_busy == "wait":
                taken, busy = self._captures.take_at_rest() or self._captures.take(when_busy), _NO_SLOT
        except AgentError as error:
            busy, skipped = str(error.args[0]), False
            log.error("step %d is not saved: %s", step, error)
        except BaseException as error:
            self.go_by(name, repr(error))
            raise
        if taken is None:
            return self._go_without(name, start, busy, skipped=skipped)
        saving = Saving(step, self._desk)
        plain = metric is None and not pin and not replace and not ledger.aside
        wish = _NONE_SPECIAL if plain else Wish(metric, bool(pin), replace, ledger.aside)
        thread = get_ident()
        flight = Flight(name, taken, saving, wish, start, thread, Tears(taken.changed, thread, self._looking))
        try:
            self._captures.begun = None  # from here on it is the sealer's
            ledger.accept(saving)
            self.guard.watch(flight)
            self._sealer.seal(flight)
        except BaseException:  # Ctrl-C, say: the snapshot goes its way all the same, so that its slot comes back
            self._sealer.seal_if_new(flight)
            raise
        finally:
            taken.capture.start()  # soon, and waking nobody
        self._stats.saves += 1
        self._stats.record_call(perf_counter() - start)
        return saving

    def _go_without(self, name: Save, start: float, busy: str, *, skipped: bool) -> Saving:
        """There is no image: the other ranks are told."""
        self._ledger.skipped(name.step)
        self.go_by(name, busy, skipped=skipped)
        self._stats.skipped += 1
        self._stats.record_call(perf_counter() - start)
        return Saving(name.step, self._desk, skipped=busy)

    def go_by(self, name: Save, reason: str, *, skipped: bool = False) -> None:
        """Tell the other ranks that this one goes on without a save, if they can be told at once."""
        if self._world.size > 1 and self._link.up():
            passed = m.Passed(step=name.step, epoch=name.epoch, turn=name.turn, reason=reason, skipped=skipped)
            self._sealer.tell_after(passed, _TELL_SECONDS)

    def go_late(self, step: int) -> None:
        """This rank has heard too late that all were to save that step."""
        self.go_by(Save(self._pace.epoch, step), "it heard too late that the step was to be saved")

    def propose(self, *, leave: bool = False) -> None:
        """Have all ranks save a step that is a little ahead."""
        plan = m.Plan(epoch=self._pace.epoch, step=self._pace.ahead(), leave=leave)
        if self._world.size == 1:
            self._pace.agreed(plan.epoch, plan.step, leave=leave)
        else:
            self._link.tell(plan, timeout=None if leave else _TELL_SECONDS)

    def await_capture(self) -> None:
        """Wait, on another thread than training's, until nothing is being read any more: the guard is training's."""
        if (flight := self.guard.flight) is not None:
            with contextlib.suppress(Exception):  # its sealer says why
                flight.taken.capture.wait(None)

    def mend(self) -> None:
        """See `Captures.mend`."""
        self._captures.mend()

    def let_go(self) -> None:
        """Locks that Ctrl-C has left with this thread are free. Any thread."""
        self._desk.free()

    def settle(self, timeout: float = TOLD_SECONDS) -> None:
        """Wait until no snapshot is being captured, and the agent has been told of the last one."""
        self.guard.settle(timeout)

    def end(self) -> None:
        """End the sealer's thread; the agent may still be told of what it has sealed."""
        self._sealer.close()

    def close(self) -> None:
        """Let go of devices and threads."""
        self._captures.close()


# ----------------------------------------------------------------------------- what captures and the sealer say, and a
# saving asks


def _dirty(ledger: Ledger, flight: Flight, error: ZerostallError) -> None:
    log.error("step %d is dirty and was thrown away: %s", flight.step, error)
    ledger.dirty(flight.saving, error)


def _free(condition: threading.Condition, sealer: Sealer) -> None:
    interrupts.let_go(condition)
    sealer.let_go()


def _urge(ledger: Ledger, sealer: Sealer, link: Link, saving: Saving, tier: str, timeout: float | None) -> None:
    if not ledger.urge(saving, tier):
        return
    patience = TOLD_SECONDS if timeout is None else min(timeout, TOLD_SECONDS)
    try:
        sealer.settle(patience)
    except AgentError:
        if timeout is None:
            raise
    else:
        promise = m.Promise(step=saving.step, created=saving.created, tier=tier)
        link.tell(promise, timeout=min(patience, 10.0))
