"""Images that somebody doubts are checked, marked where they are damaged, and made again from good copies.

Only what the record says is ever written, and only where something else stood: whoever reads an image meanwhile checks
what it reads, and finds what it would have found, or better. So nothing has to be locked out, and one chunk after the
other is brought, each from the nearest copy that has it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from zerostall.agent.disk_copies import DiskCopy
from zerostall.agent.good_copies import Wanted
from zerostall.agent.loop_call import Post, on_loop
from zerostall.core.candidates import Past
from zerostall.errors import SnapshotNotFoundError, ZerostallError
from zerostall.telemetry import log
from zerostall.wire import cluster as w
from zerostall.wire.messages import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from zerostall.agent.copies import Copies, Copy
    from zerostall.agent.disk_copies import DiskCopies
    from zerostall.agent.good_copies import GoodCopy, Target
    from zerostall.agent.vouchers import Voucher, Vouchers
    from zerostall.core.placement import ImageId


class Mendable(Wanted, Protocol):
    """An image that may be made again where it lies."""

    def there(self) -> bool:
        """Is it still?"""
        ...

    def sound(self, chunk: int) -> bool:
        """Is a chunk what the record says? SnapshotNotFoundError: the image is not there any more."""
        ...

    def target(self, chunk: int) -> AbstractContextManager[Target]:
        """Where to bring a chunk; at the end of the block it is in its place, if it is right."""
        ...

    def damage(self) -> str:
        """What is wrong with it, "" where nothing is known to be."""
        ...

    def mark(self, reason: str) -> bool:
        """Say what is wrong with it, "" for nothing any more; whether it is there."""
        ...


AGAIN_SECONDS = 10.0
"""A damaged image of which nobody has a good copy is tried again after so long, while it is there."""

MOST_DOUBTS = 1024
FINDINGS_KEPT = 64


class Mending:
    """One thread. `doubt` may be called by any.

    Args:
        elsewhere: the good copies that a damaged one may be made again from, nearest first.

    Attributes:
        damaged, mended: how many images were, since the agent started.
    """

    def __init__(
        self,
        copies: Copies,
        disks: DiskCopies,
        vouchers: Vouchers,
        elsewhere: Callable[[Wanted], Iterator[GoodCopy]],
        post: Post,
    ) -> None:
        self.damaged = 0
        self.mended = 0
        self._copies = copies
        self._disks = disks
        self._vouchers = vouchers
        self._vouching = threading.Lock()
        self._without: set[tuple[ImageId, int, str]] = set()  # what vouches for an image and nobody has
        self._elsewhere = elsewhere
        self._post = post
        self._findings: deque[w.Finding] = deque(maxlen=FINDINGS_KEPT)
        self._numbers = 0
        self._doubts: dict[tuple[ImageId, int, bool], str] = {}
        self._retry_at = 0.0
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._mend_for_ever, name="mending", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(2.0)

    def doubt(self, image: ImageId, step: int, why: str, *, disk: bool = False) -> None:
        """Look at that image soon; nothing happens where it is not here."""
        with self._changed:
            if len(self._doubts) < MOST_DOUBTS:
                self._doubts.setdefault((image, step, disk), why)
                self._changed.notify_all()

    def make_vouchers_good(self, image: ImageId, step: int, why: str) -> None:
        """Have manifest, record and layout of an image on disk made again where they are damaged. Any thread.

        Without them nobody can say what the image should be. So whoever looks for a step to restore waits for this.
        """
        with self._vouching:
            for run in self._disks.runs(image):
                for voucher in self._vouchers.make_good(run, step, image.rank):
                    self._found(image, step, voucher, why)

    def _found(self, image: ImageId, step: int, voucher: Voucher, why: str) -> None:
        which = (image, step, voucher.what)
        if which not in self._without:
            self.damaged += 1
            log.error("step %d of rank %d on disk: %s (%s)", step, image.rank, voucher.damage, why)
            self._say("damaged", image, step, "disk", f"{voucher.what}: {voucher.damage}; {why}")
        if voucher.source:
            self.mended += 1
            self._without.discard(which)
            how = f"{voucher.what} is made again from {voucher.source}"
            log.warning("step %d of rank %d on disk: %s", step, image.rank, how)
            self._say("mended", image, step, "disk", how)
        elif which not in self._without:
            self._without.add(which)
            self._say("hopeless", image, step, "disk", f"nobody has {voucher.what} once more")

    def findings(self, after: int) -> tuple[w.Finding, ...]:
        """What was found since the one of that number, oldest first, as far as it is remembered."""
        with self._changed:
            return tuple(finding for finding in self._findings if finding.number > after)

    # ------------------------------------------------------------------------------------------------ the thread

    def _mend_for_ever(self) -> None:
        while (doubt := self._next()) is not None:
            (image, step, disk), why = doubt
            try:
                if disk:
                    self.make_vouchers_good(image, step, why)
                for copy in (self._disks if disk else self._copies).of(image, step):
                    self._look_at(copy, why)
            except SnapshotNotFoundError as gone:
                log.info("%s; %s", gone.args[0], why)
            except ZerostallError as error:
                log.warning("step %d of rank %d could not be looked at: %s", step, image.rank, error.args[0])
            except Exception:  # noqa: BLE001 - one image's trouble must not end the others
                log.exception("step %d of rank %d could not be looked at", step, image.rank)

    def _next(self) -> tuple[tuple[ImageId, int, bool], str] | None:
        """The next doubt; what could not be made again comes again by itself. None when it is time to end."""
        while True:
            with self._changed:
                while not self._stopping and not self._doubts and not self._overdue():
                    self._changed.wait(1.0)
                if self._stopping:
                    return None
                if self._doubts:
                    first = next(iter(self._doubts))
                    return first, self._doubts.pop(first)
                self._retry_at = 0.0
            try:
                for copy in self._copies.damaged():
                    self.doubt(copy.image, copy.step, "it was damaged before")
            except ZerostallError as error:
                log.debug("damaged images are not tried again just now: %s", error.args[0])

    def _overdue(self) -> bool:
        return 0.0 < self._retry_at <= time.monotonic()

    def _look_at(self, copy: Copy | DiskCopy, why: str) -> None:
        chunks = len(copy.record.checksums)
        bad = [chunk for chunk in range(chunks) if not copy.sound(chunk)]
        known = copy.damage()
        if not bad:
            if known:
                self._whole_again(copy, "by itself")
            log.info("%s is whole after all: %s", copy, why)
            return
        reason = f"chunk {bad[0]} of {chunks} fails its checksum"
        reason = reason if len(bad) == 1 else f"{len(bad)} of {chunks} chunks fail their checksums, first {bad[0]}"
        if not known:
            copy.mark(reason)
            self.damaged += 1
            log.error("%s is damaged: %s (%s)", copy, reason, why)
            self._tell("damaged", copy, f"{reason}; {why}")
        self._make_again(copy, bad, first=not known)

    def _make_again(self, copy: Copy | DiskCopy, bad: list[int], *, first: bool) -> None:
        left, trouble = bad, "there is no other copy"
        near = self._disks.in_memory(copy) if isinstance(copy, DiskCopy) else iter(())
        for good in itertools.chain(near, self._elsewhere(copy)):
            try:
                while left:
                    with copy.target(left[0]) as target:
                        good.bring(target, left[0])
                    if not copy.sound(left[0]):
                        raise SnapshotNotFoundError(f"chunk {left[0]} is damaged there, too")
                    left = left[1:]
            except (ZerostallError, OSError) as error:
                if not copy.there():
                    return  # it made room meanwhile
                trouble = f"{good.name}: {error.args[0] if error.args else error}"
                log.info("%s cannot be made again from %s: %s", copy, good.name, trouble)
            if not left:
                self._whole_again(copy, f"made again from {good.name}")
                return
        if first:
            log.error("%s is damaged, and nobody has a good copy just now: %s", copy, trouble)
            self._tell("hopeless", copy, trouble)
        if isinstance(copy, DiskCopy):
            return  # whoever reads it finds that again, and takes another copy
        self._retry_at = time.monotonic() + AGAIN_SECONDS
        if copy.tier == "replica":
            past = Past(copy.step, copy.record.created)
            guests = self._copies.guests
            on_loop(self._post, lambda: guests.drop(copy.image, past) if guests else None)

    def _whole_again(self, copy: Copy | DiskCopy, how: str) -> None:
        if not copy.mark(""):
            return
        self.mended += 1
        log.warning("%s is whole again, %s", copy, how)
        self._tell("mended", copy, how)
        if copy.run is not None and copy.tier == "host":
            run, step = copy.run, copy.record.step
            self._post(lambda: run.trickle.try_again(step))

    def _tell(self, kind: str, copy: Copy | DiskCopy, reason: str) -> None:
        self._say(kind, copy.image, copy.record.step, copy.tier, reason)

    def _say(self, kind: str, image: ImageId, step: int, tier: str, reason: str) -> None:
        with self._changed:
            self._numbers += 1
            self._findings.append(
                w.Finding(
                    number=self._numbers,
                    kind=kind,
                    run=image.run,
                    rank=image.rank,
                    step=step,
                    tier=tier,
                    reason=plain(reason)[:1000],
                )
            )
