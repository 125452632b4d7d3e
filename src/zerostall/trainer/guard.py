"""What keeps an optimizer from changing what is still being read."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling

from zerostall.core.reading import Flipping
from zerostall.native import FORKS
from zerostall.telemetry import say_once
from zerostall.trainer import storages
from zerostall.trainer.sealer import TOLD_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch.utils.hooks import RemovableHandle

    from zerostall.core.reading import Claim, Placed
    from zerostall.telemetry import Stats
    from zerostall.trainer.flight import Flight
    from zerostall.trainer.policies import Policies
    from zerostall.trainer.sealer import Sealer
    from zerostall.trainer.taken import Taken


class Guard:
    """Watches one snapshot at a time; a training thread drives it.

    Before every step of the given optimizers, from `begin` to `remove`, nothing is left to be read; an optimizer that
    flips asks for itself, and goes on sooner. So does, on any thread, what exchanges memory in place (`storages`). They
    hold only weak references, so that a forgotten checkpointer can be collected.

    Attributes:
        flight: the snapshot that is watched.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        policies: Policies,
        stats: Stats,
        sealer: Sealer,
    ) -> None:
        self._policies = policies
        self._stats = stats
        self._sealer = sealer
        self._forks = FORKS[0]
        self.flight: Flight | None = None
        self._claim: _Claim | None = None  # the last one
        self._optimizers = tuple(optimizers)
        self._handles: list[RemovableHandle] = []
        self._flipping: list[Flipping] = []

    def begin(self) -> None:
        me = weakref.ref(self)

        def protect() -> None:
            if (guard := me()) is not None:
                guard.protect()

        # A step that is compiled is traced with its hooks: this one reads clocks and addresses of now. As torch's own
        # methods do it, and not by torch.compiler.disable, which imports the compiler here and now: a second or two.
        apart = cast("Callable[[], None]", _disable_dynamo(protect))

        def before_step(*_: object) -> None:
            if is_dynamo_compiling():
                apart()
            elif (guard := me()) is not None and guard.flight is not None:
                guard.protect()

        for optimizer in self._optimizers:
            if not (self._policies.offers_flips and self._flips(optimizer)):
                self._handles.append(optimizer.register_step_pre_hook(before_step))
        self._optimizers = ()
        self._policies.flips = bool(self._flipping)
        storages.ask(self)

    def _flips(self, optimizer: torch.optim.Optimizer) -> bool:
        kind = type(optimizer)
        reason = "it cannot; zerostall.optim has some that can"
        if isinstance(optimizer, Flipping):
            reason = optimizer.flip_for(_Reader(self), self._policies.most_bytes)
            if reason is None:
                self._flipping.append(optimizer)
                return True
        if self._policies.asked == "flip":
            name = f"{kind.__module__}.{kind.__qualname__}"
            say_once(
                f"no-flip {name} {reason}",
                "policy 'flip': %s does not (%s); what of it is not read yet is put aside or waited for",
                name,
                reason,
            )
        return False

    def remove(self, *, training: bool = True) -> None:
        """Guard nothing any more. Another thread than training's leaves the hooks: a step may go through them just now.

        They do nothing when this is no more.
        """
        storages.forget(self)
        if not training:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for optimizer in self._flipping:
            optimizer.flip_for(None, 0)
        self._flipping = []

    def watch(self, flight: Flight) -> None:
        """From now on until the next guard this snapshot is being read."""
        if self.flight is not None:
            self._sealer.bury(self.flight)
        self.flight = flight

    def protect(self) -> None:
        """Nothing that `save` still has to read may change before this returns."""
        flight = self.flight
        if flight is None or self._forks != FORKS[0]:
            return  # in a forked child nothing is saved
        self._end_claim()
        if flight.taken.proof is None and flight.taken.capture.done():
            self._pass(flight)
        else:
            self._let_go(flight, (), ())

    def _pass(self, flight: Flight) -> None:
        """All has been read; what is left is to look for tears. Short as `save` is, for it too finds its code cold."""
        start = time.perf_counter()
        try:
            late = flight.tears.look()
        except Exception:
            self.flight = None
            raise
        self._stats.record_guard(time.perf_counter() - start, start - flight.begun)
        self._see_off(flight, late)

    def _see_off(self, flight: Flight, late: list[str]) -> None:
        """It is watched no more, once its tears are told: where Ctrl-C comes before that, the next guard tells them."""
        if late:
            self._sealer.revoke(flight, late)
        self.flight = None
        self._sealer.bury(flight)

    def settle(self, timeout: float = TOLD_SECONDS) -> None:
        """Wait until no snapshot is being captured, and the agent has been told of the last one."""
        self._end_claim()
        if self.flight is not None:
            self.protect()
        if self._sealer.landed < self._sealer.brought:
            self._sealer.settle(min(timeout, TOLD_SECONDS))

    def hurry(self) -> None:
        """Somebody waits for the snapshot: it is begun to be read now, where it was not. Any thread."""
        if (flight := self.flight) is not None and self._forks == FORKS[0]:
            flight.taken.capture.hurry()

    def look_back(self) -> None:
        """A snapshot that is captured is looked at for the last time: the next guard need not see it again."""
        if self.flight is not None and self.flight.taken.capture.done():
            self.protect()

    def busy(self) -> bool:
        """See `storages.Reader`."""
        return self.flight is not None and self._forks == FORKS[0]

    def let_exchange(self, storage: torch.UntypedStorage) -> None:
        """See `storages.Reader`.

        On the thread that saves it is a guard. Any other has other streams, and leaves the guard to training.
        """
        flight = self.flight
        if flight is None or not flight.taken.reads(storage):
            return
        if threading.get_ident() == flight.thread:
            self.protect()
            return
        with contextlib.suppress(Exception):  # a capture that failed reads no more; its sealer says why
            flight.taken.capture.wait(None)
        flight.tears.found()  # while the memory is still what was read

    def pending(self) -> Mapping[tuple[int, int], int] | None:
        """See `zerostall.core.reading.Reader`."""
        self._end_claim()
        self.look_back()
        if self.flight is None or self._forks != FORKS[0]:
            return None
        if self._policies.choice.policy != "flip":
            return {}
        taken = self.flight.taken
        addresses, entries = taken.sources.pointers, taken.layout.entries
        return {(addresses[index], entries[index].nbytes): index for index in taken.capture.pending}

    def claim(self, left: Sequence[Placed], kept: Sequence[Placed]) -> Claim:
        """See `zerostall.core.reading.Reader`."""
        assert self.flight is not None
        self._claim = claim = _Claim(self.flight.taken)
        self._let_go(self.flight, left, kept)
        return claim

    def _end_claim(self) -> None:
        """The step that made the last claim is over: if Ctrl-C kept it from releasing that, its snapshot is lost.

        What it has kept may never have got to where it was to lie.
        """
        claim, self._claim = self._claim, None
        if claim is not None and not claim.released and self._forks == FORKS[0]:
            claim.taken.broken = True
            claim.release()

    def _let_go(self, flight: Flight, left: Sequence[Placed], kept: Sequence[Placed]) -> None:
        free = time.perf_counter() - flight.begun
        entries = flight.taken.layout.entries
        spared = sum(entries[place].nbytes for place, _ in (*left, *kept))
        try:
            seconds, late = flight.protect(self._policies.freeze_bytes(spared), left, kept)
        except Exception:
            self.flight = None  # only now: other threads that exchange memory look for it
            raise
        self._stats.record_guard(seconds, free)
        self._see_off(flight, late)


@dataclass(slots=True, eq=False)
class _Claim:
    taken: Taken
    released: bool = False

    def release(self) -> None:
        self.taken.capture.release(streams=self.taken.devices.now())
        self.released = True  # last: once more does no harm

    def over(self) -> bool:
        return self.taken.capture.done()


class _Reader:
    """A guard as an optimizer knows it, which must not keep it alive."""

    def __init__(self, guard: Guard) -> None:
        self._guard = weakref.ref(guard)

    def pending(self) -> Mapping[tuple[int, int], int] | None:
        guard = self._guard()
        return guard.pending() if guard is not None else None

    def claim(self, left: Sequence[Placed], kept: Sequence[Placed]) -> Claim:
        guard = self._guard()
        assert guard is not None  # it has just been asked what is pending
        return guard.claim(left, kept)
