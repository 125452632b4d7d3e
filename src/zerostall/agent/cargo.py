"""What a run's carrier may take: steps on disk, or in host memory where the run has no disk; and what each tier has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from zerostall.agent.carrier import Cargo
from zerostall.flow.carry import Load
from zerostall.wire import messages as m

_LIST_SECONDS = 1.0

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerostall.agent.berth import Berth
    from zerostall.agent.run import Run


def cargo_of_disk(run: Run) -> Cargo:
    """Steps that are on disk. The folder is listed when one has got there, and every now and then."""
    disk = run.folder.disk
    listed: tuple[float, list[int]] = (0.0, [])

    def steps() -> list[int]:
        nonlocal listed
        now = time.monotonic()
        if now >= listed[0]:
            listed = now + _LIST_SECONDS, disk.steps()
        return listed[1]

    def forget() -> None:
        nonlocal listed
        listed = 0.0, []

    def load(step: int) -> Load:
        known = {rank: berth.created(step) for rank, berth in run.berths.items()}
        return Load.of_run(disk, step, {rank: created for rank, created in known.items() if created is not None})

    return Cargo(lambda: max(steps(), default=None), lambda step: step in steps(), load, forget, disk.created)


def cargo_of_memory(run: Run) -> Cargo:
    """Steps that are clean in memory; what is taken is held until it is let go of."""

    def load(step: int) -> Load:
        manifest = run.berths[0].manifest(step)
        assert manifest is not None
        tiers = [run.berths[rank].tier_with(step) for rank in range(manifest.world)]
        held = [(tier, tier.hold(step)) for tier in tiers if tier is not None]
        wishes = [run.berths[rank].wishes.get(step) for rank in range(manifest.world)]

        def close() -> None:
            for tier, one in held:
                tier.release(one)
                if run.carrier is not None and step in run.carrier.steps:
                    tier.slots.promise(one.slot, False)

        return Load.of_memory(
            manifest,
            [one.image for _, one in held],
            pinned=any(wish.pin for wish in wishes if wish),
            replace=any(wish.replace for wish in wishes if wish),
            close=close,
        )

    def newest() -> int | None:
        return max(run.trickle.clean_steps(), default=None)

    def created(step: int) -> float:
        return run.berths[0].created(step) or 0.0

    return Cargo(newest, lambda step: step in run.trickle.clean_steps(), load, lambda: None, created)


def no_cargo() -> Cargo:
    """Another node's agent carries."""

    def load(step: int) -> Load:
        raise AssertionError(f"step {step} is not this agent's to carry")

    return Cargo(lambda: None, lambda step: False, load, lambda: None, lambda step: 0.0)


def tier_reports(run: Run, berth: Berth) -> Iterator[m.TierReport]:
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
