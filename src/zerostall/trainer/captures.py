"""Taking images of the state: which tensors, where they are now, into which slot."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerostall import config, native
from zerostall.core import layout as layouts
from zerostall.core.copiers import choose_checking
from zerostall.core.layout import CHUNK, Layout
from zerostall.errors import AgentError, WaitTimeoutError
from zerostall.telemetry import log
from zerostall.trainer import interrupts
from zerostall.trainer.devices import Devices, Straightened
from zerostall.trainer.finite import FiniteCheck
from zerostall.trainer.memory import Memory, Shelf
from zerostall.trainer.state import OutdatedError, Rest, State, Survey
from zerostall.trainer.taken import Taken
from zerostall.wire import messages as m
from zerostall.wire.notice import Notice

if TYPE_CHECKING:
    import threading

    from zerostall.config import WhenBusy
    from zerostall.trainer.guard import Guard
    from zerostall.trainer.link import Link
    from zerostall.trainer.lockers import Lockers
    from zerostall.trainer.mappings import Mappings
    from zerostall.trainer.options import Options
    from zerostall.trainer.policies import Policies
    from zerostall.trainer.sealer import Sealer
    from zerostall.trainer.source_checks import SourceChecks

_BUSY_SECONDS = 480.0  # less than the ten minutes that other ranks wait for this one in a collective of NCCL's
_SAID_SECONDS = 30.0
_LEASE_SECONDS = 120.0
_NO_AGENT_SECONDS = 60.0
_GONE = "the agent has gone, and the memory that it lent with it"
STRETCH = 4 * CHUNK
_OnDevices = tuple[Sequence[tuple[native.Device, int]], bool, tuple[int, int]]
_ON_NONE: _OnDevices = ((), False, (0, 0))
_ALL = 2**64 - 1
"""Where a guard only waits, a device is given all chunks at once."""


class Captures:
    """Driven by the training thread.

    The survey of the state is kept while it fits; pointers, shapes and version counters are read afresh every time.
    The image before is captured first (`guard.settle`): its sources are read again only then. A capture that is done
    announces it to the sealer. `alone`: no other rank holds what a pattern may be meant for.

    Attributes:
        begun: the capture that was begun last and that nobody sees to yet: no flight has been made of it.
    """

    def __init__(
        self,
        state: State,
        options: Options,
        policies: Policies,
        checks: SourceChecks,
        link: Link,
        mappings: Mappings,
        shelf: Shelf,
        condition: threading.Condition,
        guard: Guard,
        sealer: Sealer,
        lockers: Lockers,
        *,
        alone: bool = True,
    ) -> None:
        self.pool = native.Pool("copy", options.copy_threads)
        self.devices = Devices()
        self.begun: native.Capture | None = None
        self._state = state
        self._options = options
        self._policies = policies
        self._checks = checks
        self._link = link
        self._mappings = mappings
        self._shelf = shelf
        self._condition = condition
        self._guard = guard
        self._sealer = sealer
        self._lockers = lockers
        self._runs: tuple[tuple[int, int], ...] = ()
        self._alone = alone
        self._on_devices = False
        self._no_agent_until = 0.0
        self._survey: Survey | None = None
        self._sources: native.Tensors | None = None
        self._straightened = Straightened(())
        self._at_once = native.Pieces(())
        self._plan: native.Plan | None = None
        self._order: native.CaptureOrder | None = None  # what captures have in common that need nothing else
        self._coarse_plan: native.Plan | None = None
        self._finite: FiniteCheck | None = None
        self._rest: Rest | None = None  # of the state, by what was read of it at the save before

    def take(self, when_busy: WhenBusy) -> Taken | None:
        """Begin to capture the state as it is now; None when no slot is free and the caller does not wait.

        When this returns, everything that the guard does not protect has been copied.

        Raises:
            AgentError: there is no agent to borrow memory from.
            CapacityError: its budget is too small.
        """
        taken = None
        try:
            taken = self._take(when_busy)
        finally:
            if taken is None and self._survey is not None and self._survey.proof is not None:
                self._survey.proof.await_read()  # there is nothing for the guard to watch
        return taken

    def take_at_rest(self) -> Taken | None:
        """As `take`, of a state of which nothing but tensors has changed; None where that may be otherwise.

        Nearly every save of a run is one of these, and each function of Python's costs it a microsecond.
        """
        rest, self._rest = self._rest, None
        if rest is None:
            return None
        shelf, survey, sources, order = self._shelf, rest.survey, self._sources, self._order
        memory = shelf.memory
        if rest.reads != self._state.reads or memory is None or memory.layout is not survey.layout:
            return None
        if order is None or sources is None or self._lockers.wanted or (slot := shelf.take()) is None:
            return None
        try:
            if self._guard.flight is not None or self._sealer.landed < self._sealer.brought:
                self._guard.settle()
            if self._policies.asked == "auto":
                self._judge(survey, sources)
            values = rest.values if rest.complete else rest.values.again()
            streams, forecast, sampling = self._on_devices_now() if self._on_devices else _ON_NONE
            image = memory.begin + slot * memory.stride
            self.begun = capture = order.begin_at_rest(rest.still, image, memory.busy_at, streams, forecast, sampling)
        except BaseException:
            self._put_back(slot)
            raise
        if capture is None:
            shelf.put_back(slot)
            return None
        self._rest = rest
        return Taken(slot, survey.layout, capture, sources, values, self.devices, memory, self._finite, self._checks)

    def _take(self, when_busy: WhenBusy) -> Taken | None:
        survey = self._survey
        if survey is None or not self._state.fits(survey):
            survey = self._survey_anew()
        if survey.proof is not None and survey.proof.error is not None:
            raise survey.proof.error
        memory = self._shelf.memory
        if memory is None or memory.layout is not survey.layout or self._lockers.wanted:
            self._have_memory(survey.layout)
        while (slot := self._take_slot(when_busy)) is not None:
            try:
                self._guard.settle()  # the image before has been captured; here its tears are looked for the last time
                taken = self._begin(survey, slot)
            except (_Changed, OutdatedError):
                self._put_back(slot)
                survey = self._survey_anew()
                self._have_memory(survey.layout)
            except BaseException:
                self._put_back(slot)
                raise
            else:
                if survey.proof is not None and not survey.proof.settled:
                    taken.proof, self._rest = survey.proof, None
                return taken
        return None

    def mend(self) -> None:
        """After Ctrl-C: locks that this thread still holds, and a slot that it took for nothing, are given back."""
        interrupts.let_go(self._condition)
        self._sealer.let_go()
        if self._sealer.landed >= self._sealer.brought:
            self._give_up()
            self._shelf.take_back()

    def _put_back(self, slot: int) -> None:
        self._give_up()
        self._shelf.put_back(slot)

    def _give_up(self) -> None:
        if self.begun is not None:
            interrupts.give_up(self.begun)
            self.begun = None

    def close(self) -> None:
        self.devices.close()
        self.pool.close()

    def _begin(self, survey: Survey, slot: int) -> Taken:
        memory, sources, order = self._shelf.memory, self._sources, self._order
        if memory is None:  # since the slot was taken
            raise AgentError(_GONE)
        assert sources is not None
        self._judge(survey, sources)
        if order is None or self._lockers.wanted:
            return self._begin_otherwise(survey, slot, memory, sources)
        values = self._state.values(survey)
        streams, forecast, sampling = self._on_devices_now() if self._on_devices else _ON_NONE
        image = memory.begin + slot * memory.stride
        self.begun = capture = order.begin(image, memory.busy_at, streams, forecast, sampling)
        if capture is None:
            raise _Changed
        self._rest = self._state.rest(survey, values)
        return Taken(slot, survey.layout, capture, sources, values, self.devices, memory, self._finite, self._checks)

    def _judge(self, survey: Survey, sources: native.Tensors) -> None:
        policies = self._policies
        if policies.asked == "auto" and policies.judge(survey.layout.nbytes) and self._on_devices:
            self.devices.see(sources.devices, reserve=policies.reserve_bytes())

    def _on_devices_now(self) -> _OnDevices:
        """What a capture is told of them: streams of now, whether to forecast, which chunks to look at."""
        return self.devices.now(), self._policies.redirects, self._checks.next()

    def _begin_otherwise(self, survey: Survey, slot: int, memory: Memory, sources: native.Tensors) -> Taken:
        """Where strided tensors are made contiguous first, or the image goes to a peer's memory."""
        plan = self._plan
        assert plan is not None
        straightened, policies, devices = self._straightened, self._policies, self.devices
        if sources.refresh() or (straightened.indexes and not straightened.fits()):
            raise _Changed
        values = self._state.values(survey)
        if straightened.indexes:
            straightened.fill()
        peer = self._lockers.open(*self._shelf.place) if self._lockers.wanted else None
        self.begun = capture = native.Capture(
            self.pool,
            plan if peer is None else self._coarse(survey.layout),
            sources,
            memory.address(slot),
            at_once=self._at_once,
            announce=self._sealer.announce,
            streams=devices.now() if self._on_devices else (),
            ahead=None if policies.redirects else _ALL,
            held=True,
            sampling=self._checks.next() if self._on_devices else (0, 0),
            peer=0 if peer is None else peer.address,
        )
        memory.say(busy=True)
        taken = Taken(slot, survey.layout, capture, sources, values, devices, memory, self._finite, self._checks)
        if peer is not None:
            self._runs = self._runs or tuple(capture.on_devices)
            taken.stowed, taken.peer = m.Stowed(*self._shelf.place, self._runs), peer.memory
        return taken

    def _coarse(self, layout: Layout) -> native.Plan:
        """For a peer's memory: a copy engine that reaches it is through with a usual chunk before the next begins."""
        if self._coarse_plan is None:
            self._coarse_plan = plan_of(layout, STRETCH)
        return self._coarse_plan

    def _survey_anew(self) -> Survey:
        """Walk the whole state."""
        self._guard.settle()
        self._rest = self._survey = None  # if this is interrupted, what follows would belong to two surveys
        start = time.perf_counter()
        survey = self._state.survey()
        layout = survey.layout
        if (patterns := self._options.require_finite) is not None:
            self._finite = FiniteCheck(layout, patterns, insist=self._alone)
        self._straightened = straightened = Straightened(survey.tensors)
        # A stand-in changes only here: neither a guard nor a look at its version has to do with it.
        stand_ins = set(straightened.indexes)
        tracked = [tracked and index not in stand_ins for index, tracked in enumerate(survey.tracked)]
        self._at_once = native.Pieces(index for index in survey.at_once if index not in stand_ins)
        self._sources = native.Tensors(straightened.tensors, tracked)
        brought, left, why = self._sources.bring_to_huge_pages()
        log.info("of what torch keeps of tensors %d MiB lie on huge pages, %d do not %s", 2 * brought, 2 * left, why)
        if stand_ins:
            log.info(
                "%d strided tensors on devices are made contiguous at each save, in %d bytes there",
                len(stand_ins),
                straightened.nbytes,
            )
        self._policies.see(self._sources.devices)
        self.devices.see(self._sources.devices, reserve=self._policies.reserve_bytes())
        self._on_devices = bool(self.devices)
        if survey.proof is not None:
            survey.proof.begin(self.devices)
        self._checks.see(self.devices)
        checking = choose_checking(config.cores(), config.copy_threads())
        if self.devices and self.pool.threads < checking.threads:
            self.pool.close()
            self.pool = native.Pool("copy", checking.threads)
        self._plan, self._coarse_plan, self._runs = plan_of(layout), None, ()
        self._order = None
        if not stand_ins:
            self._order = native.CaptureOrder(
                self.pool, self._plan, self._sources, at_once=self._at_once, announce=self._sealer.announce
            )
        self._survey = survey
        log.info(
            "planned %d tensors, %d bytes an image, in %.3f s",
            len(survey.tensors),
            layout.nbytes,
            time.perf_counter() - start,
        )
        return survey

    def _have_memory(self, layout: Layout) -> None:
        """Images of this layout must fit the slots that are granted: other memory is borrowed when they do not."""
        memory = self._shelf.memory
        if memory is not None and (memory.layout is layout or memory.layout.same(layout)):
            if self._lockers.wanted:
                self._lockers.see(self._link, self.devices, layout.nbytes, finite=self._finite is not None)
            return
        try:
            self._shelf.await_drained(_LEASE_SECONDS)
            if not self._link.up() and time.monotonic() < self._no_agent_until:
                raise AgentError("there is still no agent")
            self._lease(layout)
            self._lockers.see(self._link, self.devices, layout.nbytes, finite=self._finite is not None)
        except (AgentError, WaitTimeoutError) as error:
            self._survey = None
            self._no_agent_until = time.monotonic() + _NO_AGENT_SECONDS
            raise AgentError(f"no memory could be had from the agent: {error.args[0]}", hint=error.hint) from error
        except BaseException:
            self._survey = None  # the state may be another one by the next save
            raise

    def _lease(self, layout: Layout) -> None:
        """Borrow memory for the layout and touch it, so that no later save pays for page faults."""
        start = time.perf_counter()
        encoded = layouts.encode(layout)
        answer, fds = self._link.ask(
            lambda id: m.Lease(id=id, layout=encoded, begins=layout.begins, slots=self._options.slots),
            timeout=_LEASE_SECONDS,
        )
        assert isinstance(answer, m.Leased)
        segment = self._mappings.get(answer.memory.key, fds[0], answer.memory.nbytes)
        threads = self.pool.threads
        if not self.devices or not self.devices.pin(segment, stretch=answer.stride, threads=threads):
            segment.touch(threads)
        notice = Notice.of(segment.fileno(), segment.nbytes, answer.stride * answer.slots)
        memory = Memory(
            layout=layout,
            layout_bytes=encoded,
            segment=segment,
            stride=answer.stride,
            slots=answer.slots,
            notice=notice,
        )
        memory.say(busy=False)  # a trainer before this one may have been killed while it was
        self._shelf.install(memory)
        self._mappings.keep_only(answer.memory.key)
        seconds = time.perf_counter() - start
        log.info("%d slots, %d bytes of shared memory, ready in %.3f s", answer.slots, segment.nbytes, seconds)
        # The agent grants a slot of it as soon as it comes to that: no reason to skip a save.
        self._await_slot("the agent's first grant")

    def _take_slot(self, when_busy: WhenBusy) -> int | None:
        slot = self._shelf.take()
        if slot is not None:
            return slot
        self.mend()
        if when_busy == "skip":
            return self._shelf.take()
        self._guard.settle()
        self.mend()
        self._await_slot("a free slot: an older snapshot is still on its way to disk")
        return self._shelf.take()

    def _await_slot(self, what: str) -> None:
        """Wait until a slot is granted.

        Raises:
            WaitTimeoutError: none is, for a long time.
            AgentError: none will be, for the memory that was borrowed counts no longer.
        """
        deadline = time.monotonic() + _BUSY_SECONDS
        with self._condition:
            while not self._condition.wait_for(
                lambda: self._shelf.memory is None or self._shelf.ready(), _SAID_SECONDS
            ):
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(
                        f"no slot became free in {_BUSY_SECONDS:.0f} s", hint="the disk may be stuck"
                    )
                log.warning("save waits for %s", what)
            if self._shelf.memory is None:
                raise AgentError(_GONE)


class _Changed(Exception):
    """Tensors are others than the survey saw, or have another shape, strides, dtype or device."""


def plan_of(layout: Layout, chunk_bytes: int = CHUNK) -> native.Plan:
    """Where the pieces of an image of that layout lie."""
    return native.Plan(
        nbytes=layout.nbytes,
        header=layout.header,
        chunk_bytes=chunk_bytes,
        offsets=[entry.offset for entry in layout.entries],
        sizes=[entry.nbytes for entry in layout.entries],
    )
