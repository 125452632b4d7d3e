"""What a run's carrier may take: steps on disk, or in host memory where the run has no disk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from zerostall.agent.carrier import Cargo
from zerostall.flow.carry import Load

_LIST_SECONDS = 1.0

if TYPE_CHECKING:
    from zerostall.agent.standing import Standing


def cargo_of_disk(run: Standing) -> Cargo:
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


def cargo_of_memory(run: Standing) -> Cargo:
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
