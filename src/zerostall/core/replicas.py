"""What a node that keeps another's images may drop, and what it should fetch next: pure decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

    from zerostall.core.candidates import Past


def unneeded(here: Set[Past], home: Set[Past], clean: Set[Past], named: Set[Past] = frozenset()) -> frozenset[Past]:
    """Which images kept here may go, given what the rank's home has now.

    An image that the home does not have goes when it is newer than all that the home has (the run went back before
    it), of a number that the home has in another make (that one counts), or when a newer one of the home's is here
    that is of a clean step (it made room). Any other stays: until a newer one is whole here, and all ranks have its
    step, it is the best there is. A home that has nothing says nothing.

    Args:
        clean: images of steps that are known to be clean.
        named: images that the home says should stay; they do not make room.
    """
    if not home:
        return frozenset()
    newest = max(past.step for past in home)
    numbers = {past.step for past in home}
    followed = max((past.step for past in here & home & clean), default=-1)
    return frozenset(
        past
        for past in here - home
        if past.step > newest or past.step in numbers or (past.step < followed and past not in named)
    )


def kept(here: Set[Past], clean: Set[Past], named: Set[Past] = frozenset()) -> frozenset[int]:
    """Steps that no newer image may take the place of: those that the home has `named`, else the newest that is known
    to be clean.
    """
    return frozenset(past.step for past in here & named or sorted(here & clean)[-1:])


def next_stored(
    here: Set[Past], settled: Set[Past], stored: Set[Past], rested: float, every: float
) -> tuple[Past | None, str]:
    """Which of the images kept here is to be written to this node's disk now, and why it is that one, or none.

    Args:
        settled: images that the home says are of clean steps; only such are worth a disk.
        rested: seconds since the last write.
        every: seconds from one write to the next, by the run's own policy for its disk.
    """
    newest = max(here & settled, default=None)
    if newest is None:
        return None, "nothing that is kept here is clean yet"
    if newest in stored:
        return None, f"step {newest.step} is there"
    if rested < every:
        return None, f"the run's policy writes every {every:g} s, the last time was {rested:.0f} s ago"
    return newest, f"step {newest.step} is the newest clean one here"


def next_wanted(here: Set[Past], home: Set[Past], wanted: Iterable[Past] | None = None) -> Past | None:
    """Which image is to be fetched: the first that is `wanted` and not here; None when there is none.

    A home that names none wants its newest to be here. What comes between is not made up for: latest wins.
    """
    if wanted is not None:
        return next((past for past in wanted if past not in here), None)
    if not home:
        return None
    newest = max(home)
    return None if newest in here else newest
