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


class Choice(msgspec.Struct, frozen=True):
    """The GPU that lends its memory, None for none, and why."""

    gpu: str | None
    reason: str


def place(gpus: Sequence[str], links: Mapping[tuple[str, str], Link]) -> dict[str, Choice]:
    """Each GPU's peer: the best link it can have with every GPU lending to as few as can be.

    `gpus` in the order in which all processes of the node see them, so that each decides the same. Among equal links
    the next one round takes it: a ring where all reach all, pairs where only pairs do. What cannot have one to itself
    shares the best that it reaches.
    """
    lends: dict[str, str] = {}  # by lender
    ranks = sorted({(not link.nvlink, link.rank) for link in links.values()})
    for most in ranks:
        for gpu in gpus:
            if gpu not in lends.values():
                _match(gpu, gpus, links, most, lends, set())
    chosen = {borrower: lender for lender, borrower in lends.items()}
    load = dict.fromkeys(gpus, 0) | dict.fromkeys(lends, 1)
    found: dict[str, Choice] = {}
    for gpu in gpus:
        reached = [other for other in _round(gpu, gpus) if (gpu, other) in links]
        if lender := chosen.get(gpu):
            alone = f"over {links[gpu, lender].words}; one of {len(reached)} that it reaches, and it lends to no other"
            found[gpu] = Choice(lender, alone)
        elif reached:
            lender = min(reached, key=lambda other: (_cost(links[gpu, other]), load[other]))
            load[lender] += 1
            found[gpu] = Choice(lender, f"over {links[gpu, lender].words}; shared, for no other is left")
        else:
            why = "it is the only GPU that this process sees" if len(gpus) < 2 else "it reaches no other GPU's memory"
            found[gpu] = Choice(None, why)
    return found


def _match(
    gpu: str,
    gpus: Sequence[str],
    links: Mapping[tuple[str, str], Link],
    most: tuple[bool, int],
    lends: dict[str, str],
    asked: set[str],
) -> bool:
    """Find `gpu` a lender of its own, moving others' on where they have another (an augmenting path)."""
    for other in _round(gpu, gpus):
        link = links.get((gpu, other))
        if link is None or _cost(link) > most or other in asked:
            continue
        asked.add(other)
        if other not in lends or _match(lends[other], gpus, links, most, lends, asked):
            lends[other] = gpu
            return True
    return False


def _cost(link: Link) -> tuple[bool, int]:
    return (not link.nvlink, link.rank)


def _round(gpu: str, gpus: Sequence[str]) -> list[str]:
    at = list(gpus).index(gpu)
    return [*gpus[at + 1 :], *gpus[:at]]
