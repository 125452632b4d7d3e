"""Which nodes of a cluster are alive: heartbeats in, verdicts and reasons out. A pure table on its owner's clock.

Only the owner's own steady clock counts (seconds, any origin): what a node says of the time is never looked at, so a
clock that jumps anywhere in the cluster changes nothing.

    nobody ──join──▶ alive ──silent──▶ suspected ──silent longer──▶ lost ──join──▶ alive, in a new epoch
                       │                   └──heard──▶ alive            (what it still says in the old one is refused)
                       └──leave──▶ left ──join──▶ alive, in a new epoch

A node is fenced by its *epoch*: a number given when its agent joins, higher each time. What is said in an older
epoch, or in one that has ended, is refused; within an epoch each report has a rising *sequence*, so what comes twice
or late is known. Of two agents that claim one node the newer has it, and the older gets it back only once the newer
is gone.

Silence of which this process may be the cause is no evidence: time in which the owner itself stood still does not
count, and when most of the cluster falls silent at once the nodes stay suspected for `blind_after`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import msgspec

MOST_RETIRED = 64
"""How many superseded agents of a node are remembered; an older one would count as new."""

_CROWD = 3  # of fewer nodes, that most are silent says nothing about who is cut off


class Health(Enum):
    alive = "alive"
    suspected = "suspected"
    lost = "lost"
    left = "left"


class Patience(msgspec.Struct, frozen=True):
    """How long a node may be silent.

    Attributes:
        interval: seconds between the heartbeats it is asked for.
        suspect_after, lost_after: seconds of silence.
        blind_after: seconds of silence after which nodes are lost even while most of the cluster is silent.

    ValueError unless 0 < interval < suspect_after < lost_after <= blind_after.
    """

    interval: float = 1.0
    suspect_after: float = 2.5
    lost_after: float = 5.0
    blind_after: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.interval < self.suspect_after < self.lost_after <= self.blind_after:
            raise ValueError(
                f"interval={self.interval}, suspect_after={self.suspect_after}, lost_after={self.lost_after}, "
                f"blind_after={self.blind_after}: each must be larger than the one before, and none 0"
            )


@dataclass(slots=True)
class Node:
    """What is known of one node.

    Attributes:
        instance: names the agent that has the node now; no two agents have one name.
        epoch: in which that agent speaks.
        sequence: of its last report in this epoch.
        silent: seconds since it was heard, without the time in which nobody listened.
        retired: agents that were superseded, the newest last.
    """

    name: str
    instance: str
    epoch: int
    sequence: int = -1
    silent: float = 0.0
    health: Health = Health.alive
    reason: str = ""
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_RETIRED))

    @property
    def present(self) -> bool:
        """May what it holds still be had from it?"""
        return self.health in (Health.alive, Health.suspected)


class Admission(msgspec.Struct, frozen=True):
    """Whether an agent has the node now: its epoch, or None, and why; `changed` when the epoch is a new one."""

    epoch: int | None
    reason: str
    changed: bool = False


class Hearing(Enum):
    """What to do with a report."""

    news = "news"
    repeated = "repeated"  # the last one again: answer, change nothing
    late = "late"  # an older one: nothing in it is true any more
    fenced = "fenced"  # of an epoch that has ended: the agent must join again
    unknown = "unknown"  # never joined here


class Verdict(msgspec.Struct, frozen=True):
    hearing: Hearing
    reason: str


class Change(msgspec.Struct, frozen=True):
    """A node's health is another one now, and why."""

    node: str
    was: Health
    now: Health
    reason: str


@dataclass(slots=True)
class Cluster:
    """The table of nodes. One owner drives it and calls `judge` a few times per interval."""

    patience: Patience = field(default_factory=Patience)
    nodes: dict[str, Node] = field(default_factory=dict)
    _judged: float | None = None

    def recall(
        self, name: str, instance: str, epoch: int, *, present: bool = True, retired: tuple[str, ...] = ()
    ) -> None:
        """Take in what was known before the owner was restarted: the node is there, unless it stays silent.

        One that was lost or had left stays so: its epoch has ended.
        """
        node = Node(name, instance, epoch, health=Health.suspected, reason="not heard since the manager started")
        if not present:
            node.health, node.reason = Health.lost, "gone before the manager was restarted"
        node.retired.extend(retired)
        self.nodes[name] = node

    def join(self, name: str, instance: str, *, last_epoch: int = 0, fenced: bool = False) -> Admission:
        """An agent asks for the node.

        Args:
            last_epoch: the highest it was ever given, 0 for none: an owner that has forgotten it goes on from there.
            fenced: it has been told that another has the node.
        """
        node = self.nodes.get(name)
        if node is None:
            self.nodes[name] = Node(name, instance, max(0, last_epoch) + 1)
            return Admission(last_epoch + 1, "joined", True)
        if node.instance == instance and node.present and last_epoch <= node.epoch:
            return Admission(node.epoch, "has the node already")
        if node.instance != instance and node.present and (fenced or instance in node.retired):
            return Admission(None, f"node {name} belongs to a newer agent that is {node.health.value}")
        if node.instance != instance:
            reason = f"superseded an agent that was {node.health.value}"
            node.retired.append(node.instance)
        else:
            reason = f"came back after it was {node.health.value}"
        node.instance, node.sequence, node.silent = instance, -1, 0.0
        node.epoch = max(node.epoch, last_epoch) + 1
        node.health, node.reason = Health.alive, reason
        return Admission(node.epoch, reason, True)

    def hear(self, name: str, epoch: int, sequence: int) -> Verdict:
        """A report has come. Only `news` may change what is known of the node's copies."""
        node = self.nodes.get(name)
        if node is None or epoch > node.epoch:
            return Verdict(Hearing.unknown, f"node {name} has not joined in epoch {epoch}")
        if epoch < node.epoch:
            return Verdict(Hearing.fenced, f"node {name} is in epoch {node.epoch} now, this is of epoch {epoch}")
        if not node.present:
            return Verdict(Hearing.fenced, f"node {name} was {node.health.value} ({node.reason})")
        if sequence < node.sequence:
            return Verdict(Hearing.late, f"report {sequence} came after report {node.sequence}")
        node.silent = 0.0  # how a node that was suspected recovers is told by the next `judge`
        if sequence == node.sequence:
            return Verdict(Hearing.repeated, f"report {sequence} came again")
        node.sequence = sequence
        return Verdict(Hearing.news, "")

    def leave(self, name: str, epoch: int) -> Change | None:
        """The agent ends of its own will; None when it no longer had the node."""
        node = self.nodes.get(name)
        if node is None or node.epoch != epoch or not node.present:
            return None
        return _become(node, Health.left, "its agent has left")

    def judge(self, now: float) -> tuple[Change, ...]:
        """Decide about every node at `now` seconds; what has changed, by name."""
        passed = 0.0 if self._judged is None else max(0.0, now - self._judged)
        self._judged = now
        # Standing still longer than a heartbeat takes, this process could not have heard anybody: that is no silence.
        passed = min(passed, self.patience.interval)
        there = [node for node in self.nodes.values() if node.present]
        for node in there:
            node.silent += passed
        silent = sum(node.silent >= self.patience.suspect_after for node in there)
        blind = len(there) >= _CROWD and silent * 2 > len(there)
        changes = (self._judge(node, silent, len(there)) if blind else self._judge(node, 0, 0) for node in there)
        return tuple(sorted((change for change in changes if change), key=lambda change: change.node))

    def forget(self, name: str) -> None:
        """Drop a node that is lost or has left. ValueError for one that is there."""
        if self.nodes[name].present:
            raise ValueError(f"node {name} is {self.nodes[name].health.value}")
        del self.nodes[name]

    def _judge(self, node: Node, silent: int, there: int) -> Change | None:
        limit = self.patience.blind_after if there else self.patience.lost_after
        if node.silent >= limit:
            return _become(node, Health.lost, f"silent for {node.silent:.1f} s, the limit is {limit:g} s")
        if node.silent >= self.patience.lost_after:
            cut = f"{silent} of {there} nodes are silent: this manager may be the one that is cut off"
            change = _become(node, Health.suspected, cut)
            node.reason = cut
            return change
        if node.silent >= self.patience.suspect_after:
            missed = int(node.silent / self.patience.interval)
            return _become(node, Health.suspected, f"{missed} heartbeats missed")
        if node.health is Health.suspected and node.sequence >= 0:
            return _become(node, Health.alive, "heard again")
        return None


def _become(node: Node, health: Health, reason: str) -> Change | None:
    if node.health is health:
        return None
    change = Change(node.name, node.health, health, reason)
    node.health, node.reason = health, reason
    return change
