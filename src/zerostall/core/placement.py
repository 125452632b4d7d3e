"""On which other node's memory each image has its replica: a pure decision that moves as little as it can.

What must hold, in this order:

1. A replica is never on its image's own node, and no two copies of an image are on one node.
2. Copies share no rack and no leaf switch while that is avoidable.
3. No node is given more than it offers, nor more than `SLACK` times its fair share and one image (nobody is a hot
   spot).
4. What is placed well stays where it is. Losing a node moves what was there; a node that comes takes from those that
   have too much, and nothing else moves.

Greedy with memory: a placement of before goes in, what still holds is kept, the rest goes to the least loaded node of
the best separated group. Balanced by construction, and the same inputs give the same placement on every machine.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.topology import Place, apart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SLACK = 1.25


class ImageId(msgspec.Struct, frozen=True, order=True, gc=False):
    """One rank's image of a run, whatever the step: replicas of all steps go the same way."""

    run: str
    rank: int


class Load(msgspec.Struct, frozen=True, gc=False):
    """An image, its node, and the bytes a replica takes."""

    image: ImageId
    home: str
    nbytes: int


class Site(msgspec.Struct, frozen=True):
    """A node that can take replicas, and how many bytes of them."""

    place: Place
    capacity: int


class Placement(msgspec.Struct, frozen=True):
    """Where replicas go.

    Attributes:
        targets: nodes of each image, fewer than asked for where `short` says why.
        moved: images that have another node than before, with the reason; new ones are among them.
        short: images that lack a replica or that share a domain with one, and why.
    """

    targets: dict[ImageId, tuple[str, ...]]
    moved: dict[ImageId, str]
    short: dict[ImageId, str]


def place(
    loads: Iterable[Load],
    sites: Mapping[str, Site],
    *,
    copies: int = 1,
    before: Mapping[ImageId, tuple[str, ...]] | None = None,
) -> Placement:
    """Decide for all images at once. `sites` are the nodes that are there; homes need not be among them."""
    images = sorted(loads, key=lambda load: load.image)
    table = _Table.of(images, sites, copies)
    targets = _kept(images, sites, copies, before or {}, table)
    moved: dict[ImageId, str] = {}
    short: dict[ImageId, str] = {}
    for load in sorted(images, key=lambda load: (-load.nbytes, load.image)):
        image, nodes = load.image, targets[load.image]
        left = [node for node in (before or {}).get(image, ()) if node not in nodes]
        while len(nodes) < copies:
            found = table.take(load, nodes)
            # Where nothing better has room, what was there stays.
            same = next((node for node in left if table.may_stay(load, nodes, node, found)), None)
            if same is not None:
                table.put(same, load.nbytes)
                nodes.append(same)
                left.remove(same)
                continue
            if found is None:
                short[image] = f"{len(nodes)} of {copies} replicas: no other node has room for {load.nbytes} bytes"
                break
            table.put(found, load.nbytes)
            nodes.append(found)
            was = left.pop() if left else ""
            moved[image] = "is new" if not was else f"node {was} {'has too much' if was in sites else 'is gone'}"
        if image not in short and (shared := _shared(load, nodes, sites)):
            short[image] = shared
    return Placement({image: tuple(nodes) for image, nodes in targets.items()}, moved, short)


def _kept(
    images: list[Load], sites: Mapping[str, Site], copies: int, before: Mapping[ImageId, tuple[str, ...]], table: _Table
) -> dict[ImageId, list[str]]:
    """Of the placement before, what still holds: small images give way first where a node has too much."""
    targets: dict[ImageId, list[str]] = {load.image: [] for load in images}
    for load in sorted(images, key=lambda load: (-load.nbytes, load.image)):
        nodes = targets[load.image]
        for node in before.get(load.image, ())[:copies]:
            if node not in sites or node == load.home or node in nodes:
                continue
            if table.fits(node, load.nbytes) and table.apart(load, nodes, node) >= table.best(load, nodes):
                table.put(node, load.nbytes)
                nodes.append(node)
    return targets


def _shared(load: Load, nodes: list[str], sites: Mapping[str, Site]) -> str:
    places = [(load.home, sites[load.home].place)] if load.home in sites else []
    places += [(node, sites[node].place) for node in nodes]
    for index, (one, here) in enumerate(places):
        for other, there in places[:index]:
            if apart(here, there) < 2:
                what = "rack" if here.rack and here.rack == there.rack else "leaf switch"
                return f"{other} and {one} share a {what}: nothing better has room"
    return ""


@dataclass(slots=True)
class _Table:
    """Loads of the nodes, with heaps that find the least loaded one of a group (nodes with the same labels)."""

    sites: Mapping[str, Site]
    limits: dict[str, float]
    loads: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    groups: dict[Place, list[tuple[float, str]]] = field(default_factory=dict)
    order: list[tuple[float, Place]] = field(default_factory=list)

    @classmethod
    def of(cls, images: list[Load], sites: Mapping[str, Site], copies: int) -> _Table:
        total = sum(load.nbytes for load in images) * copies
        largest = max((load.nbytes for load in images), default=0)
        offered = sum(site.capacity for site in sites.values()) or 1
        limits = {
            name: min(float(site.capacity), SLACK * total * site.capacity / offered + largest)
            for name, site in sites.items()
        }
        table = cls(sites, limits)
        for name, site in sorted(sites.items()):
            if site.capacity > 0:
                table.groups.setdefault(_group(name, site.place), []).append((0.0, name))
        table.order = [(0.0, group) for group in sorted(table.groups)]
        return table

    def fits(self, node: str, nbytes: int) -> bool:
        return self.loads[node] + nbytes <= self.limits[node]

    def put(self, node: str, nbytes: int) -> None:
        self.loads[node] += nbytes
        group = _group(node, self.sites[node].place)
        heapq.heappush(self.groups[group], (self._filled(node), node))

    def apart(self, load: Load, nodes: list[str], node: str) -> int:
        """How well the node is separated from the worst placed of the image's other copies."""
        here = self.sites[node].place
        others = [self.sites[name].place for name in (load.home, *nodes) if name in self.sites]
        return min((apart(here, there) for there in others), default=2)

    def best(self, load: Load, nodes: list[str]) -> int:
        """The best separation that is to be had at all, whether or not there is room."""
        taken = {load.home, *nodes}
        best = 0
        for heap in self.groups.values():
            sample = next((name for _, name in heap if name not in taken), None)
            if sample is not None:
                best = max(best, self.apart(load, nodes, sample))
                if best == 2:
                    break
        return best

    def take(self, load: Load, nodes: list[str]) -> str | None:
        """The least loaded node of the least loaded group among the best separated."""
        fallback: tuple[int, float, str] | None = None
        passed: list[tuple[float, Place]] = []
        found = None
        while self.order and found is None:
            filled, group = heapq.heappop(self.order)
            if filled != self._top(group):
                heapq.heappush(self.order, (self._top(group), group))  # it has got more since
                continue
            name = self._least(group, {load.home, *nodes}, load.nbytes)
            passed.append((filled, group))
            if name is None:
                continue
            separation = self.apart(load, nodes, name)
            if separation == 2:
                found = name
            elif fallback is None or (-separation, self._filled(name), name) < fallback:
                fallback = (-separation, self._filled(name), name)
        if found is None and fallback is not None:
            found = fallback[2]
        for entry in passed:
            heapq.heappush(self.order, entry)
        return found

    def may_stay(self, load: Load, nodes: list[str], node: str, found: str | None) -> bool:
        """Has the node room for the image, and is it no worse a place than the one that was found?"""
        if node not in self.sites or node == load.home or node in nodes or not self.fits(node, load.nbytes):
            return False
        return found is None or self.apart(load, nodes, node) >= self.apart(load, nodes, found)

    def _filled(self, node: str) -> float:
        return self.loads[node] / self.sites[node].capacity

    def _top(self, group: Place) -> float:
        """How full the group's least loaded node is."""
        heap = self.groups[group]
        while heap[0][0] != self._filled(heap[0][1]):
            heapq.heappop(heap)  # an entry of before the node got more
        return heap[0][0]

    def _least(self, group: Place, taken: set[str], nbytes: int) -> str | None:
        heap, aside, found = self.groups[group], [], None
        while heap and found is None:
            filled, name = heapq.heappop(heap)
            if filled != self._filled(name):
                continue
            aside.append((filled, name))
            if name not in taken and self.fits(name, nbytes):
                found = name
        for entry in aside:
            heapq.heappush(heap, entry)
        return found


def _group(name: str, place: Place) -> Place:
    """Nodes with the same labels are alike; one without a rack and a leaf shares a domain with none."""
    return place if place.rack or place.leaf else Place(pod=f"node {name}")
