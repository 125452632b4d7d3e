"""How the manager is told of an image here: by the attempt at its step that it belongs to, and its damage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.core.roll import NONE, Save
from zerostall.wire import cluster as w
from zerostall.wire.messages import plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerostall.agent.berth import Berth
    from zerostall.core.manifest import Manifest, Record


def attempt_of(record: Record, save: Save) -> str:
    """What is equal for all images that may make a snapshot together: with one rank, when it was saved."""
    return repr(record.created) if record.world == 1 else f"{save.epoch}.{save.turn}"


def attempt_stored(manifest: Manifest) -> str:
    """The same of a step on disk, as far as the disk alone can tell."""
    return repr(manifest.created) if manifest.world == 1 else f"at {manifest.created!r}"


def attempt_at(berth: Berth, step: int) -> str:
    """The same of an image that is sealed in a berth. ValueError where there is none."""
    tier = berth.tier_with(step)
    if tier is None:
        raise ValueError(f"rank {berth.rank} has no image of step {step}")
    wish = berth.wishes.get(step)
    return attempt_of(tier.record_of(step), wish.save if wish else NONE)


def damage_notes(berth: Berth) -> Iterator[w.DamageNote]:
    """The images in a berth on which nobody may count."""
    for step, reason in berth.damaged():
        yield w.DamageNote(step, plain(reason)[:1000])


def copy_note(record: Record, tier: str, attempt: str) -> w.CopyNote:
    return w.CopyNote(step=record.step, attempt=attempt, tier=tier, created=record.created, nbytes=record.nbytes)
