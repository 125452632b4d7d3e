"""Which step of a run goes to other nodes now: one for all its ranks. Pure decisions, with reasons.

Where saves come faster than images get over, each partner that took the newest there is would have another step. So
one step is *on its way* until every partner has it; then it is *safe*, and the newest clean one is next. The step that
is safe stays, at home and with the partners, until another one is: what is kept of a lost node is of a step that the
others have, too.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.roll import Save

if TYPE_CHECKING:
    from collections.abc import Mapping

SILENT_SECONDS = 30.0
"""A partner that has taken nothing for so long is not waited for."""
HEARD_SECONDS = 10.0
"""A node that has not said for so long how far its ranks' copies are may be gone: nothing is concluded from that."""
STRAGGLING = 16.0
"""A partner may take so many times as long as the first did, at least `STRAGGLING_SECONDS`."""
STRAGGLING_SECONDS = 60.0
MOST_SECONDS = 3600.0


class Copy(Enum):
    """How the copies of one rank's image stand."""

    has = "has"
    lacks = "lacks"
    gone = "gone"
    """Not every partner has it, and home has it no more."""
    nobody = "nobody"
    """No node keeps copies of this rank."""


class Seen(msgspec.Struct, frozen=True):
    """What a rank's home says of the step that is on its way.

    Attributes:
        given: bytes that went to partners, ever.
        moved, heard: when something of this changed last, and when it was said last.
    """

    copy: Copy
    given: int
    moved: float
    heard: float


class Course(msgspec.Struct, frozen=True):
    """What was decided.

    Attributes:
        current: the save that is on its way.
        safe: the last that got to every partner that counts.
        began: when `current` was chosen.
        first: when the first rank's copies of it were whole.
    """

    current: Save | None = None
    safe: Save | None = None
    began: float = 0.0
    first: float | None = None
    reason: str = "no step is clean yet"


def seen(before: Seen | None, copy: Copy, given: int, now: float) -> Seen:
    """What is known of a rank's copies, now that its home has said this."""
    same = before is not None and (before.copy, before.given) == (copy, given)
    return Seen(copy, given, before.moved if before is not None and same else now, now)


def decide(before: Course, newest: Save | None, ranks: Mapping[int, Seen], world: int, now: float) -> Course:
    """What is on its way now, and what is safe.

    Args:
        newest: the save that became clean last, which every rank's home has.
        ranks: what was said of `before.current`; nothing of a rank whose home has said nothing yet.
        now: on the clock of what was seen.
    """
    if newest is None:
        return before
    if before.current is None:
        return (
            before if newest == before.safe else _next(before, newest, before.safe, now, "nothing else is on its way")
        )
    if newest.epoch != before.current.epoch:
        return _next(before, newest, before.safe, now, "training went on from elsewhere")
    first = before.first
    if first is None and any(one.copy is Copy.has for one in ranks.values()):
        first = now
        before = msgspec.structs.replace(before, first=now)
    left: list[int] = []
    kept = 0
    for rank in range(world):
        one = ranks.get(rank)
        if one is None or (one.copy is Copy.lacks and now - one.heard > HEARD_SECONDS):
            return _unheard(before, newest, rank, now)
        if one.copy is Copy.gone:
            return _moved_on(before, newest, now, f"rank {rank}'s home has it no more")
        if one.copy is Copy.lacks:
            if not _given_up(before, one, now):
                return before
            left.append(rank)
        kept += one.copy is Copy.has
    if left and not kept:
        return _moved_on(before, newest, now, f"no partner takes it, rank {left[0]}'s the first")
    if not kept:
        return _moved_on(before, newest, now, "nobody keeps copies")
    without = f", but for {len(left)} whose partners do not take it, rank {left[0]} the first" if left else ""
    safe = msgspec.structs.replace(
        before, current=None, safe=before.current, reason=f"all partners have {_named(before.current)}{without}"
    )
    return safe if newest == safe.safe else _next(safe, newest, safe.safe, now, safe.reason)


def _given_up(course: Course, one: Seen, now: float) -> bool:
    """Is a rank that lacks copies waited for no longer?"""
    if now - one.moved > SILENT_SECONDS or now - course.began > MOST_SECONDS:
        return True
    if course.first is None:
        return False
    return now - course.first > max(STRAGGLING_SECONDS, STRAGGLING * (course.first - course.began))


def _unheard(before: Course, newest: Save, rank: int, now: float) -> Course:
    """A rank's home may be lost, and then the others need what is safe: that stays as it is."""
    if now - before.began > MOST_SECONDS:
        return _moved_on(before, newest, now, f"the node of rank {rank} does not say how far it is")
    return before


def _moved_on(before: Course, newest: Save, now: float, why: str) -> Course:
    return before if newest == before.current else _next(before, newest, before.safe, now, why)


def _next(before: Course, newest: Save, safe: Save | None, now: float, why: str) -> Course:
    reason = f"{_named(newest)} is the newest clean one, and {why}"
    return Course(newest, safe, now, None, reason)


def _named(save: Save | None) -> str:
    return f"step {save.step}" if save is not None else "no step"


MOST_MORE = 2


def lent(asked: int, nbytes: int, ranks: int, free: int, *, several: bool) -> tuple[int, str]:
    """How many images' memory a rank is lent, and why: more than was asked for where copies go to other nodes.

    Beside the newest image and the one that is being captured, the one that is on its way should stay, and where a node
    may be lost that has only a part of the ranks (`several` nodes) the one that is safe.

    Args:
        asked: by the trainer.
        nbytes: of one image.
        ranks: of this node that have no memory yet.
        free: what may still be lent. It must do for twice as much: memory of a new layout is lent before that of the
            old one is given back.
    """
    for more in range(MOST_MORE if several else 1, 0, -1):
        if 2 * ranks * (asked + more) * nbytes <= free:
            return asked + more, f"{more} more than asked for, for what goes to other nodes"
    return asked, "as asked for; there is no room for an image that goes to other nodes"
