"""Steps × copies of a cluster: which are clean, which are dirty and why, and where training would go back to.

A pure table. Each node says what it holds; the table knows of every snapshot which ranks' images can still be had and
from where. A snapshot is one *attempt* at a step: images of two attempts never make a snapshot together, whatever
their number.

    in flight   some rank's image is missing and may still come
    clean       every rank's image is sealed on a node that is there
    dirty       an image is missing and will not come; it stays dirty, whoever comes back (only a stored manifest proves
                that it was whole after all)
    past        was clean, and images of it made room for newer ones
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Key(msgspec.Struct, frozen=True, order=True, gc=False):
    """One attempt at a step of a run; `attempt` is equal on all ranks."""

    run: str
    step: int
    attempt: str = ""

    def __str__(self) -> str:
        return f"step {self.step}"


ALL = -1
"""As a rank: the tier has every rank's image, its manifest says so."""

PROVEN = frozenset({"disk", "partner"})
"""Only images of clean steps get there. So one that is there alone makes its step no dirtier: the others may come back,
with the nodes whose disks have them.
"""

MOST_MARKS = 10_000


class Holding(msgspec.Struct, frozen=True, gc=False):
    """A node has a sealed image of this rank (or of `ALL`) in this tier."""

    key: Key
    rank: int
    tier: str


class Home(msgspec.Struct, frozen=True, gc=False):
    """Where a rank trains: its node, and whether its trainer is there."""

    run: str
    rank: int
    world: int
    trains: bool


class Standing(Enum):
    flight = "in flight"
    clean = "clean"
    dirty = "dirty"
    past = "past"


class Verdict(msgspec.Struct, frozen=True):
    """Where a snapshot stands, and why."""

    key: Key
    standing: Standing
    reason: str
    have: int
    world: int
    tiers: tuple[str, ...]


class Target(msgspec.Struct, frozen=True):
    """The snapshot to go back to, None when there is none, and why this one."""

    key: Key | None
    reason: str


@dataclass(slots=True)
class Snapshot:
    """What is known of one: `holders[rank]` are the (node, tier) that have its image, or those of `ALL`."""

    key: Key
    since: float
    holders: dict[int, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)
    dirty: str = ""
    clean_since: float | None = None


@dataclass(slots=True)
class RunTable:
    """One run.

    Attributes:
        world: how many ranks, 0 while nobody has said.
        homes: where each rank trains or did last: its node, and whether its trainer is there.
        latest: what each rank sealed last, there.
    """

    world: int = 0
    homes: dict[int, tuple[str, bool]] = field(default_factory=dict)
    latest: dict[int, Key] = field(default_factory=dict)
    snapshots: dict[Key, Snapshot] = field(default_factory=dict)


@dataclass(slots=True)
class Steps:
    """The table of all runs. One owner drives it."""

    runs: dict[str, RunTable] = field(default_factory=dict)
    marks: dict[Key, str] = field(default_factory=dict)
    _said: dict[str, frozenset[Holding]] = field(default_factory=dict)
    _homes: dict[str, frozenset[Home]] = field(default_factory=dict)

    def say(self, node: str, homes: Iterable[Home], holdings: Iterable[Holding], now: float) -> None:
        """What the node has now; what it said before and does not say again is gone from it."""
        there = frozenset(homes)
        for home in self._homes.get(node, frozenset()) - there:
            table = self.runs.get(home.run)
            if table is not None and table.homes.get(home.rank, ("", False))[0] == node:
                table.homes[home.rank] = (node, False)
        for home in there - self._homes.get(node, frozenset()):
            table = self.runs.setdefault(home.run, RunTable())
            known = table.homes.get(home.rank)
            if home.trains or known is None or known[0] == node:
                table.world = home.world
                table.homes[home.rank] = (node, home.trains)
        self._homes[node] = there
        before, after = self._said.get(node, frozenset()), frozenset(holdings)
        for holding in before - after:
            self._drop(node, holding)
        # Rising, so that of what is news at once the newest counts as sealed last.
        for holding in sorted(after - before, key=lambda holding: holding.key.step):
            self._add(node, holding, now)
        self._said[node] = after

    def know(self, run: str, world: int) -> None:
        """The run has so many ranks, as those say who keep copies; where they train counts more."""
        table = self.runs.get(run)
        if table is not None and not table.homes:
            table.world = world

    def gone(self, node: str, now: float) -> None:
        """Nothing that the node held can be had any more; its ranks train nowhere."""
        if node in self._said:
            self.say(node, (), (), now)
            del self._said[node], self._homes[node]

    def mark(self, key: Key, reason: str) -> None:
        """The snapshot is dirty, for good."""
        self.marks.setdefault(key, reason)
        while len(self.marks) > MOST_MARKS:
            del self.marks[next(iter(self.marks))]
        table = self.runs.get(key.run)
        if table is not None and key in table.snapshots:
            table.snapshots[key].dirty = self.marks[key]

    def holders(self, key: Key, rank: int) -> frozenset[tuple[str, str]]:
        """The (node, tier) that have this image."""
        table = self.runs.get(key.run)
        holders = table.snapshots[key].holders if table and key in table.snapshots else {}
        return frozenset(holders.get(rank, ())) | frozenset(holders.get(ALL, ()))

    def judge(self, run: str, absent: Mapping[str, str], now: float) -> tuple[Verdict, ...]:
        """Where every snapshot of the run stands, newest step first. What becomes dirty here stays so.

        `absent` names the nodes that are not there, each with the reason.
        """
        table = self.runs[run]
        verdicts = [self._judge(table, snapshot, absent, now) for snapshot in table.snapshots.values()]
        for snapshot in [snapshot for snapshot in table.snapshots.values() if not snapshot.holders]:
            del table.snapshots[snapshot.key]
        return tuple(sorted(verdicts, key=lambda verdict: verdict.key, reverse=True))

    def _judge(self, table: RunTable, snapshot: Snapshot, absent: Mapping[str, str], now: float) -> Verdict:
        have = table.world if ALL in snapshot.holders else len(snapshot.holders)
        standing, reason = self._standing(table, snapshot, absent)
        if standing is Standing.clean and snapshot.clean_since is None:
            snapshot.clean_since = now
        if standing is Standing.dirty and not snapshot.dirty:
            self.mark(snapshot.key, reason)
        return Verdict(snapshot.key, standing, reason, have, table.world, tuple(sorted(snapshot.tiers)))

    def _standing(self, table: RunTable, snapshot: Snapshot, absent: Mapping[str, str]) -> tuple[Standing, str]:
        if ALL in snapshot.holders:
            return Standing.clean, "its manifest is stored"
        if snapshot.dirty:
            return Standing.dirty, snapshot.dirty
        if not table.world:
            return Standing.flight, "nobody has said yet how many ranks the run has"
        missing = sorted(_everybody(table.world) - snapshot.holders.keys())
        if not missing:
            return Standing.clean, f"sealed by {_all_of(table.world)}"
        if snapshot.clean_since is not None:
            return Standing.past, f"was clean; the image of rank {missing[0]} is not there any more"
        if not PROVEN.isdisjoint(snapshot.tiers):
            return Standing.past, f"was clean, as a disk says; the image of rank {missing[0]} is not there just now"
        lost: list[tuple[int, str]] = []
        for rank in missing:
            home = table.homes.get(rank)
            if home is None:
                continue  # not heard yet: it may have it
            if home[0] in absent:
                lost.append((rank, f"was on node {home[0]}, which is gone: {absent[home[0]]}"))
            elif not home[1]:
                lost.append((rank, f"has no trainer on node {home[0]} any more"))
            elif (latest := table.latest.get(rank)) is not None and _passed(snapshot.key, latest):
                lost.append((rank, f"is at {latest} already"))
        if lost:
            more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
            return Standing.dirty, f"rank {lost[0][0]} {lost[0][1]}{more}"
        return Standing.flight, f"{len(missing)} of {table.world} ranks are to come, rank {missing[0]} the first"

    def _add(self, node: str, holding: Holding, now: float) -> None:
        table = self.runs.setdefault(holding.key.run, RunTable())
        snapshot = table.snapshots.get(holding.key)
        if snapshot is None:
            dirty = self.marks.get(holding.key, "")
            snapshot = table.snapshots[holding.key] = Snapshot(holding.key, now, dirty=dirty)
        places = snapshot.holders.get(holding.rank, ())
        if (node, holding.tier) in places:
            return
        snapshot.holders[holding.rank] = (*places, (node, holding.tier))
        snapshot.tiers[holding.tier] = snapshot.tiers.get(holding.tier, 0) + 1
        if holding.tier == "host" and table.homes.get(holding.rank, ("", False))[0] == node:
            table.latest[holding.rank] = holding.key

    def _drop(self, node: str, holding: Holding) -> None:
        table = self.runs[holding.key.run]
        snapshot = table.snapshots.get(holding.key)
        if snapshot is None:
            return
        places = snapshot.holders.get(holding.rank, ())
        left = tuple(place for place in places if place != (node, holding.tier))
        if left == places:
            return
        if left:
            snapshot.holders[holding.rank] = left
        else:
            del snapshot.holders[holding.rank]
        count = snapshot.tiers[holding.tier] - 1
        if count:
            snapshot.tiers[holding.tier] = count
        else:
            del snapshot.tiers[holding.tier]


@lru_cache(maxsize=8)
def _everybody(world: int) -> frozenset[int]:
    return frozenset(range(world))


def _passed(key: Key, latest: Key) -> bool:
    """Within one attempt, whoever sealed a later step does not come back to an earlier one."""
    return key.attempt == latest.attempt and latest.step > key.step


def _all_of(world: int) -> str:
    return "its one rank" if world == 1 else f"all {world} ranks"


def target(verdicts: Iterable[Verdict]) -> Target:
    """The newest clean snapshot; `verdicts` as `Steps.judge` gives them."""
    passed: list[Verdict] = []
    for verdict in verdicts:
        if verdict.standing is Standing.clean:
            newer = f"; {passed[-1].key} is {passed[-1].standing.value}: {passed[-1].reason}" if passed else ""
            return Target(verdict.key, f"{verdict.key} is the newest with {_all_of(verdict.world)}{newer}")
        passed.append(verdict)
    if passed:
        return Target(None, f"no step is clean; {passed[0].key} is {passed[0].standing.value}: {passed[0].reason}")
    return Target(None, "nothing is saved yet")
