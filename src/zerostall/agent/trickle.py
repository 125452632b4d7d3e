"""From host memory to disk: which clean step goes next, and what becomes of it. One at a time."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zerostall.agent.wish import Wish
from zerostall.core import backoff
from zerostall.core.candidates import Past
from zerostall.core.retention import Keep
from zerostall.errors import StorageError, ZerostallError
from zerostall.flow.governor import WritePace
from zerostall.flow.persist import Order, Outcome, persist, prune
from zerostall.flow.worker import Worker
from zerostall.telemetry import log
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from zerostall.agent.berth import Berth
    from zerostall.agent.fellows import Fellows
    from zerostall.agent.fetches import Fetches
    from zerostall.agent.folder import RunFolder
    from zerostall.agent.loop_call import Post
    from zerostall.agent.tally import Tally
    from zerostall.core.manifest import Manifest, RankFacts
    from zerostall.core.roll import Save
    from zerostall.flow.governor import Governor
    from zerostall.tiers.disk import DiskTier
    from zerostall.tiers.host import Held, HostTier
    from zerostall.wire import nodes as n


@dataclass(slots=True)
class Flight:
    """A step on its way to disk, and the images it keeps in place meanwhile."""

    order: Order
    held: dict[int, tuple[HostTier, Held]]
    save: Save


class Trickle:
    """Driven by the agent's loop; its writer comes back through `post`.

    Args:
        here: says which ranks' images belong here; none says all.

    Attributes:
        fellows: the ranks on other nodes, where this one writes theirs, too.
        keep: what retention keeps.
        interval: seconds from one write to the next, while nobody waits for it.
        last_error: what went wrong last, until a write works again.
        off: the run has no disk.
        landed: called with each step that got there.
        evicted: called with each committed step that went because an image of it is dirty.
        protected: steps that retention leaves, for somebody reads them.
        refused: called with rank, step and reason for each image of a step that the disk did not take for what it is.
    """

    def __init__(
        self,
        berths: Mapping[int, Berth],
        folder: RunFolder,
        fetches: Fetches,
        post: Post,
        advance: Callable[[], None],
        tally: Tally,
        governor: Governor,
        here: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.keep = Keep()
        self.interval = 0.0
        self.last_error = ""
        self.off = False
        self.fellows: Fellows | None = None
        self.landed: Callable[[int], None] = lambda step: None
        self.evicted: Callable[[Past], None] = lambda past: None
        self.protected: Callable[[], frozenset[int]] = frozenset
        self.refused: Callable[[int, int, str], None] = lambda rank, step, why: None
        self._berths = berths
        self._folder = folder
        self._fetches = fetches
        self._post = post
        self._advance = advance
        self._tally = tally
        self._governor = governor
        self._here = here
        self._flight: Flight | None = None
        self._untidy = 0
        self._failures = 0
        self._retry_at = 0.0  # when the disk's turn comes again, after a failure or a rest
        self._began = 0.0
        self._given_up: set[int] = set()
        self._writer = Worker(f"trickle {folder.where.name}")

    # ------------------------------------------------------------------------------------------- what to write

    def clean_steps(self) -> list[int]:
        """Steps of which every image that belongs here is here, rising."""
        first = self._berths.get(min(self._here(), default=0))
        return [] if first is None else [step for step in first.clean_steps() if self._whole(step, first)]

    def next_step(self) -> int | None:
        """The step to write next: a promised one, the oldest first; else the newest clean one."""
        if self.off:
            return None
        clean = self.clean_steps()
        waiting = [step for step in clean if step not in self._folder.on_disk and step not in self._given_up]
        if self.fellows is not None:
            waiting = [step for step in waiting if self._covered(step, self.fellows)]
        waited_for = next((step for step in waiting if self._waited_for(step)), None)
        if waited_for is not None:
            return waited_for
        return waiting[-1] if waiting and waiting[-1] == clean[-1] else None

    def writing(self) -> int | None:
        """The step that is on its way."""
        return self._flight.order.step if self._flight else None

    def busy(self) -> bool:
        """Is a step on its way to disk or about to go, or retention at work?"""
        return self._flight is not None or self._untidy > 0 or self.next_step() is not None

    def retry_in(self) -> float | None:
        """Seconds until `start` has something to retry; None when it has not."""
        if self._flight is not None or self._retry_at == 0.0 or self.next_step() is None:
            return None
        return max(0.0, self._retry_at - time.monotonic())

    def due(self) -> bool:
        """Is it time for the next step to go?"""
        return self._flight is None and time.monotonic() >= self._retry_at and self.next_step() is not None

    def resting(self) -> bool:
        """Has the last write failed, and is nothing done until its turn comes again?"""
        return self._failures > 0 and self._flight is None and self._untidy == 0 and time.monotonic() < self._retry_at

    def hurry(self, *, though_failing: bool = False) -> None:
        """Somebody waits for the disk now, or nobody trains: it rests no longer. Unless its last write has failed."""
        if self._failures == 0 or though_failing:
            self._retry_at = 0.0

    def try_again(self, step: int) -> None:
        """There is a new image of the step."""
        self._given_up.discard(step)

    def give_up(self, step: int) -> None:
        """The step is dirty after all. Where it is being written just now, that ends first."""
        self._given_up.add(step)
        self._folder.on_disk.discard(step)

    def _ranks(self, manifest: Manifest) -> Collection[int]:
        """Those of a step whose images belong in this node's memory."""
        here = self._here()
        return here if here else range(manifest.world)

    def _whole(self, step: int, first: Berth) -> bool:
        manifest = first.manifest(step)
        if manifest is None:
            return False
        others = (self._berths.get(rank) for rank in self._ranks(manifest))
        return all(
            berth is not None and berth.manifest(step) == manifest and not berth.damage(step) for berth in others
        )

    def _covered(self, step: int, fellows: Fellows) -> bool:
        """Have the other nodes the rest of the step's images?"""
        berth = self._berths[0]
        manifest, wish = berth.manifest(step), berth.wishes.get(step)
        return manifest is not None and wish is not None and fellows.covers(manifest, wish.save)

    def _may_pause(self) -> bool:
        """May the disk rest for a while? Not when somebody waits for it, nor when the trainers are gone."""
        step = self.next_step()
        attached = any(berth.client for berth in self._berths.values())
        return self.interval > 0 and attached and (step is None or not self._waited_for(step))

    def _waited_for(self, step: int) -> bool:
        """Was the step promised to the disk on any rank?"""
        return any(berth.promised(step) for berth in self._berths.values())

    # ------------------------------------------------------------------------------------------------- writing

    def start(self) -> None:
        """Send the next step on its way, if there is one and it is its time."""
        if self._flight is not None or time.monotonic() < self._retry_at:
            return
        step = self.next_step()
        if step is None or not self._folder.taken():
            return
        manifest = self._berths[0].manifest(step)
        assert manifest is not None
        held: dict[int, tuple[HostTier, Held]] = {}
        wishes: list[Wish | n.Sealed] = []
        for rank in self._ranks(manifest):
            tier = self._berths[rank].tier_with(step)
            assert tier is not None
            held[rank] = tier, tier.hold(step)
            wishes.append(self._berths[rank].wishes.get(step, Wish()))
        promised = self._waited_for(step)
        pace = partial(WritePace, self._governor, promised=promised)
        first = self._berths[0].wishes.get(step, Wish())
        wishes += self.fellows.wishes(first.save) if self.fellows else []
        order = Order(
            manifest=manifest,
            images=tuple(self._berths[rank].image(*kept, self._post) for rank, kept in held.items()),
            others=self.fellows.errand(first.save) if self.fellows else None,
            here=self.fellows.here(manifest) if self.fellows else None,
            replace=any(wish.replace for wish in wishes),
            pin=any(wish.pin for wish in wishes),
            aside=tuple(sorted({past for wish in wishes for past in wish.aside})),
        )
        self._flight = Flight(order, held, first.save)
        self._began = time.monotonic()
        self._untidy += 1

        def write() -> None:
            with self._governor.writing(promised=promised):
                outcome = persist(self._folder.disk, order, self._folder.hold, pace)
            self._post(lambda: self._landed(outcome))
            if outcome.error is None:
                prune(self._folder.disk, self.keep, self._fetches.steps() | self.protected() | {order.step})
            self._post(self._tidied)

        self._writer.submit(write)

    def meanwhile(self, call: Callable[[], None]) -> None:
        """Do that on the thread that alone writes to the folder, when nothing else is being written. Any thread."""

        def counted() -> None:
            try:
                call()
            finally:
                self._post(self._tidied)

        def submit() -> None:
            self._untidy += 1
            self._writer.submit(counted)

        self._post(submit)

    def when_tidy(self, call: Callable[[], None]) -> None:
        """Call on the loop's thread when the order under way and the retention behind it are done."""
        self._writer.submit(lambda: self._post(call))

    def evict(self, rank: int, past: Past, facts: RankFacts | None = None) -> None:
        """Remove a step from disk, if that rank's image there is this very one; after what is under way.

        `facts`: what the manifest says of that image, which need not be in this node's folder.
        """
        disk = self._folder.disk

        def remove() -> None:
            if disk.created(past.step, rank) == past.created or _speaks_of(disk, past.step, facts):
                self._evict(past.step)

        self._writer.submit(remove)

    def evict_whole(self, past: Past) -> None:
        """Remove a committed step, which another node's folder has no more for one of its images is dirty."""

        def remove() -> None:
            if self._folder.disk.created(past.step) == past.created:
                self._evict(past.step)

        self.meanwhile(remove)

    def _evict(self, step: int) -> None:
        """The writer's thread."""
        past = Past(step, self._folder.disk.created(step))
        self._folder.disk.evict(step)
        self._post(lambda: self.evicted(past))

    def close(self) -> None:
        """Wait for what is under way."""
        self._writer.close()

    def _tidied(self) -> None:
        self._untidy -= 1

    def _landed(self, outcome: Outcome) -> None:
        flight, self._flight = self._flight, None
        assert flight is not None
        if self.fellows:
            self.fellows.stored(flight.order, flight.save, outcome.error)
        same = True
        for rank, (tier, held) in flight.held.items():
            tier.release(held)
            berth = self._berths[rank]
            if berth.created(outcome.step) == held.image.record.created:
                tier.slots.promise(held.slot, False)
            else:
                same = False  # saved anew meanwhile, revoked, or set aside
            if outcome.error is None and (wish := berth.wishes.get(outcome.step)):
                wish.replace, wish.aside = True, ()  # one of its number is there now
        if outcome.error is None:
            self._failures, self.last_error = 0, ""
            self._tally.stored_bytes += sum(image.record.nbytes for image in flight.order.images)
            self._retry_at = self._began + self.interval if self._may_pause() else 0.0
            held_here = {step for berth in self._berths.values() for step in berth.sealed_steps()}
            self._folder.on_disk.intersection_update(held_here)  # of the others the folder itself tells
            self._given_up.intersection_update(held_here)
            if same:
                self._folder.on_disk.add(outcome.step)
            for rank, (_, held) in flight.held.items():
                created = held.image.record.created
                self._berths[rank].send(m.Reached(step=outcome.step, created=created, tier="disk"))
            self.landed(outcome.step)
        else:
            self._failed(flight, outcome.error)
        self._advance()

    def put_off(self, error: ZerostallError) -> None:
        """The next step cannot go now."""
        self._failures += 1
        self._retry_at = time.monotonic() + backoff.pause(self._failures, random.random())
        self.last_error = str(error.args[0])

    def _failed(self, flight: Flight, error: ZerostallError) -> None:
        step = flight.order.step
        self.put_off(error)
        self.last_error = f"step {step}: {error.args[0]}"
        if not isinstance(error, StorageError):
            self._given_up.add(step)  # trying again would end the same way
            for rank in flight.held:
                self.refused(rank, step, "it was refused on its way to disk")
        log.error("%s: step %d did not get to disk: %s", self._folder.where, step, error)
        for rank, (_, held) in flight.held.items():
            self._berths[rank].send(m.Failed.of(m.Refused.of(0, error), step, held.image.record.created, "disk"))


def _speaks_of(disk: DiskTier, step: int, facts: RankFacts | None) -> bool:
    """Is that image one of the committed step's?"""
    try:
        return facts is not None and facts in disk.manifest(step).ranks
    except (ZerostallError, OSError):
        return False
