"""The thread that finishes what `save` began: awaits the copy, looks for tears, writes the record, tells the agent."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import manifest as manifests
from zerostall.core.layout import CHUNK
from zerostall.core.manifest import Record
from zerostall.core.tears import GRACE
from zerostall.errors import AgentError, GhostError, NonFiniteError, StateError, TornError, ZerostallError
from zerostall.trainer import interrupts
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.telemetry import Stats
    from zerostall.trainer.flight import Flight
    from zerostall.trainer.link import Link
    from zerostall.trainer.memory import Shelf
    from zerostall.trainer.world import World

_NAMED = 5
TOLD_SECONDS = 120.0


class Sealer:
    """One flight at a time, in order. `dirty` hears of each that came to nothing.

    From `begin` to `close` its thread sleeps until a capture is done and says so through `announce`: `save` itself
    wakes nobody, so that no thread competes with training for the interpreter while a step begins.

    Attributes:
        brought: how many flights it was given.
        landed: of how many of these the agent has been told.
    """

    def __init__(
        self,
        shelf: Shelf,
        link: Link,
        world: World,
        stats: Stats,
        dirty: Callable[[Flight, ZerostallError], None],
    ) -> None:
        self.announce = -1
        self._shelf = shelf
        self._link = link
        self._world = world
        self._stats = stats
        self._dirty = dirty
        self._flights: deque[Flight] = deque()
        self._spent: deque[Flight] = deque()
        self._told = threading.Condition()
        self.brought = 0
        self.landed = 0
        self._followers: list[tuple[int, m.Message]] = []  # what it is told after so many flights
        self._doubted: Flight | None = None  # sealed, but an operation may have been under way
        self._closing = False
        self._early = False
        self._thread = threading.Thread(target=self._run, name="zerostall seal", daemon=True)

    def begin(self) -> None:
        self.announce = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread.start()

    def seal(self, flight: Flight) -> None:
        """Finish a flight as soon as its capture, which announces its end here, is done."""
        self.brought += 1  # first: after a call, and not before it, Ctrl-C is raised
        self._flights.append(flight)
        if self._early:
            self._early = False
            os.eventfd_write(self.announce, 1)

    def seal_if_new(self, flight: Flight) -> None:
        """As `seal`, of a flight that may have been brought, and whose capture has not begun."""
        if flight not in self._flights:
            self.seal(flight)

    def bury(self, flight: Flight) -> None:
        """Nobody needs it any more: what it holds is let go of here, and not on the training thread."""
        self._spent.append(flight)

    def revoke(self, flight: Flight, late: list[str]) -> None:
        """A sealed image turned out to be torn: nobody may restore it.

        Where this is interrupted, what was not done is done when it is called once more.
        """
        with self._told:
            self._told.wait_for(lambda: flight.landed, TOLD_SECONDS)
        error = _torn(flight.step, late)
        self._dirty(flight, error)
        revoked = m.Revoked(step=flight.step, created=flight.saving.created, reason=str(error.args[0]))
        self._shelf.revoked(revoked)
        self._link.tell(revoked, timeout=10.0)  # and once more to each agent that takes over
        flight.tears.told()

    def tell_after(self, message: m.Message, timeout: float) -> None:
        """Tell the agent, once it has heard of every flight until now: it takes a rank at its newest word."""
        with self._told:
            if self.landed < self.brought:
                self._followers.append((self.brought, message))
                return
        self._link.tell(message, timeout=timeout)

    def let_go(self) -> None:
        """See `interrupts.let_go`."""
        interrupts.let_go(self._told)

    def settle(self, timeout: float = TOLD_SECONDS) -> None:
        """Wait until the agent has been told of every flight.

        Raises:
            AgentError: there has been no agent to tell for `timeout` seconds.
        """
        last = self.brought
        if self.landed >= last:
            return
        with self._told:
            told = self.landed >= last or self._told.wait_for(lambda: self.landed >= last, timeout)
        if not told:
            raise AgentError(
                f"for {timeout:.0f} s there has been no agent to hand the last snapshot to",
                hint="see why none starts: `zerostall agent start`",
            )

    def close(self) -> None:
        self._closing = True
        if self.announce < 0:
            return
        os.eventfd_write(self.announce, 1)
        if interrupts.ended(self._thread, 5.0):
            os.close(self.announce)
            self._flights.clear()
            self._spent.clear()
            self._doubted = None

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # so that waking up never pushes training off its core
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
        announced = select.poll()
        announced.register(self.announce, select.POLLIN)
        while not self._closing:
            if not announced.poll(1000 * GRACE if self._doubted is not None else None):
                self._look_again()
                continue
            os.eventfd_read(self.announce)
            self._spent.clear()
            if not self._finish_done() and not self._flights:
                # The capture ended before its flight was here. Whoever brings it sees this, or is seen now.
                self._early = True
                self._finish_done()

    def _finish_done(self) -> bool:
        found = False
        while self._flights and self._flights[0].taken.capture.done():
            self._finish(self._flights.popleft())
            found = True
        return found

    def _finish(self, flight: Flight) -> None:
        try:
            try:
                flight.taken.capture.wait(None)
                if flight.taken.proof is not None:
                    flight.taken.proof.verdict()
                torn = flight.tears.found()
                ghosts = flight.taken.ghosts()
            finally:
                flight.taken.memory.say(busy=False)
                flight.taken.sources.let_go()
            self._stats.record_drain(flight.taken.capture.drain_seconds)
            self._stats.bytes_captured += flight.taken.layout.nbytes
            if flight.taken.broken:
                raise StateError(f"step {flight.step}: the step of an optimizer that kept some of it was interrupted")
            if torn:
                raise _torn(flight.step, torn)
            if ghosts:
                raise _ghostly(flight.step, ghosts)
            if numbers := flight.taken.not_finite():
                raise _not_finite(flight.step, numbers)
            record = manifests.encode_record(self._record(flight))
        except Exception as error:  # noqa: BLE001 - the slot must come back, and the user must hear
            ours = error if isinstance(error, ZerostallError) else StateError(f"step {flight.step}: {error!r}")
            slot = flight.taken.slot
            grant = self._shelf.discarded(slot)
            self._dirty(flight, ours)
            name, reason = flight.name, str(ours.args[0])
            self._link.tell(m.Discarded(slot, name.step, reason, grant, epoch=name.epoch, turn=name.turn))
        else:
            stowed = flight.taken.stowed
            sealed = m.Sealed(
                slot=flight.taken.slot,
                record=record,
                epoch=flight.name.epoch,
                turn=flight.name.turn,
                replace=flight.wish.replace,
                pin=flight.wish.pin,
                aside=flight.wish.aside,
                stowed=stowed,
            )
            if stowed is None:
                sealed = self._shelf.sealed(flight.step, sealed)
            else:
                self._stats.stowed += 1
                sealed = self._shelf.stowed(flight.step, flight.saving.created, sealed)
            news = {"stalls": self._stats.take_stalls(), "fallbacks": m.Fallback.all()}
            self._link.tell(msgspec.structs.replace(sealed, **news))
            self._doubted = None if flight.tears.final else flight
        finally:
            flight.taken.let_go_of_values()
            with self._told:
                flight.landed = True
                self.landed += 1
                followers = [message for number, message in self._followers if number == self.landed]
                self._followers = [one for one in self._followers if one[0] != self.landed]
                self._told.notify_all()
            for message in followers:
                self._link.tell(message, timeout=1.0)

    def _look_again(self) -> None:
        flight = self._doubted
        if flight is None or not flight.tears.look_again():
            return
        self._doubted = None
        if late := flight.tears.late:
            self.revoke(flight, late)

    def _record(self, flight: Flight) -> Record:
        layout = flight.taken.layout
        # What a vault has still to bring is checked there.
        chunks = -(-layout.nbytes // CHUNK)
        return Record.of(
            layout,
            [0] * chunks if flight.taken.stowed is not None else flight.taken.capture.checksums,
            flight.taken.values.encode(),
            run=self._link.welcome.run_id,
            step=flight.step,
            rank=self._world.rank,
            world=self._world.size,
            metric=flight.wish.metric,
            created=flight.saving.created,
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _not_finite(step: int, names: list[str]) -> NonFiniteError:
    return NonFiniteError(
        f"step {step}: NaN or infinity in {_listed(names)}",
        hint="restore() goes back to the step before; nothing was evicted for this one",
    )


def _ghostly(step: int, names: list[str]) -> GhostError:
    return GhostError(f"step {step}: other bytes arrived than the device held at save: {_listed(names)}")


def _torn(step: int, names: list[str]) -> TornError:
    return TornError(
        f"step {step}: changed while they were captured: {_listed(names)}",
        hint="wrap what changes them in `with ckpt.guard():`, or pass their optimizer to the Checkpointer",
    )
