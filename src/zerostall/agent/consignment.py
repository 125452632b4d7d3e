"""An image that lies whole in vaults, on its way to host memory, and its copies there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall.wire import lockers as w

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.agent.locker import Locker
    from zerostall.agent.wish import Wish
    from zerostall.core.candidates import Past
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record
    from zerostall.core.places import Places
    from zerostall.errors import ZerostallError
    from zerostall.tiers.host import HostTier


@dataclass(slots=True)
class Copy:
    """What of the image was on a device, in one place of a locker.

    Attributes:
        places: those of the locker when this was begun.
        whole: all of it is there; before that it is being copied from the first.
        bad: of no use; what is being copied is not waited for.
        late_at: when what is being copied should long be there.
    """

    locker: Locker
    places: Places
    index: int
    whole: bool
    bad: bool = False
    late_at: float = 0.0

    def there(self) -> bool:
        """Its memory is still that of then."""
        return self.places is self.locker.places

    def close(self, past: Past | None, runs: tuple[tuple[int, int], ...]) -> None:
        """It is kept for who restores, as that image; None: it is worth nothing."""
        if not self.there():
            return
        if past is None or self.bad:
            self.places.free(self.index)
        else:
            self.places.keep(self.index, past, runs)


@dataclass(slots=True)
class Consignment:
    """Whole but for what lies in `copies`, of which the one that was captured comes first.

    Attributes:
        order: to whom it is being drained from; 0 while that cannot be.
        draining: the copy that it is drained from.
        revoked: why nobody wants it any more.
        problem: what was amiss with a copy, last.
    """

    tier: HostTier
    slot: int
    stowed: w.Stowed
    record: Record
    wish: Wish
    copies: list[Copy]
    order: int = 0
    draining: Copy | None = None
    promised: set[str] = field(default_factory=set)
    revoked: str = ""
    problem: ZerostallError | None = None
    _over: bool = False
    _past: Past | None = None

    def source(self) -> Copy | None:
        """A copy that it can be drained from."""
        return next((copy for copy in self.copies if copy.whole and copy.there() and not copy.bad), None)

    def coming(self) -> Copy | None:
        """A copy that it will be possible to drain it from."""
        return next((copy for copy in self.copies if not copy.whole and copy.there() and not copy.bad), None)

    def drain_order(self, copy: Copy) -> w.Drain:
        return w.Drain(
            id=self.order,
            locker=copy.locker.key,
            place=copy.index,
            memory=self.tier.key,
            offset=self.slot * self.tier.stride,
            nbytes=self.record.nbytes,
            chunk_bytes=self.record.chunk_bytes,
            runs=self.stowed.runs,
            samples=self.stowed.samples,
        )

    def mirror_order(self, order: int, copy: Copy) -> w.Mirror:
        """To fill a copy from the first."""
        first = self.copies[0]
        return w.Mirror(
            id=order,
            locker=copy.locker.key,
            place=copy.index,
            handle=first.locker.handle,
            offset=first.index * first.locker.stride,
            runs=self.stowed.runs,
        )

    def arrived(self, copy: Copy, *, whole: bool) -> None:
        """A copy is made, or cannot be: the first is read for it no longer."""
        self.copies[0].places.release(self.copies[0].index)
        copy.whole = copy.whole or whole
        copy.bad = copy.bad or not whole
        if copy.there() and whole:
            copy.places.drain(copy.index)
            if self._over:
                copy.close(self._past, self.stowed.runs)
        elif copy.there():
            copy.places.free(copy.index)

    def close(self, past: Past | None) -> None:
        """It is sealed in host memory, as that image, or never will be; copies being made follow when they are."""
        self._over, self._past = True, past
        for copy in self.copies:
            if copy.whole:
                copy.close(past, self.stowed.runs)


def names_at(layout: Layout, offsets: Sequence[int]) -> list[str]:
    """The tensors that lie at these offsets of an image."""
    return [
        next((e.name for e in layout.entries if e.offset <= at < e.offset + max(e.nbytes, 1)), "a tensor")
        for at in offsets
    ]
