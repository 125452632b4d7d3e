"""Other nodes' images on this node's disk: the tier `partner`, so that the loss of a node and of memory costs no step.

What is kept in memory for a rank elsewhere is written here too, as often as the run's own policy has its steps go to
disk there, and only what its home says is of a clean step. One image at a time, on a thread of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall.core import backoff
from zerostall.core import manifest as manifests
from zerostall.core.candidates import Past
from zerostall.core.placement import ImageId
from zerostall.core.replicas import Stored, next_stored, outdated, unneeded
from zerostall.errors import StorageError, ZerostallError
from zerostall.flow.worker import Worker
from zerostall.telemetry import log, say_once
from zerostall.tiers.lone_images import LoneImages, Replica
from zerostall.wire import cluster as w

if TYPE_CHECKING:
    from collections.abc import Set
    from pathlib import Path

    from zerostall import native
    from zerostall.agent.guests import Guests
    from zerostall.agent.loop_call import Post
    from zerostall.tiers.host import Held, HostTier
    from zerostall.wire import peers as p

TIER = "partner"


@dataclass(slots=True)
class Lodging:
    """One rank's images here.

    Attributes:
        offer: what the rank's home said last; None where it has not been heard since this agent started.
        stored: what is on disk.
        ours: what of it this agent wrote itself: of the rest it does not know the manager's name for the attempt.
    """

    images: LoneImages
    offer: p.Offer | None = None
    stored: dict[Past, Replica] = field(default_factory=dict)
    ours: set[Past] = field(default_factory=set)
    wrote_at: float = float("-inf")
    failures: int = 0
    retry_at: float = 0.0
    writing: bool = False


class GuestDisk:
    """Driven by the agent's loop; its writer comes back through `post`."""

    def __init__(self, folder: Path, pool: native.Pool, guests: Guests, post: Post) -> None:
        self._folder = folder
        self._pool = pool
        self._guests = guests
        self._post = post
        self._lodgings: dict[ImageId, Lodging] = {}
        self._writer = Worker("guest disk", bound=1 << 16)
        self._writer.submit(self._scan)

    def close(self) -> None:
        """Wait for what is under way."""
        self._writer.close(60.0)

    def find(self, image: ImageId, step: int, created: float) -> tuple[LoneImages, Replica] | None:
        """The image, if it is here; `created` 0.0 takes whichever of that step is."""
        lodging = self._lodgings.get(image)
        for past, replica in lodging.stored.items() if lodging else ():
            if past.step == step and created in (0.0, past.created):
                return lodging.images, replica  # pyright: ignore[reportOptionalMemberAccess]
        return None

    def attempt(self, replica: Replica) -> str:
        """What is equal for all images that may make a snapshot together with that one."""
        lodging = self._lodgings.get(ImageId(replica.run, replica.rank))
        if replica.world == 1:
            return repr(replica.created)
        mine = lodging is not None and Past(replica.step, replica.created) in lodging.ours
        return replica.attempt if mine else f"at {replica.began!r}"

    def notes(self) -> tuple[w.RunNote, ...]:
        """What the manager is told."""
        return tuple(
            w.RunNote(
                run=image.run,
                where=next(iter(lodging.stored.values())).where,
                name=next(iter(lodging.stored.values())).name,
                world=max(replica.world for replica in lodging.stored.values()),
                ranks=(
                    w.RankNote(
                        rank=image.rank,
                        home=False,
                        trains=False,
                        copies=tuple(
                            w.CopyNote(past.step, self.attempt(replica), TIER, past.created, replica.nbytes)
                            for past, replica in sorted(lodging.stored.items())
                        ),
                    ),
                ),
            )
            for image, lodging in sorted(self._lodgings.items())
            if lodging.stored
        )

    def heard(self, image: ImageId, offer: p.Offer) -> None:
        """A home says what it has and what is clean of it."""
        lodging = self._lodgings.get(image)
        if lodging is None:
            if offer.every is None:
                return
            lodging = self._lodgings[image] = Lodging(self._images(image))
        lodging.offer = offer
        self._drop_unneeded(lodging, offer)
        self.look(image)

    def _drop_unneeded(self, lodging: Lodging, offer: p.Offer) -> None:
        stored = set(lodging.stored)  # all of clean steps
        self._drop(lodging, unneeded(stored, set(offer.images), stored, void=offer.gone) | set(offer.gone))

    def look(self, image: ImageId) -> None:
        """Write what is to be written of that rank now."""
        lodging, now = self._lodgings.get(image), time.monotonic()
        if lodging is None or lodging.offer is None or lodging.offer.every is None:
            return
        if lodging.writing or now < lodging.retry_at:
            return
        settled = {Past(one.step, one.created): one.began for one in lodging.offer.settled}
        past, _ = next_stored(
            self._guests.images(image),
            settled.keys(),
            lodging.stored.keys(),
            now - lodging.wrote_at,
            lodging.offer.every,
        )
        tier = self._guests.tier_with(image, past.step) if past is not None else None
        if past is None or tier is None or tier.damage(past.step):
            return
        self._write(image, lodging, past, settled[past], tier, lodging.offer)

    def _write(
        self, image: ImageId, lodging: Lodging, past: Past, began: float, tier: HostTier, offer: p.Offer
    ) -> None:
        held = tier.hold(past.step)
        record = held.image.record
        replica = Replica(
            run=image.run,
            rank=image.rank,
            world=record.world,
            step=past.step,
            created=past.created,
            began=began,
            attempt=self._guests.attempt(image, past.step),
            record=manifests.facts(record, manifests.encode_record(record)).record,
            nbytes=record.nbytes,
            where=offer.where,
            name=offer.name,
        )
        lodging.writing, lodging.wrote_at = True, time.monotonic()

        def write() -> None:
            failure: ZerostallError | None = None
            try:
                lodging.images.put(held.image, replica)
            except ZerostallError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - the image must be let go
                log.exception("step %d of rank %d could not be written", past.step, image.rank)
                failure = StorageError(f"cannot write step {past.step}: {error!r}")
            self._post(lambda: self._landed(image, lodging, past, replica, tier, held, failure))

        self._writer.submit(write)

    def _landed(
        self,
        image: ImageId,
        lodging: Lodging,
        past: Past,
        replica: Replica,
        tier: HostTier,
        held: Held,
        failure: ZerostallError | None,
    ) -> None:
        tier.release(held)
        lodging.writing = False
        if failure is not None:
            lodging.failures += 1
            lodging.retry_at = time.monotonic() + backoff.pause(lodging.failures, 0.5)
            say_once(f"guest disk {image}", "no copy of rank %d on this disk: %s", image.rank, failure.args[0])
            return
        lodging.failures, lodging.retry_at = 0, 0.0
        for other in [other for other in lodging.stored if other.step == past.step]:
            del lodging.stored[other]
        lodging.stored[past] = replica
        lodging.ours.add(past)
        seconds = time.monotonic() - lodging.wrote_at
        log.info("step %d of rank %d of run %s is on disk, too, %.3f s", past.step, image.rank, image.run, seconds)
        if lodging.offer is not None:
            self._drop_unneeded(lodging, lodging.offer)
        self.look(image)

    def drop(self, replica: Replica) -> None:
        """The image is damaged."""
        image = ImageId(replica.run, replica.rank)
        lodging, past = self._lodgings.get(image), Past(replica.step, replica.created)
        if lodging is not None and lodging.stored.get(past) == replica:
            self._drop(lodging, {past})
            lodging.wrote_at = float("-inf")
            self.look(image)

    def _drop(self, lodging: Lodging, pasts: Set[Past]) -> None:
        for past in pasts & lodging.stored.keys():
            replica = lodging.stored.pop(past)
            lodging.ours.discard(past)
            self._writer.submit(lambda one=replica: lodging.images.evict(one.step, one))

    def _images(self, image: ImageId) -> LoneImages:
        return LoneImages(self._folder / image.run / f"rank-{image.rank:05d}", self._pool)

    def _scan(self) -> None:
        """What an agent before this one has left here. The writer's thread."""
        found: list[tuple[LoneImages, list[Replica]]] = []
        try:
            for folder in sorted(self._folder.glob("*/rank-*")):
                images = LoneImages(folder, self._pool)
                if replicas := images.replicas():
                    found.append((images, replicas))
            found = _without_outdated(found)
        except OSError as error:
            log.warning("%s cannot be looked through: %s", self._folder, error)

        def know() -> None:
            for images, replicas in found:
                lodging = self._lodgings.setdefault(ImageId(replicas[0].run, replicas[0].rank), Lodging(images))
                for replica in replicas:
                    lodging.stored.setdefault(Past(replica.step, replica.created), replica)

        self._post(know)


def _without_outdated(found: list[tuple[LoneImages, list[Replica]]]) -> list[tuple[LoneImages, list[Replica]]]:
    """Remove what `outdated` says, and say what is as old and stays."""
    place = {
        Stored(one.run, one.rank, one.step, images.written(one.step)): (images, one)
        for images, replicas in found
        for one in replicas
    }
    going, staying = outdated(place)
    for one in sorted(going, key=lambda one: (one.run, one.rank, one.step)):
        images, replica = place[one]
        log.info("%s: step %d goes: its run has a newer one here, and its home was not heard", images.where, one.step)
        images.evict(one.step, replica)
    for run in sorted({one.run for one in staying}):
        folder = next(images.where.parent for one, (images, _) in place.items() if one.run == run)
        log.warning("%s holds the newest copy of a run that was not heard for days: remove it if it is over", folder)
    gone = {replica for images, replica in (place[one] for one in going)}
    return [(images, kept) for images, replicas in found if (kept := [one for one in replicas if one not in gone])]
