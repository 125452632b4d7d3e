"""What a node that keeps another's images may drop, and what it should fetch next: pure decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from zerostall.core.candidates import went_back

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

    from zerostall.core.candidates import Past

STALE_SECONDS = 7 * 24 * 3600.0
"""What was written so long before the newest image on a partner's disk is no more than its run's past."""


class Stored(msgspec.Struct, frozen=True):
    """One rank's image of a clean step on a partner's disk, and when it was written there."""

    run: str
    rank: int
    step: int
    written: float


def outdated(stored: Iterable[Stored]) -> tuple[frozenset[Stored], frozenset[Stored]]:
    """Which images may go that no home has spoken of for long, and which are as old and stay: pure retention.

    However old, each rank's newest stays, and that of the newest step that all of the run's ranks have here: it may be
    all that is left of the run. Ages are counted from the newest image here, not from now: a node that rested, or
    whose clock is ahead, loses nothing.
    """
    ranks: dict[str, dict[int, set[int]]] = {}
    every = tuple(stored)
    for one in every:
        ranks.setdefault(one.run, {}).setdefault(one.rank, set()).add(one.step)
    newest = {(run, rank, max(steps)) for run, held in ranks.items() for rank, steps in held.items()}
    for run, held in ranks.items():
        common = max(set[int].intersection(*held.values()), default=-1)
        newest |= {(run, rank, common) for rank in held}
    since = max((one.written for one in every), default=0.0) - STALE_SECONDS
    old = {one for one in every if one.written < since}
    stays = {one for one in old if (one.run, one.rank, one.step) in newest}
    return frozenset(old - stays), frozenset(stays)


def unneeded(
    here: Set[Past],
    home: Set[Past],
    clean: Set[Past],
    named: Set[Past] = frozenset(),
    void: Iterable[Past] = (),
) -> frozenset[Past]:
    """Which images kept here may go, given what the rank's home has now.

    An image that the home does not have goes when it is newer than all that the home has (the run went back before
    it), of a number that the home has in another make (that one counts), or when a newer one of the home's is here
    that is of a clean step (it made room). Any other stays: until a newer one is whole here, and all ranks have its
    step, it is the best there is. So is one of a clean step whose number was saved anew, until that make is here and
    clean, too; or for good, where that make came to nothing. A home that has nothing says nothing.

    Args:
        clean: images of steps that are known to be clean.
        named: images that the home says should stay; they do not make room.
        void: images that the home had and that are worth nothing.
    """
    if not home:
        return frozenset()
    newest = max(past.step for past in home)
    numbers = {past.step for past in home}
    instead = {past.step for past in here & home & clean}
    followed = max(instead, default=-1)
    spoiled = {past.step: past for past in sorted(void)}

    def goes(past: Past) -> bool:
        if past.step in numbers and (past not in clean or past.step in instead):
            return True
        if past.step < followed or past.step in numbers:
            return past.step < followed and past not in named
        if past.step > newest and past in clean and past < spoiled.get(past.step, past):
            return bool(went_back(past, home))
        return past.step > newest

    return frozenset(past for past in here - home if goes(past))


def outlived(clean: Iterable[Past], void: Iterable[Past]) -> tuple[frozenset[Past], frozenset[Past]]:
    """Images of clean steps whose number was saved anew, and those makes of it that came to nothing: of `void`."""
    kept = frozenset(clean)
    makes = frozenset(one for one in void if any(past.step == one.step and past < one for past in kept))
    return frozenset(past for past in kept if any(past.step == one.step and past < one for one in makes)), makes


def makes_way(past: Past, other: Past, clean: Set[Past]) -> bool:
    """May `past` be put where `other` is, of which no two of one number fit? Not before it is known to be as good."""
    return other == past or other.step != past.step or other not in clean or past in clean


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


def next_wanted(
    here: Set[Past], home: Set[Past], wanted: Iterable[Past] | None = None, clean: Set[Past] = frozenset()
) -> Past | None:
    """Which image is to be fetched: the first that is `wanted` and not here; None when there is none.

    A home that names none wants its newest to be here. What comes between is not made up for: latest wins. Another make
    of what is here and `clean` is not fetched before it is clean itself.
    """
    asked = tuple(wanted) if wanted is not None else (max(home),) if home else ()
    lacking = (past for past in asked if past not in here)
    return next((past for past in lacking if all(makes_way(past, other, clean) for other in here)), None)
