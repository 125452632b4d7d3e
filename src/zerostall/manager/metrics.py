"""What Prometheus scrapes: the same document as everything else, as numbers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from zerostall.wire.state import State

HEALTHS = ("alive", "suspected", "lost", "left")


def exposition(state: State) -> bytes:
    """The text of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(state))
    return generate_latest(registry)


class _Collected:
    """One scrape's metrics; what prometheus-client calls a collector."""

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from _nodes(self._state)
        yield from _runs(self._state)
        yield _gauge("manager_decision_seconds", "99th percentile of a decision", self._state.decision_ms / 1e3)
        yield _gauge("manager_uptime_seconds", "since the manager started", self._state.uptime)
        yield _stalls(self._state)


def _nodes(state: State) -> Iterator[Metric]:
    health = GaugeMetricFamily("zerostall_nodes", "nodes by health", labels=["health"])
    counts = Counter(node.health for node in state.nodes)
    for name in HEALTHS:
        health.add_metric([name], counts[name])
    yield health
    families = {
        "silent": GaugeMetricFamily("zerostall_node_silent_seconds", "since the node was heard", labels=["node"]),
        "host_bytes": GaugeMetricFamily("zerostall_node_host_bytes", "memory lent to images", labels=["node"]),
    }
    rate = GaugeMetricFamily("zerostall_node_bytes_per_second", "images moved", labels=["node", "hop"])
    for node in state.nodes:
        for name, family in families.items():
            family.add_metric([node.name], getattr(node, name))
        for hop in ("sealed", "stored", "sent", "received", "scrub"):
            rate.add_metric([node.name, hop], getattr(node, f"{hop}_rate"))
    yield from families.values()
    yield rate
    images = GaugeMetricFamily("zerostall_node_damaged_images", "that fail their checksums now", labels=["node"])
    found = CounterMetricFamily("zerostall_node_images_damaged", "since its agent started", labels=["node"])
    mended = CounterMetricFamily("zerostall_node_images_mended", "made again from good copies", labels=["node"])
    for node in state.nodes:
        images.add_metric([node.name], len(node.damaged))
        found.add_metric([node.name], node.damaged_ever)
        mended.add_metric([node.name], node.mended_ever)
    yield from (images, found, mended)


def _runs(state: State) -> Iterator[Metric]:
    labels = ["run"]
    target = GaugeMetricFamily("zerostall_run_clean_step", "newest clean step", labels=labels)
    rpo = GaugeMetricFamily("zerostall_run_rpo_seconds", "training that would be lost now", labels=labels)
    ranks = GaugeMetricFamily("zerostall_run_ranks", "ranks of the run", labels=[*labels, "state"])
    standing = GaugeMetricFamily("zerostall_run_snapshots", "snapshots by standing", labels=[*labels, "standing"])
    for run in state.runs:
        if run.target is not None and run.rpo is not None:
            target.add_metric([run.run], run.target)
            rpo.add_metric([run.run], run.rpo)
        for name, number in (("all", run.world), ("training", run.training), ("replicated", run.replicated)):
            ranks.add_metric([run.run, name], number)
        for name, number in Counter(snapshot.standing for snapshot in run.snapshots).items():
            standing.add_metric([run.run, name], number)
    yield from (target, rpo, ranks, standing)
    events = CounterMetricFamily("zerostall_events", "events so far")
    events.add_metric([], state.events[0].id if state.events else 0)
    yield events


def _stalls(state: State) -> Metric:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, state.stall_bounds), "+Inf"), state.stalls, strict=False):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(
        "zerostall_stall_seconds", "how long a save held training", buckets=buckets, sum_value=None
    )


def _gauge(name: str, words: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"zerostall_{name}", words)
    family.add_metric([], value)
    return family
