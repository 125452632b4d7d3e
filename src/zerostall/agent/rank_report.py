"""What `zerostall agent status` shows of a rank: where its steps are, and what is on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerostall.agent.berth import Berth
    from zerostall.agent.standing import Standing


def rank_report(run: Standing, berth: Berth) -> m.RankReport:
    """On the agent's loop."""
    return m.RankReport(
        where=m.plain(run.url or str(run.where)),
        rank=berth.rank,
        world=run.world,
        trainer_pid=berth.client.pid if berth.client else None,
        segment_bytes=berth.nbytes(),
        host_steps=tuple(berth.clean_steps()),
        disk_steps=tuple(run.folder.disk.steps()),
        trickling=run.trickle.writing(),
        last_error=m.plain(run.trickle.last_error),
        fallbacks=berth.fallbacks,
        tiers=tuple(_tier_reports(run, berth)),
        peer_bytes=berth.stowage.nbytes() if berth.stowage else 0,
        peer_steps=berth.stowage.steps() if berth.stowage else (),
        damaged=tuple(f"step {step}: {m.plain(why)}" for step in berth.sealed_steps() if (why := berth.damage(step))),
    )


def _tier_reports(run: Standing, berth: Berth) -> Iterator[m.TierReport]:
    """What the run has in each of its tiers."""
    peer = berth.stowage.report() if berth.stowage is not None else None
    if peer is not None:
        yield peer
    clean = berth.clean_steps()
    newest = max(clean, default=None)
    manifest = berth.manifest(newest) if newest is not None else None
    yield m.TierReport(
        tier="host",
        where="memory of this machine",
        newest=newest,
        created=manifest.created if manifest else 0.0,
        steps=len(clean),
        every=0.0,
        keep="as many as slots hold",
    )
    if not run.url:
        steps = run.folder.disk.steps()
        yield m.TierReport(
            tier="disk",
            where=m.plain(str(run.where)),
            newest=max(steps, default=None),
            created=run.folder.disk.created(steps[-1]) if steps else 0.0,
            steps=len(steps),
            every=run.trickle.interval,
            keep=run.trickle.keep.words(),
            moving=run.trickle.writing(),
            last_error=m.plain(run.trickle.last_error),
        )
    if run.carrier is not None:
        yield run.carrier.report()
