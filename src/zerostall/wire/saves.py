"""The course of a save, from the slot that is granted for it to the tier that somebody waits for. All are events.

trainer → agent   Begin  Sealed  Discarded  Passed  Revoked  Plan  Promise
agent → trainer   Granted  Reached  Failed  Replaced  Spoiled  Awaiting  Hold  Plan
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.core.candidates import Past
from zerostall.wire.lockers import Stowed
from zerostall.wire.message import Message
from zerostall.wire.reports import Fallback

if TYPE_CHECKING:
    from zerostall.wire.refusals import Refused


class Begin(Message, frozen=True):
    """All ranks have agreed where to go on from: what some of them sealed before, and not all, is worth nothing."""

    epoch: int


class Granted(Message, frozen=True):
    """The trainer may capture into this slot, and what lies on its device into that place of its locker (0: none).

    `number` tells grants apart, also those of one slot: they rise. What the trainer says of a slot carries that of its
    grant, for it may come late, when a connection broke and the slot was granted anew.
    """

    slot: int
    number: int = 0
    locker: int = 0
    place: int = 0


class Sealed(Message, frozen=True):
    """The granted slot holds a whole image.

    Attributes:
        grant: the number of the slot's grant.
        epoch, turn: with the record's step the name of this save, the same on every rank; see `core.roll.Save`.
        promise: the image must not be replaced before it is on disk.
        replace: a committed step of that number may be replaced.
        pin: retention never evicts it.
        aside: what of a past that the run has left is set aside before this one is committed.
        stalls: seconds of each time that training was held since the image before.
        fallbacks: those of the trainer until now.
        stowed: where the part of the image lies that was on a device, if not in the slot; the record's checksums are
            all 0 then, for nobody has read it yet.
    """

    slot: int
    record: bytes
    grant: int = 0
    epoch: int = 0
    turn: int = 0
    promise: bool = False
    replace: bool = False
    pin: bool = False
    aside: tuple[Past, ...] = ()
    stalls: tuple[float, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    stowed: Stowed | None = None


class Discarded(Message, frozen=True):
    """The granted slot holds nothing of use. `grant`, `epoch` and `turn` as in `Sealed`."""

    slot: int
    step: int
    reason: str
    grant: int = 0
    epoch: int = 0
    turn: int = 0


class Passed(Message, frozen=True):
    """This rank goes on without that save.

    Attributes:
        skipped: for want of a slot, or because all ranks hold off.
    """

    step: int
    epoch: int
    turn: int
    reason: str
    skipped: bool


class Revoked(Message, frozen=True):
    """A step that was sealed is dirty after all: no tier may keep it.

    `created` says which of its number, here and wherever a message names a step: a number may be saved again, and what
    was said of the first must not be taken for the second.
    """

    step: int
    created: float
    reason: str


class Promise(Message, frozen=True):
    """Somebody waits for `step` in `tier` ("disk" or "remote"): do not replace it before.

    Answered by `Reached`, `Failed` or `Replaced`.
    """

    step: int
    created: float
    tier: str = "disk"


class Reached(Message, frozen=True):
    """The step is clean in `tier`."""

    step: int
    created: float
    tier: str


class Failed(Message, frozen=True):
    """The step did not get to `tier`; the agent goes on trying with the newest one."""

    step: int
    created: float
    tier: str
    kind: str
    message: str
    hint: str = ""
    errno: int | None = None

    @classmethod
    def of(cls, refused: Refused, step: int, created: float, tier: str) -> Failed:
        """What was refused, of a step on its way to `tier`."""
        return cls(step, created, tier, refused.kind, refused.message, refused.hint, refused.errno)


class Replaced(Message, frozen=True):
    """A newer image took this step's place in memory before it got to `tier`."""

    step: int
    created: float
    tier: str


class Spoiled(Message, frozen=True):
    """A save will never be clean: another rank has skipped it, or it came to nothing there; or here, in a vault.

    Attributes:
        kind: where it came to nothing here, the name of a class in `zerostall.errors`.
    """

    step: int
    created: float
    rank: int
    reason: str
    skipped: bool = False
    kind: str = ""


class Awaiting(Message, frozen=True):
    """A save that this rank has sealed is not clean yet: these ranks have said nothing of it.

    Attributes:
        quiet: it is early to say so in a log; who stops waiting is told.
    """

    step: int
    created: float
    ranks: tuple[int, ...]
    quiet: bool = False


class Hold(Message, frozen=True):
    """Skip every save of a step before this one, so that all ranks save the same steps again."""

    epoch: int
    step: int


class Plan(Message, frozen=True):
    """Every rank saves the first step that it comes to and that is not before this one. One proposes, all are told.

    Attributes:
        leave: and then training ends. Only the first such plan of an epoch counts.
    """

    epoch: int
    step: int
    leave: bool = False
