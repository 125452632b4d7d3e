"""Which image comes into whose memory before anybody asks, and from which copy: pure decisions with reasons."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.rollback import Key, RunTable, Steps
from zerostall.core.topology import Place, hops

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

MEMORY = ("host", "replica")


class Errand(msgspec.Struct, frozen=True):
    """Bring one rank's image to a node's memory.

    Attributes:
        node: where to.
        source, tier: where from.
    """

    key: Key
    rank: int
    node: str
    source: str
    tier: str
    reason: str

    def words(self) -> str:
        return f"to {self.node}: {self.reason}"


class Errands(msgspec.Struct, frozen=True):
    """What is to be brought, and of the ranks that wait for a place or for a copy, why."""

    errands: tuple[Errand, ...]
    waiting: tuple[tuple[int, str], ...]


def decide(steps: Steps, key: Key, nodes: Mapping[str, Place], spare: Collection[str]) -> Errands:
    """What must be fetched so that every rank that does not train now finds its image of `key` at hand.

    Args:
        key: the snapshot to go back to.
        nodes: those that are there, and where they stand.
        spare: those of them on which nothing trains; ranks of a node that is gone go to one of these, together.
    """
    table = steps.runs[key.run]
    errands: list[Errand] = []
    waiting: list[tuple[int, str]] = []
    asked: Counter[str] = Counter()
    idle = sorted(
        rank for rank, (home, trains) in table.homes.items() if rank < table.world and not (trains and home in nodes)
    )
    homes = _new_homes(steps, key, table, idle, nodes, spare)
    for rank in idle:
        home = table.homes[rank][0]
        node = home if home in nodes else homes.get(home)
        if node is None:
            waiting.append((rank, f"node {home} is gone and no spare node is there"))
            continue
        holders = [(holder, tier) for holder, tier in steps.holders(key, rank) if holder in nodes]
        if any(holder == node and tier in MEMORY for holder, tier in holders):
            continue
        if not holders:
            waiting.append((rank, f"no copy of {key} is in reach"))
            continue
        far = {holder: distance(node, holder, nodes) for holder in holders}
        source, tier = min(holders, key=lambda holder: (far[holder], asked[holder[0]], holder))
        asked[source] += 1
        why = f"rank {rank} will ask for {key}" + ("" if node == home else f", in place of node {home}")
        errands.append(Errand(key, rank, node, source, tier, f"{why}; its nearest copy is {source}'s {tier}"))
    return Errands(tuple(errands), tuple(waiting))


def distance(node: str, holder: tuple[str, str], nodes: Mapping[str, Place]) -> int:
    """How far a copy is: own memory, own disk, another's memory by hops, another's disk by hops, object store."""
    source, tier = holder
    if tier == "remote":
        return 60
    if source == node:
        return 0 if tier in MEMORY else 10
    return (20 if tier in MEMORY else 40) + hops(nodes[node], nodes[source])


def _new_homes(
    steps: Steps,
    key: Key,
    table: RunTable,
    idle: Sequence[int],
    nodes: Mapping[str, Place],
    spare: Collection[str],
) -> dict[str, str]:
    """A spare node for each one that is gone: the one that has most of its images already, else any."""
    ranks: dict[str, list[int]] = {}
    for rank in idle:
        if (home := table.homes[rank][0]) not in nodes:
            ranks.setdefault(home, []).append(rank)
    free = sorted(name for name in spare if name in nodes)
    chosen: dict[str, str] = {}
    for home in sorted(ranks):
        if not free:
            break
        have: Counter[str] = Counter()
        for rank in ranks[home]:
            have.update({node for node, tier in steps.holders(key, rank) if tier in MEMORY})
        chosen[home] = min(free, key=lambda name: (-have[name], name))
        free.remove(chosen[home])
    return chosen
