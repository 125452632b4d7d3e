"""One rank's images in another GPU's memory, and their way from there to host memory.

What has been drained stays there until its place is wanted: whoever restores copies it from there, GPU to GPU.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import backoff, checksum
from zerostall.core import manifest as manifests
from zerostall.core.candidates import Past
from zerostall.core.places import Places
from zerostall.errors import AgentError, DeviceError, FormatError, GhostError, ZerostallError
from zerostall.telemetry import log, say_once
from zerostall.tiers.host import PAGE
from zerostall.wire import lockers as w
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerostall.agent.berth import Berth, Wish
    from zerostall.agent.client import Client
    from zerostall.agent.run import Run
    from zerostall.agent.vaults import Vaults
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record
    from zerostall.tiers.host import HostTier

PLACES = 2
"""One is captured into while the other is emptied."""
LINGER_SECONDS = 60.0
"""A GPU's memory is not kept for longer for a trainer that is gone: one that takes its place may restore from there."""
PATIENCE_SECONDS = 60.0
"""How long the draining of an image may take, and LEAST_RATE more: restores wait for it."""
LEAST_RATE = 0.5e9
_MOST_FAILURES = 5
_NAMED = 5


@dataclass(slots=True)
class _Consignment:
    """An image that is whole but for what lies in the locker. `revoked`: why nobody wants it any more."""

    tier: HostTier
    slot: int
    stowed: w.Stowed
    record: Record
    wish: Wish
    order: int = 0
    promised: set[str] = field(default_factory=set)
    revoked: str = ""


class Stowage:
    """Driven by the agent's loop; see `vaults.Renter`. Images are emptied in the order in which they came."""

    def __init__(self, run: Run, berth: Berth, vaults: Vaults) -> None:
        self._run = run
        self._berth = berth
        self._vaults = vaults
        self._gpu = ""
        self._nbytes = 0
        self._key = 0
        self._handle = b""
        self._places = Places(0)
        self._granted: tuple[int, int] | None = None  # locker and place; stays when the locker is gone
        self._queue: list[_Consignment] = []
        self._shown: set[int] = set()
        self._failures = 0
        self._retry_at = 0.0
        self._alone_since = 0.0
        self._late_at = 0.0  # when the image that is drained now should long be in host memory
        self._tenant: Client | None = None
        self._last: Client | None = None
        self._newest: tuple[int, float] | None = None
        self.last_error = ""

    # -------------------------------------------------------------------------------------------- what trainers say

    def rent(self, request: w.Rent) -> None:
        """The trainer wants a locker; the one that is there serves if it fits."""
        self._tenant = self._berth.client
        if (request.gpu, request.nbytes) != (self._gpu, self._nbytes):
            self._give_back("its trainer has asked for another locker")
            self._gpu, self._nbytes, self._failures = request.gpu, request.nbytes, 0
            self._ask()
        elif self._handle:
            self._berth.send(self._locker())
        elif not self._key:
            self._failures = 0
            self._ask()

    def no_use(self, message: w.NoUse) -> None:
        """The trainer cannot reach it."""
        if message.locker == self._key:
            log.warning("rank %d of %s cannot use its locker: %s", self._berth.rank, self._run.where, message.reason)
            self._give_back(message.reason)
            self._gpu = ""

    def reserve(self) -> tuple[int, int] | None:
        """Locker and place for the next capture; locker 0 where there is none, None where all places are taken."""
        if not self._handle:
            return 0, 0
        index = self._places.reserve()
        if index is None:
            return None
        self._granted = self._key, index
        return self._granted

    def ungrant(self) -> None:
        """Nothing was captured into the place that was granted."""
        if self._granted is not None:
            key, index = self._granted
            self._granted = None
            if key == self._key:
                self._places.free(index)

    def stow(self, slot: int, record: Record, wish: Wish, stowed: w.Stowed) -> None:
        """A capture is whole, here and in its slot."""
        tier = self._berth.current
        if tier is None or self._granted != (stowed.locker, stowed.place):
            self._say_spoiled(record, wish, AgentError("it was captured for an agent that is gone"))
            return
        self._granted = None
        if stowed.locker != self._key:
            tier.slots.discard(slot)
            gone = AgentError(f"the vault that it was captured into is gone: {self.last_error}")
            self._say_spoiled(record, wish, gone)
            return
        if (record.layout, record.begins) != (tier.layout.digest, tier.layout.begins) or record.nbytes > self._nbytes:
            raise FormatError("what was stowed is of another layout than this memory")
        tier.slots.fill(slot)
        self._places.drain(stowed.place)
        self._queue.append(_Consignment(tier, slot, stowed, record, wish))
        if len(self._queue) == 1:
            self._drain(self._queue[0])

    def promise(self, past: Past, where: str) -> bool:
        """Somebody waits for it in a slower tier; True where it is here, and promised once it is sealed."""
        found = self._find(past)
        if found is not None:
            found.promised.add(where)
        return found is not None

    def revoke(self, past: Past, reason: str) -> Wish | None:
        """It is dirty after all; what was wished of it, where it is here."""
        found = self._find(past)
        if found is None:
            return None
        found.revoked = reason
        return found.wish

    def lend(self, past: Past) -> tuple[w.Kept, Callable[[], None]] | None:
        """Where that very image lies here, too, if it does; it stays until the function is called."""
        place = self._places.hold(past)
        if place is None:
            return None
        places = self._places  # those of the locker of now
        kept = w.Kept(gpu=self._gpu, handle=self._handle, offset=place.index * self._stride, runs=place.runs)
        return kept, lambda: places.release(place.index)

    def _find(self, past: Past) -> _Consignment | None:
        return next((c for c in self._queue if (c.record.step, c.record.created) == (past.step, past.created)), None)

    # --------------------------------------------------------------------------------------------- what the vault says

    def opened(self, opened: w.Opened) -> None:
        self._handle, self._places = opened.handle, Places(opened.places)
        if self._berth.current is not None:
            self._show(self._berth.current)
        self._berth.send(self._locker())

    def declined(self, reason: str) -> None:
        self._key, self.last_error = 0, reason
        say_once(
            f"no locker on {self._gpu} for {self._run.where} {self._berth.rank}",
            "rank %d of %s has no locker in the memory of %s: %s",
            self._berth.rank,
            self._run.where,
            self._gpu,
            reason,
        )
        self._berth.send(w.NoLocker(key=0, reason=reason))

    def emptied(self, emptied: w.Emptied) -> None:
        done = self._pop(emptied.id)
        if done is None:
            return
        self._failures = 0
        sums = list(emptied.checksums)
        record = msgspec.structs.replace(
            done.record, checksums=sums, checksum=checksum.whole(sums, done.record.nbytes, done.record.chunk_bytes)
        )
        problem: ZerostallError | None = None
        if done.revoked or done.tier is not self._berth.current:
            problem = AgentError(done.revoked or "other memory was lent meanwhile")
        elif emptied.ghosts:
            names = _names_at(done.tier.layout, emptied.ghosts)
            problem = GhostError(f"other bytes arrived than the device held at save: {', '.join(names[:_NAMED])}")
        past = Past(record.step, record.created)
        if problem:
            self._places.free(done.stowed.place)
        else:
            self._places.keep(done.stowed.place, past, done.stowed.runs)
            encoded = manifests.encode_record(record)
            self._berth.send(w.Drained(slot=done.slot, step=record.step, created=record.created, record=encoded))
            try:
                self._run.seal(self._berth, done.slot, record, done.wish)
                self._newest = record.step, record.created
                for where in done.promised:
                    self._run.promises.make(self._berth, past, where)
            except ZerostallError as error:
                problem = error
                self._places.forget(past)
        if problem:
            self._throw_away(done, problem)
        self._next()

    def stuck(self, order: int, reason: str) -> None:
        done = self._pop(order)
        if done is not None:
            self.last_error = reason
            self._places.free(done.stowed.place)
            self._throw_away(done, DeviceError(f"it could not be drained: {reason}"))
            self._next()

    def lost(self, reason: str) -> None:
        self._failures += 1
        self.last_error = reason
        self._forget(f"the vault of {self._gpu} is gone: {reason}")
        if self._failures <= _MOST_FAILURES:
            self._retry_at = time.monotonic() + backoff.pause(self._failures, 0.5)
        else:
            say_once(f"vault {self._gpu} given up", "the vault of %s is given up: %s", self._gpu, reason)

    # ------------------------------------------------------------------------------------------------------- within

    def _ask(self) -> None:
        self._retry_at = 0.0
        self._key = secrets.randbits(62) | 1
        self._vaults.lend(self._gpu, w.Lend(key=self._key, stride=self._stride, places=PLACES), self)

    @property
    def _stride(self) -> int:
        return -(-max(self._nbytes, 1) // PAGE) * PAGE

    def _locker(self) -> w.Locker:
        return w.Locker(
            key=self._key, gpu=self._gpu, handle=self._handle, stride=self._stride, places=len(self._places)
        )

    def _show(self, tier: HostTier) -> None:
        if tier.key not in self._shown:
            self._shown.add(tier.key)
            show = w.Show(key=tier.key, nbytes=tier.segment.nbytes, stride=tier.stride)
            self._vaults.show(self._gpu, show, tier.segment.fileno())

    def _drain(self, image: _Consignment) -> None:
        image.order = self._vaults.next_order()
        self._show(image.tier)
        order = w.Drain(
            id=image.order,
            locker=self._key,
            place=image.stowed.place,
            memory=image.tier.key,
            offset=image.slot * image.tier.stride,
            nbytes=image.record.nbytes,
            chunk_bytes=image.record.chunk_bytes,
            runs=image.stowed.runs,
            samples=image.stowed.samples,
        )
        self._late_at = time.monotonic() + PATIENCE_SECONDS + image.record.nbytes / LEAST_RATE
        self._vaults.drain(self._gpu, order, self)

    def _pop(self, order: int) -> _Consignment | None:
        if not self._queue or self._queue[0].order != order:
            return None
        return self._queue.pop(0)

    def _next(self) -> None:
        if self._queue:
            self._drain(self._queue[0])
        else:
            self._run.undrained.look()

    def _throw_away(self, image: _Consignment, why: ZerostallError) -> None:
        image.tier.slots.discard(image.slot)
        if not image.revoked:
            self._say_spoiled(image.record, image.wish, why)

    def _say_spoiled(self, record: Record, wish: Wish, why: ZerostallError) -> None:
        reason, kind, rank = m.plain(str(why.args[0])), type(why).__name__, self._berth.rank
        log.warning("%s, rank %d: step %d is dirty: %s", self._run.where, rank, record.step, reason)
        self._berth.send(m.Spoiled(step=record.step, created=record.created, rank=rank, reason=reason, kind=kind))
        self._run.passed(self._berth, wish.save, reason)

    def _forget(self, reason: str) -> None:
        """The locker is gone; so is what was in it."""
        key, self._key, self._handle, self._places = self._key, 0, b"", Places(0)
        self._shown.clear()
        gone, self._queue = self._queue, []
        for image in gone:
            self._throw_away(image, AgentError(reason))
        if key:
            self._berth.send(w.NoLocker(key=key, reason=m.plain(reason)))
        if gone:
            self._run.undrained.look()

    def _give_back(self, reason: str) -> None:
        if self._key:
            gpu, key = self._gpu, self._key
            self._forget(reason)
            self._vaults.take_back(gpu, key)
        self._retry_at = 0.0

    def advance(self, now: float) -> None:
        """Ask for a locker again where it is time; let it go where nobody captures into it."""
        client = self._berth.client
        if self._queue or client is not self._last or (client is not None and client is self._tenant):
            self._alone_since, self._last = now, client
        elif self._key and now - self._alone_since > LINGER_SECONDS:
            why = "nobody trains" if client is None else "its trainer has asked for none"
            log.info("rank %d of %s: its locker goes, for %s", self._berth.rank, self._run.where, why)
            self._give_back(why)
            self._gpu = ""
        if self._queue and now > self._late_at:
            self._late_at = now + PATIENCE_SECONDS
            step = self._queue[0].record.step
            self._vaults.end(self._gpu, f"it has not drained step {step} in time, and was ended for that")
        if self._retry_at and now >= self._retry_at and self._berth.client is not None:
            self._ask()

    def hide(self, key: int) -> None:
        """A segment of host memory goes."""
        if key in self._shown:
            self._shown.discard(key)
            self._vaults.hide(key)

    def close(self) -> None:
        self._give_back("the agent lets its memory go")

    # ------------------------------------------------------------------------------------------------------ telling

    def draining(self) -> bool:
        return bool(self._queue)

    def nbytes(self) -> int:
        """Of that GPU's memory."""
        return len(self._places) * self._stride

    def report(self) -> m.TierReport | None:
        """What `zerostall agent status` shows; None where the tier was never asked for."""
        if not self._gpu and not self.last_error:
            return None
        step, created = self._newest or (None, 0.0)
        return m.TierReport(
            tier="peer",
            where=f"{self.nbytes() / 1e9:.3g} GB of {self._gpu}" if self._handle else "no GPU lends memory",
            newest=step,
            created=created,
            steps=len(self._queue) + len(self._places.kept()),
            every=0.0,
            keep=f"{len(self._places)} at a time, until there are newer ones" if self._handle else "nothing",
            moving=self._queue[0].record.step if self._queue else None,
            last_error=m.plain(self.last_error),
        )


def _names_at(layout: Layout, offsets: Sequence[int]) -> list[str]:
    """The tensors that lie at these offsets of an image."""
    return [
        next((e.name for e in layout.entries if e.offset <= at < e.offset + max(e.nbytes, 1)), "a tensor")
        for at in offsets
    ]
