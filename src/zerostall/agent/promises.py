"""What trainers wait for: an image of theirs on disk or in the remote tier. And what they hear of it in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from zerostall.errors import FormatError, ReplacedError, ZerostallError
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from zerostall.agent.berth import Berth
    from zerostall.agent.standing import Standing
    from zerostall.core.candidates import Past
    from zerostall.core.roll import Save
    from zerostall.wire import nodes as n


class Promises:
    """Of one run. Driven by the agent's loop."""

    def __init__(self, run: Standing) -> None:
        self._run = run

    def make(self, berth: Berth, past: Past, where: str = "disk") -> None:
        """Somebody waits for this very image on disk, or in the remote tier."""
        run = self._run
        if where == "remote" and run.carrier is None:
            raise FormatError("this run has no remote tier")
        if berth.stowage is not None and berth.stowage.promise(past, where):
            return
        if where == "remote" and run.carrier is not None:
            if self._asked_afar(berth, past, where):
                return
            run.carrier.promise(berth.rank, past)
            if run.url:
                self._keep_for_remote(berth, past)
                return
        step, tier = past.step, berth.tier_with(past.step)
        if tier is not None and tier.record_of(step).created == past.created:
            if step in run.folder.on_disk:
                berth.send(m.Reached(step=step, created=past.created, tier="disk"))
                return
            slot = tier.slots.at_step(step)
            assert slot is not None
            tier.slots.promise(slot.index)
            run.trickle.hurry(though_failing=True)
            self._asked_afar(berth, past, where)
        elif step in run.folder.disk.steps() and run.folder.disk.created(step, berth.rank) == past.created:
            berth.send(m.Reached(step=step, created=past.created, tier="disk"))
        else:
            self._say_replaced(berth, past)

    def _keep_for_remote(self, berth: Berth, past: Past) -> None:
        carrier = self._run.carrier
        tier = berth.tier_with(past.step)
        slot = tier.slots.at_step(past.step) if tier else None
        if tier is not None and slot is not None and berth.created(past.step) == past.created:
            tier.slots.promise(slot.index)
        elif carrier is not None and past.step not in carrier.steps:
            self._say_replaced(berth, past)

    def say_again(self, berth: Berth, past: Past, *, promised: bool) -> None:
        """How a sealed image fares, to a trainer whose connection broke: it may have missed what it was told before.

        `promised`: somebody waits for it beyond memory.
        """
        step = past.step
        here = berth.created(step) == past.created
        if here and berth.manifest(step) is not None:
            berth.send(m.Reached(step=step, created=past.created, tier="host"))
        if here and promised:
            self.make(berth, past)
        elif step in self._run.folder.on_disk and self._run.folder.disk.created(step, berth.rank) == past.created:
            berth.send(m.Reached(step=step, created=past.created, tier="disk"))
        elif not here:
            spoiled = next((one for one in berth.spoiled if (one.step, one.created) == (step, past.created)), None)
            if spoiled is not None:
                berth.send(spoiled)
            else:
                berth.send(m.Replaced(step=step, created=past.created, tier="host"))
                self._say_replaced(berth, past)

    # ---------------------------------------------------------------------------------- ranks on several nodes

    def _asked_afar(self, berth: Berth, past: Past, where: str) -> bool:
        """Was rank 0's node asked, since it is another one and writes and carries?"""
        save = berth.wishes[past.step].save if berth.created(past.step) == past.created else None
        return self._run.caller.promise(berth.rank, past, save, where)

    def afar(self, asked: n.Promise) -> ZerostallError | None:
        """A rank of another node waits; why its image will not get there, where that is known."""
        run, step = self._run, asked.past.step
        there = step in run.folder.on_disk and run.folder.disk.created(step, asked.rank) == asked.past.created
        if asked.tier == "remote":
            if run.carrier is None:
                return FormatError("this run has no remote tier")
            if there or step in run.carrier.steps or self._may_come(asked.save):
                run.carrier.promise(asked.rank, asked.past)
                return None
        elif there:
            run.tell(asked.rank, m.Reached(step=step, created=asked.past.created, tier="disk"))
            return None
        elif self._may_come(asked.save):
            self.kept_for_others(asked.save)
            run.trickle.hurry(though_failing=True)
            return None
        return ReplacedError(f"step {step} is no longer in memory of rank 0's node")

    def _may_come(self, save: Save | None) -> TypeGuard[Save]:
        """Is the save in memory here, or will be clean once all have sealed it?"""
        return save is not None and (
            self._run.berths[0].created_of(save) is not None or save in self._run.caller.pending()
        )

    def kept_for_others(self, save: Save) -> None:
        """What ranks of other nodes wait for stays in memory until it is written; called once more when it is clean."""
        for tier, record in self._run.verdicts.images(save).values():
            slot = tier.slots.at_step(record.step)
            assert slot is not None
            tier.slots.promise(slot.index)

    def stored(self, save: Save, failure: m.Refused | None) -> None:
        """What the agent of rank 0's node says of a save that was to go to disk."""
        if failure is None:
            self._run.folder.on_disk.add(save.step)
        for berth in self._run.berths.values():
            created, tier = berth.created_of(save), berth.tier_with(save.step)
            if created is None or tier is None:
                continue
            if failure is not None:
                berth.send(m.Failed.of(failure, save.step, created, "disk"))
                continue
            slot = tier.slots.at_step(save.step)
            assert slot is not None
            tier.slots.promise(slot.index, False)
            berth.wishes[save.step].replace, berth.wishes[save.step].aside = True, ()
            berth.send(m.Reached(step=save.step, created=created, tier="disk"))

    # ------------------------------------------------------------------------------------------------ replaced

    def replaced(self, berth: Berth, before: set[Past]) -> None:
        """Of the images that were sealed before, those that are not any more and got no farther are told of."""
        run = self._run
        for past in sorted(before - berth.sealed()):
            there = run.carrier.steps if run.url and run.carrier else run.folder.on_disk
            if past.step not in there:
                self._say_replaced(berth, past)

    def _say_replaced(self, berth: Berth, past: Past) -> None:
        run = self._run
        if run.carrier is not None:
            run.carrier.replaced(berth.rank, past)
        tiers = ("remote",) if run.url else ("disk", "remote") if run.carrier else ("disk",)
        for tier in tiers:
            berth.send(m.Replaced(step=past.step, created=past.created, tier=tier))
