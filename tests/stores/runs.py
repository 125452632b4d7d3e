"""Steps of a run in a tier, put there and fetched again."""

from __future__ import annotations

from images import HandMade, make_layout, manifest_of
from zerostall import native
from zerostall.core import layout as layouts
from zerostall.tiers.contract import Tier
from zerostall.tiers.host import stride_of
from zerostall.tiers.remote import RemoteTier

THREE_PARTS = make_layout(35_000_000)
SMALL = make_layout(70_000, 5)


def stored(tier: RemoteTier, made: HandMade, **commit: bool) -> None:
    tier.put(made.image)
    tier.commit(manifest_of(made.record), **commit)


def fetched(tier: Tier, step: int, layout: layouts.Layout) -> bytes:
    target = native.Segment("target", stride_of(layout))
    try:
        tier.get(step, 0, target.address)
        return bytes(target.view(0, layout.nbytes))
    finally:
        target.close()
