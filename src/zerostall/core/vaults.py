"""In whose memory a GPU's images are kept: a pure decision over which GPUs reach which, with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Link(msgspec.Struct, frozen=True):
    """How one GPU reaches another's memory.

    Attributes:
        rank: the driver's; 0 is the fastest kind.
        nvlink: whether it is NVLink rather than PCIe.
    """

    rank: int
    nvlink: bool

    @property
    def words(self) -> str:
        return f"{'NVLink' if self.nvlink else 'PCIe'}, rank {self.rank}"


Links = dict[tuple[str, str], Link]
"""By the GPU that copies and the one whose memory it reaches; where there is no access there is no entry."""


class Peer(msgspec.Struct, frozen=True):
    """How images are kept in other GPUs' memory.

    Attributes:
        copies: 2 keeps a mirror of each in a second GPU's memory, so that it outlives one of the vaults.
    """

    copies: int = 1

    def __post_init__(self) -> None:
        if self.copies not in (1, 2):
            raise ValueError(f"copies={self.copies!r}: 1, or 2 for a mirror of each image on a second GPU")


class Choice(msgspec.Struct, frozen=True):
    """The GPU that lends its memory, None for none, and why."""

    gpu: str | None
    reason: str


_Cost = tuple[bool, int]
"""The less the better: over PCIe, the driver's rank."""


def place(gpus: Sequence[str], links: Mapping[tuple[str, str], Link]) -> dict[str, Choice]:
    """Each GPU's peer: the best link it can have with every GPU lending to as few as can be.

    `gpus` in the order in which all processes of the node see them, so that each decides the same. Among equal links
    the next one round takes it: a ring where all reach all, pairs where only pairs do. What cannot have one to itself
    shares the best that it reaches.
    """
    costs = {pair: _cost(link) for pair, link in links.items()}
    lenders, alone = _lenders(gpus, costs, {})
    found: dict[str, Choice] = {}
    for gpu in gpus:
        lender = lenders.get(gpu)
        if lender is None:
            why = "it is the only GPU that this process sees" if len(gpus) < 2 else "it reaches no other GPU's memory"
            found[gpu] = Choice(None, why)
            continue
        reached = sum((gpu, other) in links for other in gpus)
        shared = f"one of {reached} that it reaches, and it lends to no other" if gpu in alone else _SHARED
        found[gpu] = Choice(lender, f"over {links[gpu, lender].words}; {shared}")
    return found


def mirror(
    gpus: Sequence[str], links: Mapping[tuple[str, str], Link], peers: Mapping[str, Choice]
) -> dict[str, Choice]:
    """Where the second copy of each GPU's images goes: to neither its own memory nor its peer's.

    The second GPU fetches it from the peer, and whoever restores reads it there: both need a link, and the worse one
    counts. Again every GPU keeps as few as can be; where some must keep more, those that lend least.
    """
    costs: dict[tuple[str, str], _Cost] = {}
    for gpu in gpus:
        first = peers[gpu].gpu
        for other in gpus:
            if first is None or other in (gpu, first) or (other, first) not in links or (gpu, other) not in links:
                continue
            costs[gpu, other] = max(_cost(links[other, first]), _cost(links[gpu, other]))
    load = dict.fromkeys(gpus, 0)
    for choice in peers.values():
        if choice.gpu is not None:
            load[choice.gpu] += 1
    lenders, alone = _lenders(gpus, costs, load)
    found: dict[str, Choice] = {}
    for gpu in gpus:
        first, second = peers[gpu].gpu, lenders.get(gpu)
        if first is None:
            found[gpu] = Choice(None, "there is no first copy")
        elif second is None:
            why = "a second copy takes three GPUs" if len(gpus) < 3 else "no third GPU reaches the first copy"
            found[gpu] = Choice(None, why)
        else:
            shared = "it keeps no other's" if gpu in alone else _SHARED
            found[gpu] = Choice(second, f"from the first copy over {links[second, first].words}; {shared}")
    return found


_SHARED = "shared, for no other is left"


def _lenders(
    gpus: Sequence[str], costs: Mapping[tuple[str, str], _Cost], load: Mapping[str, int]
) -> tuple[dict[str, str], set[str]]:
    """A lender for each GPU that can have one, at the least cost; and which of them have it to themselves."""
    lends: dict[str, str] = {}  # by lender
    for most in sorted(set(costs.values())):
        for gpu in gpus:
            if gpu not in lends.values():
                _match(gpu, gpus, costs, most, lends, set())
    found = {borrower: lender for lender, borrower in lends.items()}
    alone = set(found)
    lent = {gpu: load.get(gpu, 0) + (gpu in lends) for gpu in gpus}
    for gpu in gpus:
        reached = [other for other in _round(gpu, gpus) if (gpu, other) in costs]
        if gpu not in found and reached:
            lender = found[gpu] = min(reached, key=lambda other: (costs[gpu, other], lent[other]))
            lent[lender] += 1
    return found, alone


def _match(
    gpu: str,
    gpus: Sequence[str],
    costs: Mapping[tuple[str, str], _Cost],
    most: _Cost,
    lends: dict[str, str],
    asked: set[str],
) -> bool:
    """Find `gpu` a lender of its own, moving others' on where they have another (an augmenting path)."""
    for other in _round(gpu, gpus):
        cost = costs.get((gpu, other))
        if cost is None or cost > most or other in asked:
            continue
        asked.add(other)
        if other not in lends or _match(lends[other], gpus, costs, most, lends, asked):
            lends[other] = gpu
            return True
    return False


def _cost(link: Link) -> _Cost:
    return (not link.nvlink, link.rank)


def _round(gpu: str, gpus: Sequence[str]) -> list[str]:
    at = list(gpus).index(gpu)
    return [*gpus[at + 1 :], *gpus[:at]]
