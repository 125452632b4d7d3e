"""In which order a restore tries the copies there are: a pure decision, with a reason for each copy left
out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TIERS = ("frozen", "peer", "host", "replica", "disk", "remote")
"""The tiers, nearest first."""

_NEARNESS = {tier: index for index, tier in enumerate(TIERS)}


class Past(msgspec.Struct, frozen=True, order=True):
    """A step that a run has left behind by going back before it.

    This very one, known by when it was `created`, and no other of its number: the run will reach that number again.
    """

    step: int
    created: float


class Copy(msgspec.Struct, frozen=True):
    """One step in one tier.

    Attributes:
        tier: one of TIERS.
        clean: every rank's image is sealed there, and no check has failed.
        reason: why it is not clean.
        created: when rank 0 saved the step, which tells it from others of its number.
        world: how many ranks saved it.
    """

    step: int
    tier: str
    clean: bool = True
    reason: str = ""
    created: float = 0.0
    world: int = 1

    @property
    def label(self) -> str:
        """Return what messages call it."""
        return f"step {self.step} in {self.tier}"


class Order(msgspec.Struct, frozen=True):
    """What to try.

    Attributes:
        ordered: clean copies, the first to try in front.
        left_out: label and reason of each copy that would have had a place in there, were it clean; same
            order.
    """

    ordered: tuple[Copy, ...]
    left_out: tuple[tuple[str, str], ...]


def order(copies: Iterable[Copy], step: int | None = None) -> Order:
    """Order copies for a restore: the newest step first, and of a step the nearest tier first.

    A `step` that is asked for is the only one: an explicit restore never gives another. Copies of other steps
    then count as if they were not there. ValueError for a tier that does not exist.
    """
    wanted = [copy for copy in copies if _nearness(copy) >= 0 and step in (None, copy.step)]
    wanted.sort(key=lambda copy: (-copy.step, _nearness(copy)))
    return Order(
        tuple(copy for copy in wanted if copy.clean),
        tuple((copy.label, copy.reason or "not clean") for copy in wanted if not copy.clean),
    )


class Common(msgspec.Struct, frozen=True):
    """What all ranks try together.

    Attributes:
        ordered: steps of which every rank has a clean copy, the first to try in front.
        left_out: label and reason of each copy, or step, that would have had a place in there.
        seen: every step that some rank has seen a copy of.
    """

    ordered: tuple[Past, ...]
    left_out: tuple[tuple[str, str], ...]
    seen: tuple[Past, ...]


def common(copies: Sequence[Sequence[Copy]], step: int | None = None) -> Common:
    """Decide what to restore from the copies that each rank can get: the newest step that every rank has first.

    Of two steps of one number the one that was saved later comes first: no rank mixes them. Otherwise as `order`.
    """
    orders = [order(of_rank, step) for of_rank in copies]
    alone = len(copies) == 1
    left_out: list[tuple[str, str]] = []
    for rank, one in enumerate(orders):
        left_out += [(label if alone else f"{label} of rank {rank}", reason) for label, reason in one.left_out]
    have = [{Past(copy.step, copy.created) for copy in one.ordered} for one in orders]
    known = sorted(set().union(*have), reverse=True)
    for past in known:
        lack = [rank for rank, pasts in enumerate(have) if past not in pasts]
        if lack:
            label = f"rank {lack[0]}" if len(lack) == 1 else f"{len(lack)} ranks, rank {lack[0]} the first,"
            left_out.append((f"step {past.step}", f"{label} cannot get it"))
    seen = {Past(copy.step, copy.created) for of_rank in copies for copy in of_rank}
    everywhere = set.intersection(*have)
    return Common(tuple(past for past in known if past in everywhere), tuple(left_out), tuple(sorted(seen)))


def went_back(past: Past, others: Iterable[Past]) -> str:
    """Why a copy is of a past that the run has left, by when it and others were saved; or "".

    A run that goes back before a step saves lower ones later, and then that step's number anew. The copy is set aside
    when the next step gets there, or goes when its keeper hears of it; until then it must not be taken for the newest.
    Copies of one folder say nothing of each other: what was imported into it came in any order.
    """
    if past.created:
        for other in others:
            if other.step < past.step and other.created > past.created:
                return f"training went back before it: step {other.step} was saved later"
    return ""


def left_behind(past: Past, others: Iterable[Past]) -> str:
    """As `went_back`, of a copy that lies far away: any nearer one of its number counts instead."""
    known = [other for other in others if other.created]
    if past.created and any(other.step == past.step and other.created != past.created for other in known):
        return "another one of that number is nearer"
    return went_back(past, known)


def _nearness(copy: Copy) -> int:
    index = _NEARNESS.get(copy.tier)
    if index is None:
        raise ValueError(f"there is no tier {copy.tier!r}, only {', '.join(TIERS)}")
    return index
