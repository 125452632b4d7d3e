"""Where a node stands: failure domains and how far it is from one node to another. Pure data."""

from __future__ import annotations

import re

import msgspec

LABELS = ("rack", "leaf", "pod")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Place(msgspec.Struct, frozen=True, order=True):
    """A node's labels; an empty one means that nobody said, and then the node shares that domain with none.

    Attributes:
        rack: one power supply, one cooling.
        leaf: the switch that the node's cable goes to.
        pod: what can be reached without the core of the network.
        spines: the switches that the leaf switch is tied to, sorted; where they are known, a pod need not be.
    """

    rack: str = ""
    leaf: str = ""
    pod: str = ""
    spines: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Place:
        """Read `rack=r7,leaf=sw3`; empty text is no label at all. ValueError for anything else."""
        labels: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or name not in LABELS or name in labels or not _LABEL.fullmatch(value):
                raise ValueError(f"{part!r} is no label: write {', '.join(f'{label}=NAME' for label in LABELS)}")
            labels[name] = value
        return cls(labels.get("rack", ""), labels.get("leaf", ""), labels.get("pod", ""))

    def __str__(self) -> str:
        said = [f"{label}={value}" for label in LABELS if (value := getattr(self, label))]
        return ",".join([*said, f"spines={'+'.join(self.spines)}"] if self.spines else said)


def apart(one: Place, other: Place) -> int:
    """How well two different nodes are separated: 2 when no rack and no leaf switch takes both, 1 when one does, 0."""
    return int(_differ(one.rack, other.rack)) + int(_differ(one.leaf, other.leaf))


def hops(one: Place, other: Place) -> int:
    """Links between two different nodes of a fat tree: 2 under one leaf switch, 4 within a pod, 6 through the core."""
    if one.leaf and one.leaf == other.leaf:
        return 2
    if one.spines and other.spines:
        return 4 if set(one.spines) & set(other.spines) else 6
    return 6 if one.pod and other.pod and one.pod != other.pod else 4


def way(one: Place, other: Place) -> str:
    """In words, how two different nodes stand to each other."""
    shared = [
        what
        for what, here, there in (("rack", one.rack, other.rack), ("leaf switch", one.leaf, other.leaf))
        if not _differ(here, there)
    ]
    if shared:
        apartness = f"same {' and '.join(shared)}"
    elif (one.rack and other.rack) or (one.leaf and other.leaf):
        apartness = f"another {'rack' if one.rack and other.rack else 'leaf switch'}"
    else:
        return "another node, no rack or switch is known"
    return f"{apartness}, {hops(one, other)} hops" if one.leaf and other.leaf else apartness


def _differ(one: str, other: str) -> bool:
    return not one or not other or one != other
