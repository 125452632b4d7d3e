"""What a node that keeps another's images may drop, and what it should fetch next: pure decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set

    from zerostall.core.candidates import Past


def unneeded(here: Set[Past], home: Set[Past]) -> frozenset[Past]:
    """Which images kept here may go, given what the rank's home has now.

    An image that the home does not have goes when it is newer than all that the home has (the run went back before
    it), of a number that the home has in another make (that one counts), or when a newer one of the home's is here
    (it made room). Any other stays: until a newer one is whole here, it is the best there is. A home that has nothing
    says nothing.
    """
    if not home:
        return frozenset()
    newest = max(past.step for past in home)
    numbers = {past.step for past in home}
    followed = max((past.step for past in here & home), default=-1)
    return frozenset(past for past in here - home if past.step > newest or past.step in numbers or past.step < followed)


def next_wanted(here: Set[Past], home: Set[Past]) -> Past | None:
    """The newest image of the home that is not here and newer than what is; None when there is none.

    What comes between is not made up for: latest wins.
    """
    if not home:
        return None
    newest = max(home)
    return None if newest in here else newest
