"""What a trainer asks of its agent once it is attached, and what it says."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from zerostall.agent.wish import Wish
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.candidates import Past
from zerostall.core.placement import ImageId
from zerostall.core.roll import Save
from zerostall.errors import AgentError, CapacityError, FormatError
from zerostall.telemetry import log
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.agent.berth import Berth
    from zerostall.agent.client import Client
    from zerostall.agent.doubt import Doubt
    from zerostall.agent.elsewhere import Elsewhere
    from zerostall.agent.run import Run
    from zerostall.agent.vaults import Vaults
    from zerostall.core.manifest import Record


class Requests:
    """Called on the agent's loop.

    Args:
        reclaim: takes memory back that nobody needs; whether there was some.
        elsewhere: what other nodes have, where this one belongs to a cluster.
        doubt: told of images that trainers find damaged.
    """

    def __init__(
        self, vaults: Vaults, reclaim: Callable[[], bool], elsewhere: Callable[[], Elsewhere | None], doubt: Doubt
    ) -> None:
        self._vaults = vaults
        self._doubt = doubt
        self._reclaim = reclaim
        self._elsewhere = elsewhere

    def serve(self, client: Client, run: Run, berth: Berth, message: m.FromTrainer, fds: list[int]) -> None:
        """Do what it asks, or raise what it is refused with. `fds` came beside the message."""
        match message:
            case m.Sealed():
                berth.fallbacks = message.fallbacks
                if not berth.granted(message.slot, message.grant):
                    log.debug("rank %d of %s: an image is told of once more", berth.rank, run.where)
                elif message.stowed is not None:
                    run.stow(berth, message.slot, *_sealed(message), message.stowed)
                else:
                    berth.ungrant_place()
                    run.seal(berth, message.slot, *_sealed(message))
                run.tally.held_up(message.stalls)
            case m.Rent():
                run.rent(berth, message, self._vaults)
            case m.NoUse():
                if berth.stowage is not None:
                    berth.stowage.no_use(message)
            case m.Leave():
                client.leaving = client.broken = True
            case m.Begin():
                run.begin(berth, message.epoch)
            case m.Passed():
                save = Save(message.epoch, message.step, message.turn)
                run.passed(berth, save, message.reason, skipped=message.skipped)
            case m.Plan():
                run.caller.plan(message)
            case m.Discarded():
                log.warning("%s, rank %d: step %d is dirty: %s", run.where, berth.rank, message.step, message.reason)
                berth.discard(message.slot, message.grant)
                run.passed(berth, Save(message.epoch, message.step, message.turn), message.reason)
            case m.Revoked():
                run.revoke(berth, Past(message.step, message.created), message.reason)
            case m.Promise():
                run.promises.make(berth, Past(message.step, message.created), message.tier)
            case m.Lease():
                self._lease(client, run, berth, message)
            case m.Adopt():
                self._adopt(client, run, berth, message, fds)
            case m.Find():
                if (elsewhere := self._elsewhere()) is not None:
                    run.fetches.elsewhere = elsewhere.of_run(run.folder.facts.run, run.world)

                def find() -> None:
                    run.fetches.find(client, message, berth.rank, run.copies_for(berth))

                # The newest step may be on its way from a vault, or put and not committed in this node's folder.
                put = run.outpost.own if run.outpost is not None else run.seat.drafts if run.seat is not None else None
                run.undrained.when_none(find if put is None else partial(put.when_settled, find))
            case m.Fetch():
                wanted = berth.rank if message.rank is None else message.rank
                client.looks_at.add((wanted, message.step, message.tier))
                run.fetches.fetch(client, run.berths, berth.rank, message)
            case m.Common():
                run.fetches.common(client, message)
            case m.Take():
                run.fetches.take(client, message)
            case m.Describe() | m.Quote():
                run.fetches.describe(client, run.berths, berth.rank, message)
            case m.Tidy():
                run.when_tidy(lambda: client.send(m.Done(id=message.id)))
            case m.Release():
                for rank, step, tier in sorted(client.looks_at) if message.damaged else ():
                    why = f"the trainer of rank {berth.rank} found it while it restored: {message.damaged}"
                    self._doubt(ImageId(run.folder.facts.run, rank), step, why, disk=tier == "disk")
                client.release_fetched()
            case _:
                raise AgentError(f"{type(message).__name__} is not for this connection")

    def _lease(self, client: Client, run: Run, berth: Berth, request: m.Lease) -> None:
        layout = layouts.decode(request.layout, request.begins)
        lent = run.lends(berth, layout, request.slots)
        try:
            tier = berth.lease(layout, request.slots, lent)
        except CapacityError as error:
            if not self._reclaim() and lent <= request.slots:
                raise
            # What is lent for other nodes' sake keeps no rank from saving: the machine may have less than the budget.
            log.info("%s, rank %d: memory for %d images alone: %s", run.where, berth.rank, request.slots, error.args[0])
            tier = berth.lease(layout, request.slots)
        run.folder.begins_with(layout)
        berth.take_back_grant()
        berth.moored = True
        lent = m.Lent(tier.key, tier.segment.nbytes)
        answer = m.Leased(id=request.id, memory=lent, stride=tier.stride, slots=tier.slots.count)
        client.send(answer, tier.segment.fileno())

    def _adopt(self, client: Client, run: Run, berth: Berth, request: m.Adopt, fds: list[int]) -> None:
        layout = layouts.decode(request.layout, request.begins)
        if len(fds) != 1:
            raise FormatError("Adopt needs the segment's descriptor beside it")
        tier = berth.adopt(layout, request.slots, fds[0])
        images = [(image.slot, *_sealed(image)) for image in request.images]
        for slot, record, wish in sorted(images, key=lambda image: image[2].save):
            if not berth.has(slot, record):
                if wish.save <= berth.heard:
                    continue  # this agent had it, and has let go of it
                tier.slots.claim(slot)
            run.seal(berth, slot, record, wish, adopted=True)
        for image in sorted(request.stowed, key=lambda image: _sealed(image)[1].save):
            self._stow_again(run, berth, image)
        if request.busy_slot is not None:
            tier.slots.claim(request.busy_slot)
            if berth.stowage is not None:
                berth.stowage.claim(*request.place)
        berth.grant = request.grant  # of any that are newer it has not heard, and is captured into no slot of theirs
        berth.moored = True
        client.send(m.Done(id=request.id))
        for _, record, wish in [*images, *((image.slot, *_sealed(image)) for image in request.stowed)]:
            past = Past(record.step, record.created)
            if berth.stowage is None or berth.stowage.find(past) is None:
                run.promises.say_again(berth, past, promised=wish.promise)

    def _stow_again(self, run: Run, berth: Berth, image: m.Sealed) -> None:
        """A trainer whose connection broke has not heard what became of what lay in a vault; nor may this agent."""
        record, wish = _sealed(image)
        past = Past(record.step, record.created)
        tier, stowage, stowed = berth.tier_with(past.step), berth.stowage, image.stowed
        if stowage is not None and stowage.find(past) is not None:
            if wish.promise:
                run.promises.make(berth, past)
        elif tier is not None and berth.created(past.step) == past.created:
            encoded = manifests.encode_record(tier.record_of(past.step))
            berth.send(m.Drained(slot=image.slot, step=past.step, created=past.created, record=encoded))
        elif wish.save <= berth.heard or berth.was_spoiled(past):
            return  # this agent had it, and has let go of it
        elif stowage and stowed and berth.current and stowage.claim(stowed.locker, stowed.place):
            berth.current.slots.claim(image.slot)
            run.stow(berth, image.slot, record, wish, stowed)
        else:
            reason = "the agent died, and with it the vault that it lay in"
            lost = m.Spoiled(past.step, past.created, berth.rank, reason, kind="AgentError")
            berth.send(lost)
            run.passed(berth, wish.save, reason)


def _sealed(message: m.Sealed) -> tuple[Record, Wish]:
    record = manifests.decode_record(message.record)
    save = Save(message.epoch, record.step, message.turn)
    return record, Wish(save, message.promise, message.replace, message.pin, message.aside)
