"""Images of other nodes' ranks in this node's memory. Driven by the agent's loop alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall.agent.berth import Berth
from zerostall.agent.notes import copy_note, damage_notes
from zerostall.agent.wish import Wish
from zerostall.core.candidates import Past
from zerostall.core.replicas import kept, makes_way, unneeded
from zerostall.telemetry import log
from zerostall.wire import cluster as w

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zerostall import native
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record
    from zerostall.core.placement import ImageId
    from zerostall.flow.budget import Budget
    from zerostall.tiers.host import HostTier

SLOTS = 2
UNWANTED_SECONDS = 60.0
"""An image that no plan wants stays so long: the plan may be about to change, or a trainer about to ask."""


@dataclass(slots=True)
class Guest:
    """A rank that trains elsewhere: its memory here, and what the manager calls each image's attempt.

    Attributes:
        home: what its home has.
        clean: which of its images here are of clean steps, as far as its home has said so.
        settled: which of its images are, here or there, as its home said last.
        named: what its home wants to stay.
    """

    berth: Berth
    world: int
    home: frozenset[Past] = frozenset()
    clean: frozenset[Past] = frozenset()
    settled: frozenset[Past] = frozenset()
    named: frozenset[Past] = frozenset()
    attempts: dict[int, str] = field(default_factory=dict)
    wanted: bool = True
    unwanted_since: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """Memory that was set aside for one image that is coming."""

    image: ImageId
    tier: HostTier
    slot: int

    @property
    def address(self) -> int:
        return self.tier.address(self.slot)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self.tier.segment.view(self.slot * self.tier.stride + offset, nbytes)


class Guests:
    """All guests of this node."""

    def __init__(self, budget: Budget, pool: native.Pool) -> None:
        self.budget = budget
        self._pool = pool
        self._guests: dict[ImageId, Guest] = {}
        self._told: dict[ImageId, tuple[str, str]] = {}  # each run's folder and name, as its home says

    def __len__(self) -> int:
        return len(self._guests)

    def images(self, image: ImageId) -> set[Past]:
        """What is here of a rank."""
        guest = self._guests.get(image)
        return guest.berth.sealed() if guest is not None else set()

    def clean(self, image: ImageId) -> frozenset[Past]:
        """Which of the rank's images, here or at its home, are known to be of clean steps."""
        guest = self._guests.get(image)
        return guest.clean | guest.settled if guest is not None else frozenset()

    def sound(self, image: ImageId) -> tuple[Past, ...]:
        """The same, without those that are known to be damaged."""
        guest = self._guests.get(image)
        found = guest.berth.sealed() if guest is not None else set()
        return tuple(sorted(past for past in found if guest is not None and not guest.berth.damage(past.step)))

    def berths(self) -> Iterator[tuple[ImageId, Berth]]:
        """The memory of each."""
        return ((image, guest.berth) for image, guest in self._guests.items())

    def tier_with(self, image: ImageId, step: int) -> HostTier | None:
        guest = self._guests.get(image)
        return guest.berth.tier_with(step) if guest else None

    def attempt(self, image: ImageId, step: int) -> str:
        guest = self._guests.get(image)
        return guest.attempts.get(step, "") if guest else ""

    def reserve(self, image: ImageId, world: int, layout: Layout) -> Place | None:
        """Memory for an image that is coming; None while none can be had without losing the newest, or the newest that
        is clean.

        Raises:
            CapacityError: the replica budget is too small.
        """
        guest = self._guests.get(image)
        if guest is None:
            guest = Guest(Berth(f"another node's run {image.run}", image.rank, self.budget, self._pool), world)
            guest.berth.lease(layout, SLOTS)
            self._guests[image] = guest
        tier = guest.berth.lease(layout, SLOTS)
        if (taken := tier.slots.granted()) is not None:
            tier.slots.discard(taken.index)  # one image at a time: what was coming before came to nothing
        here = guest.berth.sealed()
        keep = kept(here, guest.clean, guest.named)
        grant = tier.slots.grant(keep)
        if grant.index is None and keep:
            # What became of them nobody will say any more; one that is known to be clean is worth more. Where the home
            # names one, another one's turn to be everywhere is over.
            guest.berth.forget(here - guest.named if here & guest.named else here - guest.clean - guest.home)
            grant = tier.slots.grant(keep)
        return None if grant.index is None else Place(image, tier, grant.index)

    def seal(self, place: Place, record: Record, attempt: str) -> None:
        """The image is whole and checked."""
        guest = self._guests.get(place.image)
        if guest is None or guest.berth.current is not place.tier:
            return  # nobody wanted it any more
        past, clean = Past(record.step, record.created), guest.clean | guest.settled
        if not all(makes_way(past, other, clean) for other in guest.berth.sealed()):
            place.tier.slots.discard(place.slot)  # it was found to be dirty on its way
            return
        guest.berth.seal(place.slot, record, Wish())
        guest.attempts[record.step] = attempt
        self._give_back(guest)

    def _give_back(self, guest: Guest) -> None:
        """Memory of layouts of before goes once what counts is in that of now."""
        guest.berth.drop_older(kept(guest.berth.sealed(), guest.clean, guest.named))

    def discard(self, place: Place) -> None:
        """The image did not come."""
        guest = self._guests.get(place.image)
        if guest is not None and guest.berth.current is place.tier:
            guest.berth.take_back_grant()

    def offered(
        self,
        image: ImageId,
        there: Iterable[Past],
        gone: Iterable[Past],
        clean: Iterable[Past] = (),
        named: Iterable[Past] = (),
        where: str = "",
        name: str = "",
    ) -> None:
        """The rank's home says what it has: drop what it has gone back from and what newer clean images replace."""
        self._told[image] = where, name
        gone, clean = frozenset(gone), frozenset(clean)
        guest = self._guests.get(image)
        if guest is not None:
            here = guest.berth.sealed()
            guest.home = frozenset(there)
            guest.clean = frozenset(here & (guest.clean | clean))
            guest.settled = clean
            guest.named = frozenset(named)
            guest.berth.forget(unneeded(here, guest.home, guest.clean, guest.named, gone) | gone)
            self._give_back(guest)

    def forget(self, image: ImageId, step: int, attempt: str) -> None:
        """The step is dirty."""
        guest = self._guests.get(image)
        if guest is not None and guest.attempts.get(step) == attempt:
            guest.berth.forget_step(step)

    def drop(self, image: ImageId, past: Past) -> None:
        """The image here is damaged, and nobody has a better one just now: its home may offer it again."""
        guest = self._guests.get(image)
        if guest is not None:
            guest.berth.forget({past})

    def ranks_of(self, run: str) -> list[ImageId]:
        return [image for image in self._guests if image.run == run]

    def wanted(self, images: set[ImageId]) -> None:
        """Only these are to stay; others go after a while."""
        now = time.monotonic()
        for image, guest in list(self._guests.items()):
            if image in images:
                guest.wanted = True
            elif guest.wanted:
                guest.wanted, guest.unwanted_since = False, now
            elif now - guest.unwanted_since > UNWANTED_SECONDS and not guest.berth.held():
                log.info("rank %d of run %s is no guest any more", image.rank, image.run)
                self._guests.pop(image).berth.close()
                self._told.pop(image, None)

    def notes(self) -> tuple[w.RunNote, ...]:
        """What the manager is told of them."""
        return tuple(
            w.RunNote(run=image.run, where=where, name=name, world=guest.world, ranks=(self._note(image, guest),))
            for image, guest in sorted(self._guests.items())
            for where, name in (self._told.get(image, ("", "")),)
        )

    def _note(self, image: ImageId, guest: Guest) -> w.RankNote:
        copies = tuple(
            copy_note(tier.record_of(slot.step), "replica", guest.attempts.get(slot.step, ""))
            for tier in guest.berth.tiers()
            for slot in tier.slots.sealed()
            if not tier.damage(slot.step)
        )
        return w.RankNote(
            rank=image.rank, home=False, trains=False, copies=copies, damaged=tuple(damage_notes(guest.berth))
        )

    def close(self) -> None:
        for guest in self._guests.values():
            guest.berth.close()
        self._guests.clear()
