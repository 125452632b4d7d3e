"""One rank's place on this node: the memory lent to it, what is sealed there, and the trainer that is attached."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.agent.wish import Wish
from zerostall.core.candidates import Past
from zerostall.core.roll import NONE, Save
from zerostall.errors import FormatError
from zerostall.tiers.host import HostTier, stride_of
from zerostall.wire import messages as m
from zerostall.wire import notice

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zerostall.agent.client import Client
    from zerostall.agent.loop_call import Post
    from zerostall.agent.stowage import Stowage
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, Record
    from zerostall.flow.budget import Budget
    from zerostall.tiers.contract import Image
    from zerostall.tiers.host import Held


_SPOILED_KEPT = 16


@dataclass(slots=True)
class Berth:
    """`current` takes new images; `older` tiers have a layout of before and go once `current` holds an image.

    Attributes:
        moored: the trainer that is attached has said which memory it captures into. Before, nothing is granted: the
            memory may hold more than this agent has heard of, where a connection broke.
        heard: the newest save that this rank's trainers have sealed under this agent.
        asked: so many images the trainer wants memory for; it may have been lent more.
        grant: the number of the newest grant.
        outdone: what was wished for images of clean steps that are being saved anew.
        spoiled: what was said last of saves that will never be clean; a trainer whose connection broke may have missed
            it.
    """

    where: str
    rank: int
    budget: Budget
    pool: native.Pool
    current: HostTier | None = None
    older: list[HostTier] = field(default_factory=list)
    client: Client | None = None
    moored: bool = False
    heard: Save = NONE
    asked: int = 0
    grant: int = 0
    spoiled: deque[m.Spoiled] = field(default_factory=lambda: deque(maxlen=_SPOILED_KEPT))
    wishes: dict[int, Wish] = field(default_factory=dict)
    outdone: dict[int, Wish] = field(default_factory=dict)
    fallbacks: tuple[m.Fallback, ...] = ()
    stowage: Stowage | None = None

    def lease(self, layout: Layout, slots: int, lent: int = 0) -> HostTier:
        """Memory for `slots` images of `layout`, or for more: what is there if it fits, else new memory, for `lent`.

        Raises:
            CapacityError: the budget or the machine's memory is too small.
        """
        tier, self.asked = self.current, slots
        if tier is not None and tier.layout.same(layout) and slots <= tier.slots.count <= max(slots, lent):
            return tier
        slots = max(slots, lent)
        nbytes = stride_of(layout) * slots + notice.BYTES
        self.budget.take(nbytes, f"{slots} images of rank {self.rank} of {self.where}")
        try:
            segment = native.Segment(f"zerostall-{self.rank}", nbytes)
        except BaseException:
            self.budget.give_back(nbytes)
            raise
        return self._install(layout, segment, slots)

    def adopt(self, layout: Layout, slots: int, fd: int) -> HostTier:
        """Take over memory that a trainer kept: when the agent before this one died, or just its connection.

        Memory that is here already stays what it is, with all that is said of it: two tables of the same slots would
        each grant what the other one reads.

        Raises:
            FormatError: the memory is here, and has another layout.
        """
        memory, self.asked = os.fstat(fd), slots
        tier = next((tier for tier in self.tiers() if os.path.samestat(os.fstat(tier.segment.fileno()), memory)), None)
        if tier is None:
            segment = native.Segment.attach(fd, memory.st_size)
            self.budget.lent += segment.nbytes  # it exists already: counted even where it is over the budget
            return self._install(layout, segment, slots)
        if not tier.layout.same(layout) or tier.slots.count != slots:
            raise FormatError(f"the memory of rank {self.rank} is lent for another layout")
        self.older = [other for other in self.tiers() if other is not tier]
        self.current = tier
        return tier

    def _install(self, layout: Layout, segment: native.Segment, slots: int) -> HostTier:
        if self.current is not None:
            self.older.append(self.current)
        self.current = HostTier(layout, segment, slots, self.pool)
        return self.current

    def tiers(self) -> list[HostTier]:
        return ([self.current] if self.current else []) + self.older

    def tier_with(self, step: int) -> HostTier | None:
        """The newest memory in which `step` is sealed."""
        return next((tier for tier in self.tiers() if tier.slots.at_step(step)), None)

    def promised(self, step: int) -> bool:
        """Must the image of `step` stay until it is on disk?"""
        tier = self.tier_with(step)
        slot = tier.slots.at_step(step) if tier else None
        return slot is not None and slot.promised

    def sealed_steps(self) -> list[int]:
        return sorted({slot.step for tier in self.tiers() for slot in tier.slots.sealed()})

    def sealed(self) -> set[Past]:
        """These very images."""
        steps = [(tier, slot.step) for tier in self.tiers() for slot in tier.slots.sealed()]
        return {Past(step, tier.record_of(step).created) for tier, step in steps}

    def created(self, step: int) -> float | None:
        """When the image of `step` that is sealed here was saved."""
        tier = self.tier_with(step)
        return tier.record_of(step).created if tier else None

    def created_of(self, save: Save) -> float | None:
        """When this rank saved that very save, if its image is sealed here."""
        wish = self.wishes.get(save.step)
        return self.created(save.step) if wish is not None and wish.save == save else None

    def manifest(self, step: int) -> Manifest | None:
        """The manifest of the image of `step` that is sealed here, if it is clean."""
        tier = self.tier_with(step)
        return tier.manifest(step) if tier is not None and step in tier.steps() else None

    def clean_steps(self) -> list[int]:
        return sorted({step for tier in self.tiers() for step in tier.steps() if not tier.damage(step)})

    def damaged(self) -> Iterator[tuple[int, str]]:
        """The images that fail their checksums: step, and what is wrong."""
        return ((step, why) for step in self.sealed_steps() if (why := self.damage(step)))

    def damage(self, step: int) -> str:
        """What is wrong with the image of `step`; "" for nothing, or where there is none."""
        tier = self.tier_with(step)
        return tier.damage(step) if tier is not None else ""

    def clean_copies(self) -> list[m.CopyFacts]:
        """The images of clean steps, those with the damage that fail their checksums."""
        found = {step: tier for tier in reversed(self.tiers()) for step in tier.steps()}
        known = ((step, tier.manifest(step), m.plain(tier.damage(step))) for step, tier in sorted(found.items()))
        return [
            m.CopyFacts(step, "host", clean=not damage, created=whole.created, reason=damage, world=whole.world)
            for step, whole, damage in known
        ]

    def seal(self, slot: int, record: Record, wish: Wish) -> None:
        assert self.current is not None
        if self.manifest(record.step) is not None:
            self.outdone[record.step] = self.wishes.get(record.step, Wish())
        self.current.seal(slot, record)
        self.wishes[record.step] = wish
        if wish.promise:
            self.current.slots.promise(slot)
        self.wishes = {step: wish for step, wish in self.wishes.items() if self.tier_with(step)}
        self.outdone = {step: wish for step, wish in self.outdone.items() if self.tier_with(step)}

    def has(self, slot: int, record: Record) -> bool:
        """Is this very image sealed already? (A trainer says it again when it cannot know that it was heard.)"""
        if self.current is None or (found := self.current.slots.at_step(record.step)) is None:
            return False
        return found.index == slot and self.current.record_of(record.step).created == record.created

    def was_spoiled(self, past: Past) -> bool:
        """Was that very image said to be worth nothing, not long ago?"""
        return any((one.step, one.created) == (past.step, past.created) for one in self.spoiled)

    def next_grant(self, keep: frozenset[int], spare: frozenset[int] = frozenset()) -> m.Granted | None:
        """Grant the trainer a slot if it has none and one can be had; see `Slots.grant`."""
        if self.current is None or not self.moored or self.current.slots.granted():
            return None
        reserved = self.stowage.reserve() if self.stowage else (0, 0)
        if reserved is None:
            return None
        grant = self.current.slots.grant(keep, spare, self.asked)
        if grant.index is None:
            self.ungrant_place()
            return None
        self.grant += 1
        return m.Granted(slot=grant.index, number=self.grant, locker=reserved[0], place=reserved[1])

    def granted(self, slot: int, grant: int) -> bool:
        """Is the slot granted to the trainer, by that very grant?"""
        found = self.current.slots.granted() if self.current is not None else None
        return found is not None and (found.index, self.grant) == (slot, grant)

    def capturing(self) -> bool:
        """Does the trainer say that a snapshot is being captured just now? Any thread."""
        page = self.current.notice if self.current is not None and self.client is not None else None
        return page is not None and page.busy

    def image(self, tier: HostTier, held: Held, post: Post) -> Image:
        """One that is held, for the disk to take, from a device where it can."""
        return held.image if self.stowage is None else self.stowage.straight.of(tier, held, post)

    def draining(self) -> bool:
        """Is an image on its way from a vault to host memory?"""
        return self.stowage is not None and self.stowage.draining()

    def ungrant_place(self) -> None:
        """The capture that a place was granted for did not go there."""
        if self.stowage is not None:
            self.stowage.ungrant()

    def send(self, message: m.Message) -> None:
        """Tell the trainer, if there is one."""
        if isinstance(message, m.Spoiled):
            self.spoiled.append(message)
        if self.client is not None:
            self.client.send(message)

    def take_back(self) -> None:
        """The trainer is gone: what it was capturing is worth nothing."""
        self.client, self.moored = None, False
        if self.current is not None and self.current.notice is not None:
            self.current.notice.say(busy=False)
        self.take_back_grant()

    def take_back_grant(self) -> None:
        """Whatever is granted, in any of the segments, is free again."""
        for tier in self.tiers():
            if slot := tier.slots.granted():
                tier.slots.discard(slot.index)
        self.ungrant_place()

    def discard(self, slot: int, grant: int) -> None:
        """The trainer's capture came to nothing. What comes late, of a grant before, frees nothing."""
        if self.current is not None and self.granted(slot, grant):
            self.current.slots.discard(slot)
            self.ungrant_place()

    def forget(self, past: Iterable[Past]) -> None:
        """Drop the images of these very steps, known by when rank 0 saved them."""
        left = set(past)
        for tier in self.tiers():
            for one in left:
                if (before := tier.outdone(one.step)) is not None and before.created == one.created:
                    tier.forget_outdone(one.step)
            for slot in tier.slots.sealed():
                clean = slot.step in tier.steps()
                created = (tier.manifest if clean else tier.record_of)(slot.step).created
                if Past(slot.step, created) in left:
                    tier.unseal(slot.step)
                    self._counts_again(slot.step)

    def forget_unfinished(self, epoch: int) -> None:
        """Drop what was sealed before an epoch and never was clean: it will never be."""
        for step in self.sealed_steps():
            wish = self.wishes.get(step)
            if self.manifest(step) is None and (wish is None or wish.save.epoch < epoch):
                self.unseal(step)

    def unseal(self, step: int) -> None:
        """The newest image of the step is worth nothing: that of a save before counts again, if it was clean."""
        if (tier := self.tier_with(step)) is not None:
            tier.unseal(step)
        if not self._counts_again(step):
            self.forget_step(step)

    def _counts_again(self, step: int) -> bool:
        """Is the image of the step one that was outdone, and is so no more?"""
        before = self.outdone.pop(step, None)
        if before is None or self.manifest(step) is None:
            return False
        before.replace = True  # it may be on disk
        self.wishes[step] = before
        return True

    def forget_step(self, step: int) -> None:
        """Drop every image of the step."""
        for tier in self.tiers():
            tier.evict(step)

    def drop_older(self, keep: frozenset[int] = frozenset()) -> None:
        """Give back memory of layouts of before, as soon as nobody needs it, nor one of these steps in it."""
        if self.current is None or not self.current.slots.sealed():
            return
        kept = {id(tier) for step in keep if (tier := self.tier_with(step)) is not None}
        outdone = {step for step in self.outdone if self.manifest(step) is None}
        kept |= {id(tier) for tier in self.older if outdone & set(tier.steps())}
        for tier in [tier for tier in self.older if not tier.held() and id(tier) not in kept]:
            self.older.remove(tier)
            self._close(tier)

    def close(self) -> int:
        """Give all memory back; the bytes."""
        if self.stowage is not None:
            self.stowage.close()
        freed = sum(self._close(tier) for tier in self.tiers())
        self.current, self.older = None, []
        return freed

    def held(self) -> bool:
        return any(tier.held() for tier in self.tiers())

    def reading(self) -> bool:
        """Does somebody read any image just now?"""
        return any(tier.reading() for tier in self.tiers())

    def nbytes(self) -> int:
        return sum(tier.segment.nbytes for tier in self.tiers())

    def _close(self, tier: HostTier) -> int:
        nbytes = tier.segment.nbytes
        if self.stowage is not None:
            self.stowage.hide(tier.key)
        tier.segment.close()
        self.budget.give_back(nbytes)
        return nbytes
