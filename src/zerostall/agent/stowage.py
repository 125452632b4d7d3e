"""One rank's images in other GPUs' memory, and their way from there to host memory.

An image is captured into a place of the first locker. Where a second copy is wanted, the vault of the second fetches it
from there. It is drained from whichever copy serves, and what has been drained stays until its place is wanted: whoever
restores copies it from there, GPU to GPU.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from zerostall.agent.consignment import Consignment, Copy, names_at
from zerostall.agent.locker import Locker
from zerostall.agent.straight_writes import StraightWrites
from zerostall.core import checksum
from zerostall.core import manifest as manifests
from zerostall.core.candidates import Past
from zerostall.errors import AgentError, DeviceError, FormatError, GhostError, ZerostallError
from zerostall.telemetry import log, say_once
from zerostall.wire import lockers as w
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerostall.agent.client import Client
    from zerostall.agent.quay import Owner, Quay
    from zerostall.agent.vaults import Vaults
    from zerostall.agent.wish import Wish
    from zerostall.core.manifest import Record

LINGER_SECONDS = 60.0
"""A GPU's memory is not kept for longer for a trainer that is gone: one that takes its place may restore from there."""
PATIENCE_SECONDS = 60.0
"""How long the draining of an image may take, and LEAST_RATE more: restores wait for it."""
LEAST_RATE = 0.5e9
_NAMED = 5


class Stowage:
    """Driven by the agent's loop; see `locker.Holder`. Images are emptied in the order in which they came.

    Attributes:
        straight: what goes from there to disk, past host memory.
    """

    def __init__(self, where: Path, berth: Owner, quay: Quay, vaults: Vaults) -> None:
        self._where = where
        self._berth = berth
        self._quay = quay
        self._vaults = vaults
        whose = f"rank {berth.rank} of {where}"
        self._first = Locker(vaults, self, whose)
        self._second = Locker(vaults, self, f"the mirror of {whose}")
        self.straight = StraightWrites(vaults, (self._first, self._second), quay.advance)
        self._rented: w.Rent | None = None
        self._granted: tuple[int, int] | None = None  # locker and place; stays when the locker is gone
        self._queue: list[Consignment] = []
        self._copying: dict[int, tuple[Consignment, Copy]] = {}  # by order
        self._alone_since = 0.0
        self._late_at = 0.0  # when the image that is drained now should long be in host memory
        self._tenant: Client | None = None
        self._last: Client | None = None
        self._newest: tuple[int, float] | None = None

    # -------------------------------------------------------------------------------------------- what trainers say

    def rent(self, request: w.Rent) -> None:
        """The trainer wants lockers; those that are there serve if they fit."""
        self._tenant = self._berth.client
        if request != self._rented:
            self._give_back("its trainer has asked for another locker")
            self._rented = request
        if self._first.handle:
            self._berth.send(self._first.told())
        self._first.ask(request.gpu, request.nbytes)
        if request.mirror:
            self._second.ask(request.mirror, request.nbytes)

    def no_use(self, message: w.NoUse) -> None:
        """The trainer cannot reach it."""
        if message.locker == self._first.key:
            log.warning("rank %d of %s cannot use its locker: %s", self._berth.rank, self._where, message.reason)
            self._give_back(message.reason)

    def reserve(self) -> tuple[int, int] | None:
        """Locker and place for the next capture; locker 0 where there is none, None where all places are taken."""
        if not self._first.handle:
            return 0, 0
        if (index := self._first.places.reserve()) is None:
            return None
        self._granted = self._first.key, index
        return self._granted

    def ungrant(self) -> None:
        """Nothing was captured into the place that was granted."""
        if self._granted is not None:
            key, index = self._granted
            self._granted = None
            if key == self._first.key:
                self._first.places.free(index)

    def claim(self, locker: int, place: int) -> bool:
        """Grant a place anew that was taken back when a connection broke, and was or is captured into."""
        if not locker or locker != self._first.key or not self._first.places.claim(place):
            return False
        self._granted = locker, place
        return True

    def stow(self, slot: int, record: Record, wish: Wish, stowed: w.Stowed) -> None:
        """A capture is whole, here and in its slot."""
        tier = self._berth.current
        if tier is None or self._granted != (stowed.locker, stowed.place):
            self._say_spoiled(record, wish, AgentError("it was captured for an agent that is gone"))
            return
        self._granted = None
        first = self._first
        if stowed.locker != first.key:
            tier.slots.discard(slot)
            gone = AgentError(f"the vault that it was captured into is gone: {first.last_error}")
            self._say_spoiled(record, wish, gone)
            return
        if (record.layout, record.begins) != (tier.layout.digest, tier.layout.begins) or record.nbytes > first.stride:
            raise FormatError("what was stowed is of another layout than this memory")
        tier.slots.fill(slot)
        first.places.drain(stowed.place)
        captured = Copy(first, first.places, stowed.place, whole=True)
        image = Consignment(tier, slot, stowed, record, wish, [captured])
        self._queue.append(image)
        self._mirror(image)
        if len(self._queue) == 1:
            self._drain(image)

    def promise(self, past: Past, where: str) -> bool:
        """Somebody waits for it in a slower tier; True where it is here, and promised once it is sealed."""
        if (found := self.find(past)) is not None:
            found.promised.add(where)
        return found is not None

    def revoke(self, past: Past, reason: str) -> Wish | None:
        """It is dirty after all; what was wished of it, where it is here."""
        if (found := self.find(past)) is None:
            return None
        found.revoked = reason
        return found.wish

    def lend(self, past: Past) -> tuple[tuple[w.Kept, ...], Callable[[], None]]:
        """Where that very image lies here, too; it stays until the function is called."""
        lent = [found for locker in (self._first, self._second) if (found := locker.lend(past)) is not None]

        def release() -> None:
            for _, let_go in lent:
                let_go()

        return tuple(kept for kept, _ in lent), release

    def find(self, past: Past) -> Consignment | None:
        """That very image, if it is on its way from here."""
        return next((c for c in self._queue if (c.record.step, c.record.created) == (past.step, past.created)), None)

    # --------------------------------------------------------------------------------------------- what the vaults say

    def came(self, locker: Locker) -> None:
        if self._berth.current is not None:
            locker.show(self._berth.current)
        if locker is self._first:
            self._berth.send(self._first.told())

    def refused(self, locker: Locker, reason: str) -> None:
        if locker is self._first:
            self._berth.send(w.NoLocker(key=0, reason=reason))

    def emptied(self, emptied: w.Emptied) -> None:
        image = self._of(emptied.id)
        if image is None:
            return
        sums = list(emptied.checksums)
        record = msgspec.structs.replace(
            image.record, checksums=sums, checksum=checksum.whole(sums, image.record.nbytes, image.record.chunk_bytes)
        )
        if image.revoked or image.tier is not self._berth.current:
            self._drop(image, AgentError(image.revoked or "other memory was lent meanwhile"))
        elif emptied.ghosts:
            names = ", ".join(names_at(image.tier.layout, emptied.ghosts)[:_NAMED])
            self._other_copy(image, GhostError(f"other bytes arrived than the device held at save: {names}"))
        else:
            self._seal(image, record)

    def mirrored(self, order: int) -> None:
        if order in self._copying:
            image, copy = self._copying.pop(order)
            image.arrived(copy, whole=True)
            self._go_on_with(image)

    def stuck(self, order: int, reason: str) -> None:
        if order in self._copying:
            image, copy = self._copying.pop(order)
            image.arrived(copy, whole=False)
            whose = copy.locker.gpu
            say_once(f"no mirror on {whose}", "the vault of %s cannot copy an image from another: %s", whose, reason)
            self._go_on_with(image)
        elif (image := self._of(order)) is not None:
            self._other_copy(image, DeviceError(f"it could not be drained: {reason}"))

    def gone(self, locker: Locker, key: int, reason: str) -> None:
        self._forget(locker, key, f"the vault of {locker.gpu} is gone: {reason}")

    # ------------------------------------------------------------------------------------------------------- within

    def _mirror(self, image: Consignment) -> None:
        """Have it copied to the second locker, where there is one with a place."""
        second, captured = self._second, image.copies[0]
        index = second.places.reserve() if second.handle else None
        if index is None:
            return
        captured.places.read(captured.index)
        copy = Copy(second, second.places, index, whole=False, late_at=_late(image.record))
        image.copies.append(copy)
        order = self._vaults.next_order()
        self._copying[order] = image, copy
        second.order(image.mirror_order(order, copy))

    def _of(self, order: int) -> Consignment | None:
        return self._queue[0] if self._queue and self._queue[0].order == order else None

    def _drain(self, image: Consignment) -> None:
        """Bring the oldest to host memory, from the copy that serves; wait for one that is being made."""
        self._late_at = _late(image.record)
        image.order, image.draining = 0, image.source()
        if image.draining is None:
            if image.coming() is None:
                self._drop(image, image.problem or AgentError("nothing of it is left"))
            return
        image.order = self._vaults.next_order()
        locker = image.draining.locker
        if locker is self._second:
            log.warning("step %d is drained from its mirror in %s: %s", image.record.step, locker.gpu, image.problem)
        locker.show(image.tier)
        locker.order(image.drain_order(image.draining))

    def _go_on_with(self, image: Consignment) -> None:
        """A copy of it has come or will not: it may have waited for that."""
        if self._queue and self._queue[0] is image and not image.order:
            self._drain(image)

    def _other_copy(self, image: Consignment, why: ZerostallError) -> None:
        """What it was drained from is of no use."""
        assert image.draining is not None
        image.draining.bad, image.problem = True, why
        self._drain(image)

    def _seal(self, image: Consignment, record: Record) -> None:
        self._queue.pop(0)
        past = Past(record.step, record.created)
        self._berth.send(w.Drained(image.slot, past.step, past.created, manifests.encode_record(record)))
        try:
            self._quay.seal(image.slot, record, image.wish)
            self._newest = record.step, record.created
            for where in image.promised:
                self._quay.promise(past, where)
        except ZerostallError as error:
            image.close(None)
            self._throw_away(image, error)
        else:
            image.close(past)
        self._next()

    def _drop(self, image: Consignment, why: ZerostallError) -> None:
        """The oldest will not be drained."""
        self._queue.pop(0)
        image.close(None)
        self._throw_away(image, why)
        self._next()

    def _next(self) -> None:
        if self._queue:
            self._drain(self._queue[0])
        else:
            self._quay.idle()

    def _throw_away(self, image: Consignment, why: ZerostallError) -> None:
        image.tier.slots.discard(image.slot)
        if not image.revoked:
            self._say_spoiled(image.record, image.wish, why)

    def _say_spoiled(self, record: Record, wish: Wish, why: ZerostallError) -> None:
        reason, kind, rank = m.plain(str(why.args[0])), type(why).__name__, self._berth.rank
        log.warning("%s, rank %d: step %d is dirty: %s", self._where, rank, record.step, reason)
        self._berth.send(m.Spoiled(step=record.step, created=record.created, rank=rank, reason=reason, kind=kind))
        self._quay.passed(wish.save, reason)

    def _forget(self, locker: Locker, key: int, reason: str) -> None:
        """What was in that locker is gone. Images that lie in the other one, too, go on from there."""
        for order, (image, copy) in list(self._copying.items()):
            if copy.locker is locker:
                del self._copying[order]
                image.arrived(copy, whole=False)
            elif locker is self._first:
                copy.bad = True  # nobody can say what it has read of memory that went
        queue, self._queue = self._queue, []
        for image in queue:
            if image.source() or image.coming():
                self._queue.append(image)
            else:
                image.close(None)
                self._throw_away(image, AgentError(reason))
        if key and locker is self._first:
            self._berth.send(w.NoLocker(key=key, reason=m.plain(reason)))
        if self._queue:
            oldest = self._queue[0]
            if oldest.draining is None or not oldest.draining.there():
                oldest.problem = AgentError(reason)
                self._drain(oldest)
        elif queue:
            self._quay.idle()

    def _give_back(self, reason: str) -> None:
        self._rented = None
        for locker in (self._second, self._first):  # what is in the first alone goes with it
            key = locker.key
            locker.give_back()
            if key:
                self._forget(locker, key, reason)

    def advance(self, now: float) -> None:
        """Ask for a locker again where it is time; let it go where nobody captures into it."""
        client = self._berth.client
        if self._queue or client is not self._last or (client is not None and client is self._tenant):
            self._alone_since, self._last = now, client
        elif (self._first.key or self._second.key) and now - self._alone_since > LINGER_SECONDS:
            why = "nobody trains" if client is None else "its trainer has asked for none"
            log.info("rank %d of %s: its locker goes, for %s", self._berth.rank, self._where, why)
            self._give_back(why)
        if self._queue and now > self._late_at:
            self._late_at = now + PATIENCE_SECONDS
            oldest = self._queue[0]
            if late := oldest.draining or oldest.coming():
                late.locker.end(f"it has not drained step {oldest.record.step} in time, and was ended for that")
        if late := next((copy for _, copy in self._copying.values() if now > copy.late_at), None):
            late.locker.end("it has not copied an image in time, and was ended for that")
        if client is not None:
            for locker in (self._first, self._second):
                locker.advance(now)

    def hide(self, key: int) -> None:
        """A segment of host memory goes."""
        for locker in (self._first, self._second):
            locker.hide(key)

    def close(self) -> None:
        self._give_back("the agent lets its memory go")

    # ------------------------------------------------------------------------------------------------------ telling

    def draining(self) -> bool:
        return bool(self._queue)

    def nbytes(self) -> int:
        """Of those GPUs' memory."""
        return self._first.nbytes + self._second.nbytes

    def steps(self) -> tuple[int, ...]:
        """What can be restored from there, once for each copy."""
        return tuple(past.step for locker in (self._first, self._second) for past in locker.places.kept())

    def report(self) -> m.TierReport | None:
        """What `zerostall agent status` shows; None where the tier was never asked for."""
        first, second = self._first, self._second
        error = first.last_error or second.last_error
        if not first.gpu and not error:
            return None
        where = f"{first.nbytes / 1e9:.3g} GB of {first.gpu}" if first.handle else "no GPU lends memory"
        if second.handle:
            where += f", {second.places.whole()} mirrored in {second.nbytes / 1e9:.3g} GB of {second.gpu}"
        elif self._rented is not None and self._rented.mirror:
            where += ", no mirror"
        where += self.straight.words()
        places = max(len(first.places), len(second.places))
        step, created = self._newest or (None, 0.0)
        return m.TierReport(
            tier="peer",
            where=where,
            newest=step,
            created=created,
            steps=len(self._queue) + len(set(self.steps())),
            every=0.0,
            keep=f"{places} at a time, until there are newer ones" if places else "nothing",
            moving=self._queue[0].record.step if self._queue else None,
            last_error=m.plain(error),
        )


def _late(record: Record) -> float:
    """When what is begun now should long be done."""
    return time.monotonic() + PATIENCE_SECONDS + record.nbytes / LEAST_RATE
