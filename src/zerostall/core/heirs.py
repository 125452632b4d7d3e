"""Which run an empty folder goes on with, where the folder that the run had is gone with its node: a pure decision.

Each node may have folders of its own, at the same path. So an empty folder is either a new run's, or that of a run
whose node was lost and that has copies elsewhere. Wrongly begun anew, training is lost; wrongly gone on with, one run
gets another's weights. So a run is gone on with only where its name says so, or where all nodes that trained it are
gone; and a node that was killed just now, of which nobody knows it yet, is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from zerostall.core.manifest import RunFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Claim(msgspec.Struct, frozen=True):
    """A run of which a clean step can be had.

    Attributes:
        where, name: the folder that it had, and what its user calls it.
        homes: nodes that train it or did last, as far as they are there.
        trains: on one of them a trainer is attached.
        silent: seconds since the one that was heard last said anything.
    """

    run: str
    name: str
    where: str
    homes: tuple[str, ...]
    trains: bool
    silent: float


class Heir(msgspec.Struct, frozen=True):
    """The run to go on with, "" for none, and why; `wait`: nobody can say yet."""

    run: str
    name: str
    reason: str
    wait: bool = False


def heir(claims: Iterable[Claim], where: str, name: str, asked: float) -> Heir:
    """Decide for an empty folder.

    Args:
        where, name: the folder, and what its user calls the run; "" for no name.
        asked: seconds since this was asked first: a node that was heard since then is there.
    """
    what = f"named {name!r}" if name else f"with the folder {where}"
    mine = [claim for claim in claims if (claim.name == name if name else not claim.name and claim.where == where)]
    if not mine:
        return Heir("", name, f"no run {what} is known that has a clean step")
    for claim in mine:
        if claim.homes and claim.silent >= asked and (claim.trains or not name):
            return Heir("", name, f"node {claim.homes[0]} has run {claim.run} and is to be heard once more", wait=True)
    free = [claim for claim in mine if not claim.trains and (name or not claim.homes)]
    if not free:
        how = "trains" if mine[0].trains else "was trained"
        hint = "" if name else "; to go on with it elsewhere give it a name, run="
        return Heir("", name, f"run {mine[0].run} {how} on node {mine[0].homes[0]}, which is there{hint}")
    if len(free) > 1:
        return Heir("", name, f"{len(free)} runs {what} have clean steps: {free[0].run}, {free[1].run}")
    gone = "" if free[0].homes else "; the node that trained it is gone"
    return Heir(free[0].run, free[0].name, f"run {free[0].run} {what} has a clean step on other nodes{gone}")


class Holding(msgspec.Struct, frozen=True):
    """What a folder holds: the facts of its run, and the newest step; -1 for none."""

    facts: RunFacts
    newest: int = -1


class Elder(msgspec.Struct, frozen=True):
    """What the ranks' folders hold already, None for nothing, and why.

    Attributes:
        clash: rank 0's folder is empty, and with the others' nobody can say what it goes on with.
    """

    holding: Holding | None
    reason: str = ""
    clash: bool = False


def elder(held: Sequence[Holding | None], name: str) -> Elder:
    """Decide for the folders of ranks that begin together on several nodes; rank 0's is gone by where it holds a run.

    Args:
        held: by each rank's folder, in order.
        name: what the user calls the run; "" for no name.
    """
    there: dict[str, list[int]] = {}
    for rank, holding in enumerate(held):
        if holding is not None:
            there.setdefault(holding.facts.run, []).append(rank)
    if not there:
        return Elder(None)
    if held[0] is None and len(there) > 1:
        runs = "; ".join(f"run {run} on {_ranks(ranks)}" for run, ranks in there.items())
        return Elder(None, f"the folder is empty on rank 0's node, and of several runs on others: {runs}", clash=True)
    first = next(holding for holding in held if holding is not None)
    run, ranks = first.facts.run, there[first.facts.run]
    newest = max(holding.newest for holding in held if holding is not None and holding.facts.run == run)
    what = f"run {first.facts.name!r}, id {run}," if first.facts.name else f"run {run}"
    if held[0] is None and name not in ("", first.facts.name) and (first.facts.name or newest >= 0):
        text = f"the folder is empty on rank 0's node, and of {what} on {_ranks(ranks)}; this trainer is run {name!r}"
        return Elder(None, text, clash=True)
    return Elder(Holding(first.facts, newest), f"{what} is in the folder of {_ranks(ranks)}")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")
