"""One run on this node: its folder, its ranks' memory, and the step that is on its way to disk."""

from __future__ import annotations

import bisect
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.agent.berth import Berth, Wish
from zerostall.agent.fetches import Fetches
from zerostall.agent.folder import RunFolder
from zerostall.core import backoff
from zerostall.core import manifest as manifests
from zerostall.core.manifest import Manifest, Record
from zerostall.core.retention import Keep
from zerostall.errors import (
    FormatError,
    RunBusyError,
    RunMismatchError,
    SnapshotNotFoundError,
    StorageError,
    ZerostallError,
)
from zerostall.flow.persist import Order, Outcome, persist, prune
from zerostall.flow.worker import Worker
from zerostall.telemetry import log
from zerostall.tiers.modes import Modes
from zerostall.wire import messages as m
from zerostall.wire.cluster import HISTOGRAM

if TYPE_CHECKING:
    from zerostall import native
    from zerostall.agent.client import Client
    from zerostall.core.candidates import Past
    from zerostall.flow.budget import Budget
    from zerostall.tiers.host import Held, HostTier

Post = Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class Tally:
    """What has been done for a run since this agent started; only rising."""

    sealed_bytes: int = 0
    stored_bytes: int = 0
    stalls: list[int] = field(default_factory=lambda: [0] * (len(HISTOGRAM) + 1))

    def held_up(self, seconds: Iterable[float]) -> None:
        """Training was held so long, each time."""
        for each in seconds:
            self.stalls[bisect.bisect_left(HISTOGRAM, each)] += 1


@dataclass(slots=True)
class Flight:
    """A step on its way to disk, and the images it keeps in place meanwhile."""

    order: Order
    held: list[tuple[HostTier, Held]]


class Run:
    """Driven by the agent's one loop; the two workers come back through `post`.

    Raises (on construction): StorageError, RunBusyError, FormatError.
    """

    def __init__(self, where: Path, world: int, budget: Budget, pool: native.Pool, post: Post) -> None:
        self.where = where
        self.world = world
        self.berths: dict[int, Berth] = {}
        self.folder = RunFolder(where, pool)
        self.fetches = Fetches(self.folder.disk, post)
        self.keep = Keep()
        self.lossless = False
        self.last_error = ""
        self.tally = Tally()
        self._budget = budget
        self._pool = pool
        self._post = post
        self._flight: Flight | None = None
        self._untidy = 0
        self._failures = 0
        self._retry_at = 0.0  # when the disk's turn comes again, after a failure or a rest
        self._interval = 0.0
        self._began = 0.0
        self._given_up: set[int] = set()
        self._writer = Worker(f"trickle {where.name}")

    # ---------------------------------------------------------------------------------------------- attaching

    def attach(self, client: Client, hello: m.Hello) -> Berth:
        """A trainer takes its rank's berth."""
        berth = self.berths.get(hello.rank)
        if berth is not None and berth.client is not None and not _alive(berth.client.pid):
            berth.client.broken = True  # a child of the dead trainer still holds its socket
            berth.take_back()
        if berth is not None and berth.client is not None:
            raise RunBusyError(
                f"rank {hello.rank} of {self.where} belongs to the live trainer with pid {berth.client.pid}",
                hint="end that one first, or give this one a folder of its own",
            )
        if hello.world != self.world and any(berth.client for berth in self.berths.values()):
            raise RunMismatchError(f"{self.where} runs with {self.world} ranks now, this trainer says {hello.world}")
        if hello.umask is not None:
            self.folder.use(Modes(hello.umask))
        if not self.folder.taken() or not self.folder.same():
            self.folder.take()
            self._forget_strangers()
        self.folder.check_name(hello.run, empty=not self.steps())
        self.world = hello.world
        rules = hello.rules
        self.keep = Keep(rules.keep_last, rules.keep_every, rules.keep_best, rules.best_mode)  # pyright: ignore
        self.lossless = rules.lossless
        self._interval = rules.disk_interval
        if berth is None:
            berth = Berth(str(self.where), hello.rank, self._budget, self._pool)
            self.berths[hello.rank] = berth
        berth.client = client
        return berth

    def _forget_strangers(self) -> None:
        """While nobody held the folder here, another agent or its owner may have changed it: memory must agree with it.

        A step that the disk does not have is none. Of one that is damaged there, memory may be all that is left.
        """
        for rank, berth in self.berths.items():
            for step in berth.sealed_steps():
                tier = berth.tier_with(step)
                assert tier is not None
                record = tier.record_of(step)
                try:
                    there = self.folder.disk.manifest(step).ranks[rank : rank + 1]
                except SnapshotNotFoundError:
                    there = ()
                except (FormatError, OSError):
                    continue
                if there != (manifests.facts(record, manifests.encode_record(record)),):
                    log.warning("%s: step %d in memory is not the run's any more and is forgotten", self.where, step)
                    berth.forget_step(step)

    def detach(self, client: Client) -> None:
        for berth in self.berths.values():
            if berth.client is client:
                berth.take_back()
        if self._failures == 0:
            self._retry_at = 0.0  # nobody trains: the newest snapshot goes to disk now
        self.advance()

    def attached(self) -> bool:
        return any(berth.client for berth in self.berths.values())

    def steps(self) -> tuple[int, ...]:
        """Every step that this node can bring back, rising."""
        return tuple(
            sorted(set(self.folder.disk.steps()).union(*(berth.clean_steps() for berth in self.berths.values())))
        )

    # ------------------------------------------------------------------------------------------------ sealing

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
        if wish.promise and self._failures == 0:
            self._retry_at = 0.0
        berth.seal(slot, record, wish)
        self.tally.sealed_bytes += record.nbytes
        self._given_up.discard(record.step)
        self._tell_replaced(berth, before)
        manifest = self._manifest(record.step)
        if manifest is not None:
            for rank in self.berths.values():
                tier = rank.tier_with(record.step)
                if tier is not None:
                    tier.commit(manifest, replace=True)
            if not adopted:
                self._grant()  # before the news, so that a save right after it finds a slot
            for rank in self.berths.values():
                if (created := rank.created(record.step)) is not None:
                    self._send(rank, m.Reached(step=record.step, created=created, tier="host"))

    def revoke(self, berth: Berth, past: Past, reason: str) -> None:
        """A sealed image is dirty after all: it goes from every tier. Others of its step's number stay."""
        step = past.step
        log.warning("%s, rank %d: step %d is dirty after all: %s", self.where, berth.rank, step, reason)
        if berth.created(step) == past.created:
            berth.forget_step(step)
            self._given_up.add(step)  # where it is being written just now, that ends first and then it goes
            self.folder.on_disk.discard(step)
        self._writer.submit(lambda: self._evict(berth.rank, past))

    def _evict(self, rank: int, past: Past) -> None:
        """On the writer's thread, so after what was under way."""
        if self.folder.disk.created(past.step, rank) == past.created:
            self.folder.disk.evict(past.step)

    def promise(self, berth: Berth, past: Past) -> None:
        """Somebody waits for this very image on disk."""
        step, tier = past.step, berth.tier_with(past.step)
        if tier is not None and tier.record_of(step).created == past.created:
            if step in self.folder.on_disk:
                self._send(berth, m.Reached(step=step, created=past.created, tier="disk"))
                return
            slot = tier.slots.at_step(step)
            assert slot is not None
            tier.slots.promise(slot.index)
            self._retry_at = 0.0
        elif step in self.folder.disk.steps() and self.folder.disk.created(step, berth.rank) == past.created:
            self._send(berth, m.Reached(step=step, created=past.created, tier="disk"))
        else:
            self._send(berth, m.Replaced(step=step, created=past.created, tier="disk"))

    def when_tidy(self, call: Callable[[], None]) -> None:
        """Call on the loop's thread when the order under way and the retention behind it are done."""
        self._writer.submit(lambda: self._post(call))

    def advance(self) -> None:
        """Do whatever can be done now: start the next order, grant slots, give back memory, let the folder go."""
        if self._flight is None and time.monotonic() >= self._retry_at:
            self._start_order()
        self._grant()
        for berth in self.berths.values():
            berth.drop_older()
        if not self.attached() and not self.busy():
            self.folder.let_go()

    def _grant(self) -> None:
        """Give every trainer without a slot one, if one can be had."""
        keep = frozenset(self._clean_steps()[-1:])
        for berth in self.berths.values():
            before = berth.sealed()
            grant = berth.next_grant(keep)
            if grant is not None:
                self._tell_replaced(berth, before)
                self._send(berth, grant)

    def report(self, berth: Berth) -> m.RankReport:
        """What `zerostall agent status` shows of one rank."""
        return m.RankReport(
            where=m.plain(str(self.where)),
            rank=berth.rank,
            world=self.world,
            trainer_pid=berth.client.pid if berth.client else None,
            segment_bytes=berth.nbytes(),
            host_steps=tuple(berth.clean_steps()),
            disk_steps=tuple(self.folder.disk.steps()),
            trickling=self.writing,
            last_error=m.plain(self.last_error),
            fallbacks=berth.fallbacks,
        )

    @property
    def writing(self) -> int | None:
        """The step on its way to disk."""
        return self._flight.order.step if self._flight else None

    def busy(self) -> bool:
        """Is a step on its way to disk, being read, about to go, or retention at work?"""
        return self._flight is not None or self._untidy > 0 or self.fetches.busy() or self._next_step() is not None

    def retry_in(self) -> float | None:
        """Seconds until `advance` has something to retry; None when it has not."""
        if self._flight is not None or self._retry_at == 0.0 or self._next_step() is None:
            return None
        return max(0.0, self._retry_at - time.monotonic())

    # ------------------------------------------------------------------------------------------------ trickle

    def _clean_steps(self) -> list[int]:
        """Steps sealed on every rank of this node's world, rising."""
        berths = [self.berths[rank] for rank in range(self.world) if rank in self.berths]
        if len(berths) < self.world:
            return []
        return sorted(set.intersection(*(set(berth.clean_steps()) for berth in berths)))

    def _next_step(self) -> int | None:
        """The step to write next: a promised one, the oldest first; else the newest clean one."""
        clean = self._clean_steps()
        waiting = [step for step in clean if step not in self.folder.on_disk and step not in self._given_up]
        waited_for = next((step for step in waiting if self._waited_for(step)), None)
        if waited_for is not None:
            return waited_for
        return waiting[-1] if waiting and waiting[-1] == clean[-1] else None

    def _may_pause(self) -> bool:
        """May the disk rest for a while? Not when somebody waits for it, nor when the trainer is gone."""
        step = self._next_step()
        return self._interval > 0 and self.attached() and (step is None or not self._waited_for(step))

    def _waited_for(self, step: int) -> bool:
        """Was the step promised to the disk on any rank?"""
        return any(berth.promised(step) for berth in self.berths.values())

    def _start_order(self) -> None:
        step = self._next_step()
        if step is None or not self.folder.taken():
            return
        held: list[tuple[HostTier, Held]] = []
        wishes: list[Wish] = []
        for rank in range(self.world):
            tier = self.berths[rank].tier_with(step)
            assert tier is not None
            held.append((tier, tier.hold(step)))
            wishes.append(self.berths[rank].wishes.get(step, Wish()))
        order = Order(
            manifest=held[0][0].manifest(step),
            images=tuple(image.image for _, image in held),
            replace=any(wish.replace for wish in wishes),
            pin=any(wish.pin for wish in wishes),
            aside=tuple(sorted({past for wish in wishes for past in wish.aside})),
        )
        self._flight = Flight(order, held)
        self._began = time.monotonic()
        self._untidy += 1

        def write() -> None:
            outcome = persist(self.folder.disk, order, self.folder.hold)
            self._post(lambda: self._landed(outcome))
            if outcome.error is None:
                prune(self.folder.disk, self.keep, self.fetches.steps() | {order.step})
            self._post(self._tidied)

        self._writer.submit(write)

    def _tidied(self) -> None:
        self._untidy -= 1

    def _landed(self, outcome: Outcome) -> None:
        flight, self._flight = self._flight, None
        assert flight is not None
        same = True
        for rank, (tier, held) in enumerate(flight.held):
            tier.release(held)
            berth = self.berths[rank]
            if berth.created(outcome.step) == held.image.record.created:
                tier.slots.promise(held.slot, False)
            else:
                same = False  # saved anew meanwhile, revoked, or set aside
            if outcome.error is None and (wish := berth.wishes.get(outcome.step)):
                wish.replace, wish.aside = True, ()  # one of its number is there now
        if outcome.error is None:
            self._failures, self.last_error = 0, ""
            self.tally.stored_bytes += sum(image.record.nbytes for image in flight.order.images)
            self._retry_at = self._began + self._interval if self._may_pause() else 0.0
            held_here = {step for berth in self.berths.values() for step in berth.sealed_steps()}
            self.folder.on_disk.intersection_update(held_here)  # of the others the folder itself tells
            self._given_up.intersection_update(held_here)
            if same:
                self.folder.on_disk.add(outcome.step)
            for rank, (_, held) in enumerate(flight.held):
                created = held.image.record.created
                self._send(self.berths[rank], m.Reached(step=outcome.step, created=created, tier="disk"))
        else:
            self._failed(flight, outcome.error)
        self.advance()

    def _failed(self, flight: Flight, error: ZerostallError) -> None:
        step = flight.order.step
        self._failures += 1
        self._retry_at = time.monotonic() + backoff.pause(self._failures, random.random())
        self.last_error = f"step {step}: {error.args[0]}"
        if not isinstance(error, StorageError):
            self._given_up.add(step)  # trying again would end the same way
        log.error("%s: step %d did not get to disk: %s", self.where, step, error)
        number = error.errno if isinstance(error, StorageError) else None
        for rank, (_, held) in enumerate(flight.held):
            failed = m.Failed(
                step=step,
                created=held.image.record.created,
                tier="disk",
                kind=type(error).__name__,
                message=m.plain(str(error.args[0])),
                hint=error.hint,
                errno=number,
            )
            self._send(self.berths[rank], failed)

    def _manifest(self, step: int) -> Manifest | None:
        """The manifest of `step`, when every rank of the world is sealed here."""
        records: list[Record] = []
        for rank in range(self.world):
            berth = self.berths.get(rank)
            tier = berth.tier_with(step) if berth else None
            if tier is None:
                return None
            records.append(tier.record_of(step))
        ranks = tuple(manifests.facts(record, manifests.encode_record(record)) for record in records)
        first = records[0]
        return Manifest(
            run=first.run, step=step, world=self.world, ranks=ranks, metric=first.metric, created=first.created
        )

    # ------------------------------------------------------------------------------------------------- telling

    @staticmethod
    def _send(berth: Berth, message: m.Message) -> None:
        if berth.client is not None:
            berth.client.send(message)

    def _tell_replaced(self, berth: Berth, before: set[Past]) -> None:
        for past in sorted(before - berth.sealed()):
            if past.step not in self.folder.on_disk:
                self._send(berth, m.Replaced(step=past.step, created=past.created, tier="disk"))

    def close(self) -> None:
        """Wait for what is under way, then give back the memory and the folder."""
        self._writer.close()
        self.fetches.close()
        for berth in self.berths.values():
            berth.close()
        self.folder.let_go()


def _alive(pid: int) -> bool:
    """Is that process there, and not just waiting to be reaped?"""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
