"""Where replicas go, and why: what placement is asked, what follows for each node's plan, and how it is told."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.core.cluster import Health
from zerostall.core.placement import ImageId, Load, Placement, Site
from zerostall.core.topology import Place, way
from zerostall.wire import cluster as w

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerostall.core.cluster import Cluster
    from zerostall.core.rollback import Steps
    from zerostall.manager.known import Known

_NAMED = 6


@dataclass(frozen=True, slots=True)
class Question:
    """What `core.placement.place` is to be asked; it may be answered on another thread."""

    loads: tuple[Load, ...]
    sites: dict[str, Site]
    before: dict[ImageId, tuple[str, ...]]


class Placing:
    """Driven by `Control`, whose tables it reads; the plans that it gives out are in what is `known` of each node.

    Attributes:
        stale: something has changed that matters to placement.
    """

    def __init__(
        self, cluster: Cluster, steps: Steps, known: Mapping[str, Known], tell: Callable[[str, str, str], None]
    ) -> None:
        self.stale = True
        self.placement = Placement({}, {}, {})
        self._cluster = cluster
        self._steps = steps
        self._known = known
        self._tell = tell
        self._sizes: dict[ImageId, int] = {}
        self._plans = 0

    def size(self, image: ImageId, nbytes: int) -> None:
        """So many bytes a replica of the image takes."""
        if self._sizes.get(image) != nbytes:
            self._sizes[image] = nbytes
            self.stale = True

    def question(self) -> Question | None:
        """What is to be placed anew; None while nothing has changed that matters."""
        if not self.stale:
            return None
        self.stale = False
        loads: list[Load] = []
        before: dict[ImageId, tuple[str, ...]] = {}
        for run, table in self._steps.runs.items():
            held = self._held(run)
            for rank, (home, _) in table.homes.items():
                image = ImageId(run, rank)
                node = self._cluster.nodes.get(home)
                nbytes = self._sizes.get(image, 0)
                if node is None or node.health is Health.left or not nbytes:
                    continue
                loads.append(Load(image, home, nbytes))
                before[image] = self.placement.targets.get(image) or held.get(rank, ())
        sites = {
            name: Site(known.place, known.join.offers)
            for name, known in self._known.items()
            if self._cluster.nodes[name].present and known.join.peer and known.join.offers
        }
        return Question(tuple(loads), sites, before)

    def placed(self, placement: Placement) -> None:
        """The answer to `question`: every node whose part of it is another one gets a new plan."""
        before, self.placement = self.placement, placement
        partners: dict[str, list[w.Partner]] = defaultdict(list)
        guests: dict[str, list[w.Guest]] = defaultdict(list)
        for image, nodes in placement.targets.items():
            peers = tuple(self._known[node].peer for node in nodes if node in self._known)
            partners[self._home(image)].append(w.Partner(image.run, image.rank, peers))
            for peer in peers:
                guests[peer.node].append(w.Guest(image.run, image.rank))
        for name, known in self._known.items():
            mine = tuple(sorted(partners[name], key=lambda partner: (partner.run, partner.rank)))
            theirs = tuple(sorted(guests[name]))
            if (mine, theirs) != (known.plan.partners, known.plan.guests):
                self._plans += 1
                known.plan = w.Plan(self._plans, mine, theirs)
        if placement.moved:
            image, reason = next(iter(placement.moved.items()))
            more = f" and {len(placement.moved) - 1} more" if len(placement.moved) > 1 else ""
            to = "".join(f", to {node}: {self._way(self._home(image), node)}" for node in placement.targets[image])
            self._tell("replica", image.run, f"rank {image.rank}{more} placed anew: {reason}{to}")
        for image, reason in placement.short.items():
            if before.short.get(image) != reason:
                self._tell("replica", image.run, f"rank {image.rank}: {reason}")
                break

    def words(self, run: str) -> tuple[str, ...]:
        """Where the run's replicas go, and why there; what is wanting comes first."""
        said = [f"rank {image.rank}: {reason}" for image, reason in self.placement.short.items() if image.run == run]
        pairs: Counter[tuple[str, str]] = Counter()
        for image, nodes in self.placement.targets.items():
            if image.run == run:
                pairs.update((self._home(image), node) for node in nodes)
        for (home, node), count in sorted(pairs.items()):
            said.append(f"{home} → {node}, {count} image{'s' * (count > 1)}: {self._way(home, node)}")
        return (*said[:_NAMED], f"and {len(said) - _NAMED} more") if len(said) > _NAMED else tuple(said)

    def _home(self, image: ImageId) -> str:
        table = self._steps.runs.get(image.run)
        return table.homes.get(image.rank, ("", False))[0] if table else ""

    def _way(self, home: str, node: str) -> str:
        here, there = (known.place if (known := self._known.get(name)) else Place() for name in (home, node))
        return way(here, there)

    def _held(self, run: str) -> dict[int, tuple[str, ...]]:
        """Where replicas of each rank are already: what is known of a placement when this process is new."""
        if any(image.run == run for image in self.placement.targets):
            return {}
        held: dict[int, set[str]] = defaultdict(set)
        for snapshot in self._steps.runs[run].snapshots.values():
            for rank, holders in snapshot.holders.items():
                held[rank].update(node for node, tier in holders if tier == "replica")
        return {rank: tuple(sorted(nodes)) for rank, nodes in held.items()}
