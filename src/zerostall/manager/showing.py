"""The cluster as people see it: what `Control` knows, as one document."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zerostall
from zerostall.core.cluster import Health
from zerostall.wire.cluster import HISTOGRAM
from zerostall.wire.state import NodeView, RunView, SnapshotView, State

if TYPE_CHECKING:
    from zerostall.core.cluster import Node
    from zerostall.core.rollback import RunTable, Snapshot, Verdict
    from zerostall.manager.control import Control
    from zerostall.manager.known import Known

SNAPSHOTS_SHOWN = 24
EVENTS_SHOWN = 100
DAMAGE_SHOWN = 8
_ORDER = {Health.lost: 0, Health.suspected: 1, Health.alive: 2, Health.left: 3}


def show(control: Control, now: float, uptime: float, decision_ms: float) -> State:
    """The document at `now`; nodes with trouble come first."""
    nodes = sorted(control.cluster.nodes.values(), key=lambda node: (_ORDER[node.health], node.name))
    return State(
        now=control.wall,
        uptime=uptime,
        version=zerostall.__version__,
        interval=control.cluster.patience.interval,
        nodes=tuple(_node(node, control.known.get(node.name)) for node in nodes),
        runs=tuple(_run(control, run, table, now) for run, table in sorted(control.steps.runs.items())),
        events=tuple(control.events)[-EVENTS_SHOWN:][::-1],
        stall_bounds=HISTOGRAM,
        stalls=_stalls(control),
        decision_ms=decision_ms,
        topology=f"{control.fabric.source}: {control.fabric.words}" if control.fabric else "",
    )


def _node(node: Node, known: Known | None) -> NodeView:
    ranks = [rank for run in known.runs for rank in run.ranks] if known else []
    report = known.report if known else None
    rates = known.rates if known and node.present else None
    return NodeView(
        name=node.name,
        health=node.health.value,
        reason=node.reason,
        silent=round(node.silent, 1),
        epoch=node.epoch,
        labels=str(known.place) if known else "",
        version=known.join.version if known else "",
        ranks=sum(rank.home for rank in ranks),
        training=sum(rank.trains for rank in ranks) if node.present else 0,
        replicas=sum(copy.tier == "replica" for rank in ranks for copy in rank.copies),
        host_bytes=report.host_bytes if report else 0,
        host_budget=report.host_budget if report else 0,
        deaf=report.deaf if report else 0.0,
        writing=tuple(run.writing for run in known.runs if run.writing is not None) if known else (),
        error=next((run.error for run in known.runs if run.error), "") if known else "",
        sealed_rate=rates.of("sealed_bytes") if rates else 0.0,
        stored_rate=rates.of("stored_bytes") if rates else 0.0,
        sent_rate=rates.of("sent_bytes") if rates else 0.0,
        received_rate=rates.of("received_bytes") if rates else 0.0,
        stands=known.stand.reason if known else "",
        damaged=tuple(
            f"step {damage.step} of rank {rank.rank}: {damage.reason}" for rank in ranks for damage in rank.damaged
        )[:DAMAGE_SHOWN],
        damaged_ever=report.counters.damaged if report else 0,
        mended_ever=report.counters.mended if report else 0,
        scrub_rate=rates.of("scrubbed_bytes") if rates else 0.0,
        upkeep=report.upkeep if report else "",
        pace=report.pace if report else "",
    )


def _run(control: Control, run: str, table: RunTable, now: float) -> RunView:
    verdicts = control.verdicts.get(run, ())
    goal = control.targets.get(run)
    target = table.snapshots.get(goal.key) if goal and goal.key else None
    errands = control.errands.get(run)
    return RunView(
        run=run,
        where=_where(control, run),
        world=table.world,
        training=sum(trains for _, trains in table.homes.values()),
        nodes=len({home for home, _ in table.homes.values()}),
        target=target.key.step if target else None,
        target_reason=goal.reason if goal else "",
        rpo=round(max(0.0, now - target.since), 1) if target else None,
        replicated=max((min(table.world, s.tiers.get("replica", 0)) for s in table.snapshots.values()), default=0),
        snapshots=tuple(
            _snapshot(verdict, table.snapshots[verdict.key], table.world, now)
            for verdict in verdicts[:SNAPSHOTS_SHOWN]
            if verdict.key in table.snapshots
        ),
        waiting=tuple(f"rank {rank}: {why}" for rank, why in errands.waiting[:8]) if errands else (),
        fetching=tuple(errand.words() for errand in errands.errands[:8]) if errands else (),
        copies=control.placing.words(run),
    )


def _snapshot(verdict: Verdict, snapshot: Snapshot, world: int, now: float) -> SnapshotView:
    whole = {tier for _, tier in snapshot.holders.get(-1, ())}
    return SnapshotView(
        step=verdict.key.step,
        attempt=verdict.key.attempt,
        standing=verdict.standing.value,
        reason=verdict.reason,
        have=verdict.have,
        tiers={tier: world if tier in whole else min(count, world) for tier, count in sorted(snapshot.tiers.items())},
        age=round(max(0.0, now - snapshot.since), 1),
    )


def _where(control: Control, run: str) -> str:
    for known in control.known.values():
        for note in known.runs:
            if note.run == run:
                return note.where
    return ""


def _stalls(control: Control) -> tuple[int, ...]:
    sums = [0] * (len(HISTOGRAM) + 1)
    for known in control.known.values():
        if known.report is not None:
            for index, count in enumerate(known.report.counters.stalls[: len(sums)]):
                sums[index] += count
    return tuple(sums)
