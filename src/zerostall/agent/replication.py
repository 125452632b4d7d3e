"""Replicas: this node's images go to other nodes' memory, theirs come here, and what is wanted ahead is fetched.

The home of a rank says to each partner what it has sealed; the partner fetches the newest that it lacks. So the one
who has the memory decides, nothing queues up (a newer image replaces one that still waits), and neither needs the
manager once the plan is known.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.agent.guest_disk import GuestDisk
from zerostall.agent.guests import Guests, Place
from zerostall.agent.images import Images
from zerostall.agent.loop_call import Post, on_loop
from zerostall.agent.pace import Pace
from zerostall.agent.partner import Partner
from zerostall.agent.peers import PeerDoor
from zerostall.agent.pulling import TRIES, Pulled, peek, pull
from zerostall.agent.transports import meter_of, open_transport
from zerostall.core.candidates import Past
from zerostall.core.placement import ImageId
from zerostall.core.replicas import next_wanted, outlived
from zerostall.errors import AgentError, CapacityError, ZerostallError
from zerostall.flow.budget import Budget
from zerostall.telemetry import log, say_once
from zerostall.wire import nodes as n
from zerostall.wire import peers as p
from zerostall.wire.messages import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from zerostall.agent.berth import Berth
    from zerostall.agent.doubt import Doubt
    from zerostall.agent.run import Run
    from zerostall.agent.runs import Runs
    from zerostall.config import MemberSettings
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record
    from zerostall.wire import cluster as w

PULLERS = 2
_LOOK_SECONDS = 0.5
_FULL_SECONDS = 5.0
"""An image that there was no memory for is not asked for again so soon, however often it is offered."""
_GONE_TOLD = 8
_SETTLED_TOLD = 8


@dataclass(frozen=True, slots=True)
class Want:
    """An image to fetch, and from whom."""

    image: ImageId
    step: int
    created: float
    world: int
    address: str
    attempt: str = ""


class Replication:
    """Raises (on construction): CapabilityError when the node cannot listen for others, or has no such transport."""

    def __init__(self, runs: Runs, settings: MemberSettings, secret: str, doubt: Doubt, post: Post) -> None:
        self.guests = Guests(Budget(settings.replica_budget), runs.pool)
        folder = settings.replica_disk
        self.guest_disk = GuestDisk(folder, runs.pool, self.guests, post) if folder is not None else None
        self.images = Images(runs, self.guests, doubt, post, self.guest_disk)
        self.received = 0
        self._transport = open_transport(settings.transport, settings.node, settings.peer)
        self.pace = Pace(settings.replica_rate, meter_of(self._transport, settings.peer))
        self.door = PeerDoor(settings.peer, secret, self.images, self.pace, self._heard, transport=self._transport)
        self._runs = runs
        self._node = settings.node
        self._secret = secret
        self._post = post
        self._partners: dict[str, Partner] = {}
        self._plan: dict[ImageId, tuple[w.Peer, ...]] = {}
        self._planned: set[ImageId] = set()
        self._offered: dict[ImageId, set[Past]] = {}
        self._gone: dict[ImageId, deque[Past]] = {}
        self._settled: dict[ImageId, deque[p.Settled]] = {}
        self._homes: dict[ImageId, str] = {}
        self._wants: dict[ImageId, Want] = {}
        self._busy: set[ImageId] = set()
        self._full: dict[ImageId, float] = {}
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._offer_for_ever, name="offers", daemon=True)]
        self._threads += [
            threading.Thread(target=self._pull_for_ever, name=f"puller {number}", daemon=True)
            for number in range(PULLERS)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        self.door.close()
        for partner in self._partners.values():
            partner.close()
        for thread in self._threads:
            thread.join(2.0)
        self._transport.close()
        if self.guest_disk is not None:
            self.guest_disk.close()

    def notes(self) -> tuple[w.RunNote, ...]:
        """On the loop: what of other nodes is here, for the manager."""
        return self.guests.notes() + (self.guest_disk.notes() if self.guest_disk is not None else ())

    def follow(self, answer: w.Answer) -> None:
        """What the manager says should be so. The reporter's thread."""
        if answer.plan is not None:
            self._plan = {ImageId(each.run, each.rank): each.peers for each in answer.plan.partners}
            self._planned = {ImageId(each.run, each.rank) for each in answer.plan.guests}
        ahead = {ImageId(each.run, each.rank) for each in answer.fetching}
        if self._planned or ahead or len(self.guests):
            wanted = self._planned | ahead
            self._post(lambda: self.guests.wanted(wanted))
        for each in answer.fetching:
            image = ImageId(each.run, each.rank)
            if each.source.node != self._node:
                self._want(Want(image, each.step, 0.0, 1 << 24, each.source.address, each.attempt))
        for dirty in answer.dirty:
            self._post(lambda dirty=dirty: self._forget(dirty))

    def known(self, image: ImageId) -> tuple[str, ...]:
        """Where other agents listen that may have the image, by the plan and by what was offered. Any thread."""
        home = self._homes.get(image)
        return tuple(peer.address for peer in self._plan.get(image, ())) + ((home,) if home else ())

    def _forget(self, dirty: w.Dirty) -> None:
        for image in self.guests.ranks_of(dirty.run):
            self.guests.forget(image, dirty.step, dirty.attempt)

    # -------------------------------------------------------------------------------------------------- offers

    def _offer_for_ever(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            plan = self._plan
            try:
                offers = on_loop(self._post, lambda plan=plan: self._look(plan))
            except ZerostallError as error:
                log.debug("nothing is offered: %s", error.args[0])
                continue
            addresses = {peer.address for peers in plan.values() for peer in peers}
            for address in [address for address in self._partners if address not in addresses]:
                self._partners.pop(address).close()
            for address, offer in offers:
                if address not in self._partners:
                    self._partners[address] = Partner(address, self._node, self._secret)
                self._partners[address].offer(offer)

    def _look(self, plan: dict[ImageId, tuple[w.Peer, ...]]) -> list[tuple[str, p.Offer]]:
        """On the loop: say how far copies are to who chooses what goes; then what each partner should know."""
        for run in self._runs:
            run.caller.copied(n.Copied(run.copying.current, tuple(self._copies(run, plan))))
        return self._offers(plan)

    def _offers(self, plan: dict[ImageId, tuple[w.Peer, ...]]) -> list[tuple[str, p.Offer]]:
        """On the loop: what each partner should know.

        An older image goes when a newer one needs its place. So where the newest is gone, it was worth nothing.
        """
        offers: list[tuple[str, p.Offer]] = []
        for run in self._runs:
            for rank, berth in run.berths.items():
                image = ImageId(run.folder.facts.run, rank)
                sealed = {
                    Past(slot.step, tier.record_of(slot.step).created)
                    for tier in berth.tiers()
                    for slot in tier.slots.sealed()
                }
                if image not in plan or not (sealed or image in self._offered):
                    continue
                newest = max(sealed, default=Past(-1, 0.0))
                gone = self._gone.setdefault(image, deque(maxlen=_GONE_TOLD))
                settled = self._settled.setdefault(image, deque(maxlen=_SETTLED_TOLD))
                spoiled = (Past(one.step, one.created) for one in berth.spoiled)
                good, void = outlived((Past(one.step, one.created) for one in settled), spoiled)
                lost = self._offered.get(image, set()) - sealed - good
                gone.extend(sorted(past for past in lost if past > newest and past not in gone))
                gone.extend(past for past in sorted(void) if past not in gone)
                gone.extend(past for past in run.revoked.get(rank, ()) if past not in gone)  # whatever is newer by now
                self._offered[image] = sealed
                told = tuple(past for past in gone if past not in sealed)
                # A partner may have what made room here before it was told that it is clean.
                settled.extend(one for one in _settled(berth) if one not in settled)
                offer = p.Offer(
                    image.run,
                    rank,
                    run.world,
                    self.door.address,
                    tuple(sorted(sealed)),
                    told,
                    settled=tuple(one for one in settled if Past(one.step, one.created) not in told),
                    wanted=run.copying.wanted(rank),
                    kept=run.copying.kept(rank),
                    every=None if run.url else run.trickle.interval,
                    where=plain(str(run.where))[-1000:],
                    name=run.folder.facts.name,
                )
                offers += [(peer.address, offer) for peer in plan[image]]
        return offers

    def _copies(self, run: Run, plan: dict[ImageId, tuple[w.Peer, ...]]) -> Iterator[n.RankCopies]:
        """How far the copies are of the images of this node's ranks."""
        for rank in sorted(run.berths.keys() & run.here):
            image = ImageId(run.folder.facts.run, rank)
            partners = (self._partners.get(peer.address) for peer in plan.get(image, ()))
            had = [one.had(image.run, rank) if one is not None else frozenset() for one in partners]
            yield run.copying.said(rank, had, self.door.gave[image])

    def _heard(self, offer: p.Offer) -> tuple[Past, ...]:
        """A home says what it has; what is here. A connection's thread."""
        image, there = ImageId(offer.run, offer.rank), set(offer.images)
        self._homes[image] = offer.address

        def look() -> tuple[Past | None, tuple[Past, ...]]:
            clean = [Past(one.step, one.created) for one in offer.settled]
            self.guests.offered(image, there, offer.gone, clean, offer.kept, offer.where, offer.name)
            if self.guest_disk is not None:
                self.guest_disk.heard(image, offer)
            wanted = next_wanted(self.guests.images(image), there, offer.wanted, self.guests.clean(image))
            return wanted, self.guests.sound(image)

        wanted, here = on_loop(self._post, look)
        full = time.monotonic() - self._full.get(image, float("-inf")) < _FULL_SECONDS
        if wanted is not None and not full:
            self._want(Want(image, wanted.step, wanted.created, offer.world, offer.address))
        return here

    # ------------------------------------------------------------------------------------------------- fetching

    def _want(self, want: Want) -> None:
        with self._changed:
            self._wants[want.image] = want
            self._changed.notify()

    def _next(self) -> Want | None:
        """The next image to fetch, once there is one; None when it is time to end."""
        with self._changed:
            while not self._stopping.is_set():
                for image, want in self._wants.items():
                    if image not in self._busy:
                        del self._wants[image]
                        self._busy.add(image)
                        return want
                self._changed.wait(1.0)
        return None

    def _pull_for_ever(self) -> None:
        while (want := self._next()) is not None:
            try:
                self._fetch(want)
            except CapacityError as error:
                self._full[want.image] = time.monotonic()
                say_once(f"replica {want.image}", "no replica of rank %d: %s", want.image.rank, error.args[0])
            except (ZerostallError, OSError) as error:
                log.info("step %d of rank %d did not come: %s", want.step, want.image.rank, error)
            except Exception:  # noqa: BLE001 - one image's trouble must not end the others
                log.exception("step %d of rank %d did not come", want.step, want.image.rank)
            finally:
                with self._changed:
                    self._busy.discard(want.image)
                    self._changed.notify()

    def _fetch(self, want: Want) -> None:
        """Bring an image into this node's memory, unless it is here by now."""
        here = on_loop(self._post, lambda: self.guests.images(want.image))
        if any(past.step == want.step and want.created in (0.0, past.created) for past in here):
            return
        start = time.monotonic()
        places: list[Place] = []

        def room(layout: Layout, record: Record) -> Callable[[int, int], memoryview]:
            place = on_loop(self._post, lambda: self.guests.reserve(want.image, record.world, layout))
            if place is None:
                raise AgentError(
                    f"both slots of rank {want.image.rank} are read, or hold what counts until there is news"
                )
            places.append(place)
            return place.view

        request = p.Pull(want.image.run, want.image.rank, want.step, want.created)
        try:
            came = self.pull(want.address, request, room)
        except BaseException:
            if places:
                self._post(lambda: self.guests.discard(places[0]))
            raise
        attempt = came.attempt or want.attempt
        on_loop(self._post, lambda: self.guests.seal(places[0], came.record, attempt))
        if (disk := self.guest_disk) is not None:
            self._post(lambda: disk.look(want.image))
        seconds = time.monotonic() - start
        log.info("step %d of rank %d is here, %.3f s", want.step, want.image.rank, seconds)

    def pull(
        self,
        address: str,
        request: p.Pull,
        room: Callable[[Layout, Record], Callable[[int, int], memoryview]],
        tries: int = TRIES,
        known: Mapping[str, Layout] | None = None,
    ) -> Pulled:
        """Fetch an image, or chunks of one; see `pulling.pull`."""
        return pull(
            address,
            self._node,
            self._secret,
            request,
            room,
            transport=self._transport,
            tries=tries,
            received=self._count,
            stopping=lambda seconds: self._stopping.wait(seconds),
            known=known,
        )

    def peek(self, address: str, requests: Iterable[p.Pull], known: dict[str, Layout]) -> Iterator[Pulled]:
        """What images are, without their bytes; see `pulling.peek`."""
        return peek(address, self._node, self._secret, requests, known)

    def _count(self, nbytes: int) -> None:
        self.received += nbytes


def _settled(berth: Berth) -> Iterator[p.Settled]:
    """The images of a rank that are of clean steps."""
    for tier in berth.tiers():
        for step in tier.steps():
            yield p.Settled(step, tier.record_of(step).created, tier.manifest(step).created)
