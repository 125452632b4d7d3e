"""What happens to a run on this node: trainers come and go, images are sealed, steps become clean and travel on.

    granted ──seal──▶ sealed ──of all ranks──▶ clean ──trickle──▶ on disk ──carrier──▶ in the store
       └────────────passed, or revoked───────────▶ spoiled: it goes on all ranks

Who decides that a step is clean is the run's `caller`: this agent (`chair`), or that of rank 0's node (`outpost`). What
follows comes by `verdicts`, who waits for more has a promise (`promises`), and what there is of the run meanwhile is
its `standing`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from zerostall.agent.berth import Berth
from zerostall.agent.cargo import cargo_of_disk, cargo_of_memory, no_cargo
from zerostall.agent.carrier import Carrier
from zerostall.agent.chair import Chair
from zerostall.agent.outpost import Outpost
from zerostall.agent.promises import Promises
from zerostall.agent.quay import Quay
from zerostall.agent.seat import Seat
from zerostall.agent.standing import Standing
from zerostall.agent.stowage import Stowage
from zerostall.agent.takeover import take_again, take_folder
from zerostall.core.copying import MOST_MORE, lent
from zerostall.errors import FormatError, RunBusyError, RunMismatchError, ZerostallError
from zerostall.telemetry import log
from zerostall.tiers.host import stride_of
from zerostall.tiers.modes import Modes
from zerostall.wire.channel import process_lives

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerostall import native
    from zerostall.agent.client import Client, NodeClient
    from zerostall.agent.loop_call import Post
    from zerostall.agent.vaults import Vaults
    from zerostall.agent.wish import Wish
    from zerostall.core.candidates import Past
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record
    from zerostall.core.roll import Save
    from zerostall.flow.budget import Budget
    from zerostall.flow.governor import Governor
    from zerostall.wire import messages as m


class Run(Standing):
    """Driven by the agent's one loop; the two workers come back through `post`.

    Attributes:
        lossless: every image that is sealed gets to disk.
        seat: what other nodes' agents come to, where this one decides for several.
        outpost: what ties this agent to that of rank 0's node, where it is on another one.

    Args:
        watch: has the loop serve the agent of another node, too.

    Raises (on construction): StorageError, RunBusyError, FormatError.
    """

    def __init__(
        self,
        where: Path,
        world: int,
        budget: Budget,
        pool: native.Pool,
        post: Post,
        governor: Governor,
        url: str = "",
        watch: Callable[[NodeClient], None] = lambda client: None,
    ) -> None:
        super().__init__(
            where, world, url, pool, post, governor, advance=self.advance, grant=self._grant, clean=self._clean
        )
        self.promises = Promises(self)
        self.seat: Seat | None = None
        self.outpost: Outpost | None = None
        self.lossless = False
        self._budget = budget
        self._post = post
        self._governor = governor
        self._pool = pool
        self._watch = watch
        self._patience = 600.0
        self.trickle.evicted = self._evicted

    # -------------------------------------------------------------------------------------------------------- attaching

    def sit(self, nodes: m.Nodes | None) -> None:
        """Take this node's place among those of the run, as a trainer says it; the one it has, if that is the same.

        Raises:
            CapabilityError: this node cannot listen for the others.
        """
        outpost, seat = self.outpost, self.seat
        self.part = None if nodes is None else frozenset(nodes.here)
        if nodes is None:
            stays = outpost is None and seat is None
        elif nodes.seat:
            stays = seat is not None and nodes.meeting in (None, seat.meeting)
        else:
            stays = outpost is not None and outpost.meeting == nodes.meeting and not outpost.failed
        if stays:
            return
        for one in (outpost, seat):
            if one is not None:
                one.close()
        self.seat = self.outpost = self.trickle.fellows = None
        if nodes is not None and not nodes.seat:
            self.caller = self.outpost = Outpost(self, self.promises, nodes, self._post, self._watch)
        else:
            if nodes is not None:
                self.seat = Seat(self, self.promises, nodes, self._post, self._watch, self.advance)
            self.caller = chair = Chair(self.where, self.world, self.verdicts, self.copying, self.seat)
            if self.seat is not None:
                self.seat.chair = chair
            self.trickle.fellows = self.seat
        self.trickle.off = bool(self.url) or self.outpost is not None
        if self.carrier is not None:
            self.carrier.close()  # where it takes steps from may be another agent's now
            self.carrier = self.fetches.remote = None

    def carry_to(self, rules: m.RemoteRules | None) -> Carrier | None:
        """Have what carries steps to the remote tier, if the trainer wants one.

        Raises:
            CapabilityError, ValueError: that cannot be.
        """
        if self.carrier is not None and (rules is None or rules.url != self.carrier.url):
            self.carrier.close()
            self.carrier = self.fetches.remote = None
        if rules is not None and self.carrier is None:
            cargo = no_cargo() if self.outpost else cargo_of_memory(self) if self.url else cargo_of_disk(self)
            self.carrier = Carrier(
                rules, self.berths, self.folder, cargo, self._governor, self._post, self.advance, self.tell
            )
            self.fetches.remote = self.carrier.tier
            self.trickle.landed = self._landed
            self.trickle.protected = self.carrier.protected
        elif rules is not None and self.carrier is not None:
            self.carrier.use(rules)
        return self.carrier

    def attach(self, client: Client, hello: m.Hello) -> Berth:
        """A trainer takes its rank's berth."""
        berth = self.berths.get(hello.rank)
        if berth is not None and berth.client is not None and not process_lives(berth.client.pid):
            berth.client.broken = True  # a child of the dead trainer still holds its socket
            berth.take_back()
        if berth is not None and berth.client is not None:
            if berth.client.pid == hello.pid:
                raise RunBusyError(
                    f"rank {hello.rank} of {self.where} is open already in this very process, {hello.pid}",
                    hint="close() that Checkpointer first, or leave its `with`",
                )
            raise RunBusyError(
                f"rank {hello.rank} of {self.where} belongs to the live trainer with pid {berth.client.pid}",
                hint="end that one first, or give this one a folder of its own",
            )
        if hello.world != self.world and any(berth.client for berth in self.berths.values()):
            raise RunMismatchError(f"{self.where} runs with {self.world} ranks now, this trainer says {hello.world}")
        if hello.umask is not None:
            self.folder.use(Modes(hello.umask))
        if self.outpost is None:
            take_folder(self, hello)
        elif self.outpost.own is not None:
            self.outpost.own.take(hello)
        if hello.world != self.world:
            self.world = hello.world
            if isinstance(self.caller, Chair):
                self.caller.begin(hello.world)
        rules = hello.rules
        self.trickle.keep = rules.keep()
        self.trickle.interval = rules.disk_interval
        self.lossless = rules.lossless
        self._patience = rules.patience
        if berth is None:
            berth = Berth(str(self.where), hello.rank, self._budget, self._pool)
            self.berths[hello.rank] = berth
        berth.client = client
        self.caller.found(hello.rank)
        return berth

    def detach(self, client: Client) -> None:
        for rank, berth in self.berths.items():
            if berth.client is client:
                berth.take_back()
                self.away.parted(rank, client, time.monotonic())
        self.trickle.hurry()  # nobody trains: the newest snapshot goes to disk now
        if self.carrier is not None and not self.attached():
            self.carrier.hurry()
        self.advance()

    # --------------------------------------------------------------------------------------------------- what ranks say

    def seal(self, berth: Berth, slot: int, record: Record, wish: Wish, *, adopted: bool = False) -> None:
        """A rank's image is whole; the step is clean when every rank's is.

        An `adopted` image was sealed under the agent before this one and may be on disk already.
        """
        if record.run != self.folder.facts.run or record.rank != berth.rank:
            raise FormatError(f"a record of run {record.run}, rank {record.rank} came from rank {berth.rank}")
        if berth.has(slot, record):
            return
        before = berth.sealed()
        berth.forget(wish.aside)
        if not adopted:
            self.folder.on_disk.discard(record.step)
        elif record.step in self.folder.on_disk:
            there = self.folder.disk.created(record.step, berth.rank)
            if there != record.created:
                self.folder.on_disk.discard(record.step)  # that is another one of its number, or damaged
                wish.replace = wish.replace or not there
        wish.promise = (wish.promise or wish.pin or self.lossless) and record.step not in self.folder.on_disk
        if wish.promise:
            self.trickle.hurry()
        self.verdicts.epoch = max(self.epoch, wish.save.epoch)
        berth.seal(slot, record, wish)
        berth.heard = max(berth.heard, wish.save)
        self.tally.sealed_bytes += record.nbytes
        if self.carrier is not None and not adopted and berth.rank == min(self.here):
            self.carrier.saved(record.step, record.created)
        self.trickle.try_again(record.step)
        self.promises.replaced(berth, before)
        self.caller.sealed(berth, record, wish, adopted=adopted)

    def lends(self, berth: Berth, layout: Layout, asked: int) -> int:
        """How many images' memory the rank is to be lent."""
        there = berth.current
        if not self.member or self.world == 1:
            return asked
        if there is not None and there.layout.same(layout) and asked <= there.slots.count <= asked + MOST_MORE:
            return there.slots.count
        empty = sum(1 for rank in self.here if (one := self.berths.get(rank)) is None or one.current is None)
        free = self._budget.limit - self._budget.lent
        several = self.part is not None
        count, reason = lent(asked, stride_of(layout), max(1, empty), free, several=several)
        log.info("%s, rank %d: memory for %d images, %s", self.where, berth.rank, count, reason)
        return count

    def rent(self, berth: Berth, request: m.Rent, vaults: Vaults) -> None:
        """A trainer wants to capture into other GPUs' memory."""
        if berth.stowage is None:
            quay = Quay(
                seal=partial(self.seal, berth),
                passed=partial(self.passed, berth),
                promise=partial(self.promises.make, berth),
                idle=self.undrained.look,
                advance=self.advance,
            )
            berth.stowage = Stowage(self.where, berth, quay, vaults)
        berth.stowage.rent(request)

    def stow(self, berth: Berth, slot: int, record: Record, wish: Wish, stowed: m.Stowed) -> None:
        """A rank's image is whole, but for what a vault has still to bring."""
        if record.run != self.folder.facts.run or record.rank != berth.rank or berth.stowage is None:
            raise FormatError(f"a record of run {record.run}, rank {record.rank} came from rank {berth.rank}")
        berth.stowage.stow(slot, record, wish, stowed)

    def begin(self, berth: Berth, epoch: int) -> None:
        """The ranks have agreed where to go on from."""
        self.verdicts.epoch = max(self.epoch, epoch)
        self.caller.began(berth.rank, epoch)
        berth.forget_unfinished(epoch)

    def passed(self, berth: Berth, save: Save, reason: str, *, skipped: bool = False) -> None:
        """A rank goes on without that save."""
        self.verdicts.epoch = max(self.epoch, save.epoch)
        self.caller.passed(berth.rank, save, reason, skipped=skipped)

    def revoke(self, berth: Berth, past: Past, reason: str) -> None:
        """A sealed image is dirty after all: it goes from every tier, and so do the other ranks' of that save.

        Others of its step's number stay.
        """
        step = past.step
        log.warning("%s, rank %d: step %d is dirty after all: %s", self.where, berth.rank, step, reason)
        save = berth.wishes[step].save if berth.created(step) == past.created else None
        if save is not None:
            berth.unseal(step)
            self.trickle.give_up(step)
        elif berth.stowage is not None and (wish := berth.stowage.revoke(past, reason)) is not None:
            save = wish.save
        self.remember_revoked(berth.rank, past)
        self.caller.revoked(berth.rank, save, past, reason)
        if berth.manifest(step) is not None:
            self.trickle.try_again(step)  # the one that this had outdone
        if self.outpost is None or self.outpost.own is not None:
            self.evict(berth.rank, past)

    def _evicted(self, past: Past) -> None:
        """A committed step, by when rank 0 saved it, is no more on disk: it is dirty."""
        if self.carrier is not None:
            self.carrier.evict(past)
        for node in (self.seat, self.outpost):
            if node is not None:
                node.evicted(past)

    # ----------------------------------------------------------------------------------------------------- what follows

    def advance(self) -> None:
        """Do whatever can be done now: write the next step, grant slots, give back memory, let the folder go."""
        if not self.attached() and not self.folder.taken() and self.trickle.due():
            self._take_again()
        self.trickle.start()
        if self.carrier is not None and self.folder.taken():
            self.carrier.start()
        self._grant()
        self.away.look(time.monotonic())
        self.caller.look(self._patience)
        keep = self.kept()
        for berth in self.berths.values():
            berth.drop_older(keep)
            if berth.stowage is not None:
                berth.stowage.advance(time.monotonic())
        self._drop_former_ranks()
        if not self.attached() and (not self.busy() or self._rests()):
            self.folder.let_go()

    def _rests(self) -> bool:
        """Does all that is to be done in the folder wait for its disk? Then it may be mended, or unmounted."""
        carrying = self.carrier is not None and self.carrier.busy()
        return self.part is None and self.trickle.resting() and not self.fetches.busy() and not carrying

    def _take_again(self) -> None:
        try:
            take_again(self)
        except ZerostallError as error:
            log.warning("%s", error)
            self.trickle.put_off(error)

    def when_tidy(self, call: Callable[[], None]) -> None:
        """Call on the loop's thread when what is under way, and the retention behind it, are done."""
        if self.url and self.carrier is not None:
            self.carrier.when_tidy(call)
        else:
            self.trickle.when_tidy(call)

    def _grant(self) -> None:
        """Give every trainer without a slot one, if one can be had."""
        keep, several = self.kept(), self.part is not None
        for rank, berth in self.berths.items():
            before = berth.sealed()
            grant = berth.next_grant(keep, self.copying.spared(rank, several=several))
            if grant is not None:
                self.promises.replaced(berth, before)
                berth.send(grant)

    def _clean(self, step: int) -> None:
        """A step is clean in memory."""
        if self.url:
            self._landed(step)
        if self.seat is not None:
            self.seat.made_clean(step)

    def _landed(self, step: int) -> None:
        """The step got to where the carrier takes steps from."""
        if self.carrier is not None:
            self.carrier.changed(step)

    def _drop_former_ranks(self) -> None:
        """Give back the memory of ranks of a larger world, once the world of now has a step of its own on disk."""
        former = [rank for rank, berth in self.berths.items() if rank not in self.here and not berth.held()]
        if not former or not self.has_own_step():
            return
        for rank in former:
            if self.berths[rank].client is None:
                self.berths.pop(rank).close()

    def close(self) -> None:
        """Wait for what is under way, then give back the memory and the folder."""
        for berth in self.berths.values():
            if berth.stowage is not None:
                berth.stowage.straight.close()  # who writes waits for this very loop
        for one in (self.outpost, self.seat):
            if one is not None:
                one.close()
        self.trickle.close()
        if self.carrier is not None:
            self.carrier.close()
        self.fetches.close()
        for berth in self.berths.values():
            berth.close()
        self.folder.let_go()
