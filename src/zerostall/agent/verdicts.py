"""What follows on this node from what has become known of saves: images are committed or dropped, trainers hear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.core import manifest as manifests
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerostall.agent.berth import Berth
    from zerostall.core.manifest import Manifest, RankFacts, Record
    from zerostall.core.roll import Save, Spoiled
    from zerostall.tiers.host import HostTier

NAMED = 16
"""How many missing ranks are named."""


@dataclass(slots=True)
class Verdicts:
    """Driven by the agent's loop.

    Attributes:
        berths: of this node's ranks.
        grant: gives slots to trainers that have none.
        clean: told of each step that is clean in memory.
        epoch: the newest that any rank of this node knows of.
    """

    berths: Mapping[int, Berth]
    grant: Callable[[], None]
    clean: Callable[[int], None]
    epoch: int = 0

    def images(self, save: Save) -> dict[int, tuple[HostTier, Record]]:
        """The images of that very save that are sealed here, by rank."""
        found: dict[int, tuple[HostTier, Record]] = {}
        for rank, berth in sorted(self.berths.items()):
            tier = berth.tier_with(save.step) if berth.created_of(save) is not None else None
            if tier is not None:
                found[rank] = tier, tier.record_of(save.step)
        return found

    def facts(self, save: Save) -> dict[int, RankFacts]:
        """The same, as a manifest has them."""
        return {
            rank: manifests.facts(record, manifests.encode_record(record))
            for rank, (_, record) in self.images(save).items()
        }

    def committed(self, save: Save, manifest: Manifest, *, adopted: bool = False) -> None:
        """The save is clean.

        Args:
            adopted: it was so under the agent before this one.
        """
        images = self.images(save)
        for tier, _ in images.values():
            tier.commit(manifest, replace=True)
        if not adopted:
            self.grant()  # before the news, so that a save right after it finds a slot
        for rank, (_, record) in images.items():
            self.berths[rank].send(m.Reached(step=save.step, created=record.created, tier="host"))
        self.clean(save.step)

    def spoiled(self, spoiled: Spoiled) -> None:
        """What ranks hold of a save that is none goes.

        What is clean here stays: an agent that decides anew, on another node, has not heard all ranks of it.
        """
        save = spoiled.save
        for berth in self.berths.values():
            if (created := berth.created_of(save)) is not None:
                if not spoiled.revoked and berth.manifest(save.step) is not None:
                    continue
                berth.unseal(save.step)
                reason = m.plain(spoiled.reason)
                berth.send(
                    m.Spoiled(
                        step=save.step, created=created, rank=spoiled.rank, reason=reason, skipped=spoiled.skipped
                    )
                )

    def hold(self, step: int) -> None:
        """All skip what comes before that step."""
        for berth in self.berths.values():
            berth.send(m.Hold(epoch=self.epoch, step=step))

    def awaiting(self, save: Save, ranks: tuple[int, ...], *, quiet: bool = False) -> None:
        """Those that have sealed the save hear whom it waits for; `quiet`: and need not say so yet."""
        for berth in self.berths.values():
            if (created := berth.created_of(save)) is not None:
                berth.send(m.Awaiting(step=save.step, created=created, ranks=ranks[:NAMED], quiet=quiet))

    def plan(self, plan: m.Plan) -> None:
        for berth in self.berths.values():
            berth.send(plan)
