"""A node of the cluster, as the manager knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall.manager.rates import Rates
from zerostall.wire import cluster as w

if TYPE_CHECKING:
    from zerostall.core.fabric import Stand
    from zerostall.core.topology import Place


@dataclass(slots=True)
class Known:
    """What a node's agent has said of itself, beside its health."""

    join: w.Join
    stand: Stand
    since: float
    report: w.Report | None = None
    version: int = -1
    runs: tuple[w.RunNote, ...] = ()
    rates: Rates = field(default_factory=Rates)
    plan: w.Plan = field(default_factory=lambda: w.Plan(0))
    dirty: list[tuple[int | None, w.Dirty]] = field(default_factory=list)  # with the sequence it was first sent at
    findings: int = 0  # the number of the last one that was heard

    @property
    def place(self) -> Place:
        return self.stand.place

    @property
    def peer(self) -> w.Peer:
        return w.Peer(self.join.node, self.join.peer)
