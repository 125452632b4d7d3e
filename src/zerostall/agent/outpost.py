"""An agent that has a part of a run's ranks: it says what they do to the agent of rank 0's node, and does as that says.

See `wire.nodes`. Its connection to the seat comes back by itself: the seat's agent may have died, and its trainers
start another at the same address. Then all that is sealed here is said again.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from zerostall.agent.client import NodeClient
from zerostall.agent.own_folder import OwnFolder
from zerostall.agent.takeover import forget_other_runs
from zerostall.core import backoff
from zerostall.core import manifest as manifests
from zerostall.core.ground import sharing
from zerostall.core.manifest import Manifest
from zerostall.core.roll import NONE, Save
from zerostall.errors import AgentError, RunMismatchError, StorageError, ZerostallError
from zerostall.flow.worker import Worker
from zerostall.telemetry import log
from zerostall.tiers.files import storage_errors
from zerostall.tiers.ground import ground_of
from zerostall.wire import messages as m
from zerostall.wire import nodes as n
from zerostall.wire import peers as p
from zerostall.wire.channel import Channel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from zerostall.agent.berth import Berth
    from zerostall.agent.loop_call import Post
    from zerostall.agent.promises import Promises
    from zerostall.agent.standing import Standing
    from zerostall.agent.wish import Wish
    from zerostall.core.candidates import Past
    from zerostall.core.manifest import Record, RunFacts
    from zerostall.tiers.contract import Image
    from zerostall.tiers.host import Held, HostTier

_PATIENCE = 60.0
"""Seconds that the first connection may take, and that the run's folder may take to be seen on this node."""


class Outpost:
    """See `chair.Caller`. Driven by the agent's loop; connects on a thread of its own.

    Attributes:
        failed: the seat could not be reached at first, and is not tried again.
        own: this node's folder of the run, where it is another one than rank 0's node has.
    """

    def __init__(
        self, run: Standing, promises: Promises, nodes: m.Nodes, post: Post, watch: Callable[[NodeClient], None]
    ) -> None:
        assert nodes.meeting is not None
        self.meeting = nodes.meeting
        self._host = nodes.host
        self._run = run
        self._promises = promises
        self._post = post
        self._watch = watch
        self._client: NodeClient | None = None
        self._met = False
        self.failed = False
        self.own: OwnFolder | None = None
        self._meeting: list[Callable[[ZerostallError | None], None]] = []
        self._kept: dict[Save, list[tuple[HostTier, Held]]] = {}
        self._writer = Worker(f"outpost {run.where.name}")
        self._closing = threading.Event()
        self._connect()

    def close(self) -> None:
        self._closing.set()
        if self._client is not None:
            self._client.broken = True
        self._writer.close()
        self._let_go()

    def meet(self, then: Callable[[ZerostallError | None], None]) -> None:
        """Call on the loop once the seat has been reached, or with why it has not."""
        if self._met:
            then(None)
        else:
            self._meeting.append(then)

    # --------------------------------------------------------------------------------- what ranks of here say

    def found(self, rank: int) -> None:
        self._say(self._here())
        self._say(n.Found(rank))

    def lost(self, rank: int, reason: str) -> None:
        self._say(n.Lost(rank, m.plain(reason)))

    def sealed(self, berth: Berth, record: Record, wish: Wish, *, adopted: bool = False) -> None:
        self._say(_sealed(record, wish))

    def passed(self, rank: int, save: Save, reason: str, *, skipped: bool = False) -> None:
        self._say(n.Passed(rank, save, reason, skipped))

    def revoked(self, rank: int, save: Save | None, past: Past, reason: str) -> None:
        self._say(n.Revoked(rank, save, past, reason))

    def began(self, rank: int, epoch: int) -> None:
        self._say(n.Began(rank, epoch))

    def plan(self, plan: m.Plan) -> None:
        self._say(plan)

    def copied(self, said: n.Copied) -> None:
        self._say(said)

    def promise(self, rank: int, past: Past, save: Save | None, tier: str) -> bool:
        self._say(n.Promise(rank, past, save, tier))
        return True

    # ------------------------------------------------------------------------------------------ what follows

    def pending(self) -> list[Save]:
        """Whatever is sealed and not clean: the seat has not said that it never will be."""
        found = {
            wish.save
            for berth in self._run.berths.values()
            for step, wish in berth.wishes.items()
            if wish.save != NONE and berth.created(step) is not None and berth.manifest(step) is None
        }
        return sorted(found)

    def look(self, patience: float) -> None:
        """The seat looks."""

    def look_in(self) -> float | None:
        return None

    def _heard(self, message: n.FromSeat) -> None:
        verdicts = self._run.verdicts
        match message:
            case n.Clean():
                facts = verdicts.facts(message.save)
                if not facts:
                    return
                first = next(iter(verdicts.images(message.save).values()))[1]
                part = Manifest(
                    run=first.run,
                    step=first.step,
                    world=first.world,
                    ranks=tuple(facts.values()),
                    metric=message.metric,
                    created=message.created,
                )
                verdicts.committed(message.save, part)
            case n.Verdict():
                for spoiled in message.spoiled:
                    verdicts.spoiled(spoiled)
                if message.hold:
                    verdicts.hold(message.hold)
            case n.Awaiting():
                verdicts.awaiting(message.save, message.ranks, quiet=message.quiet)
            case m.Plan():
                verdicts.plan(message)
            case n.Copy():
                self._run.copying.follow(message.current, message.safe)
            case n.Keep():
                images = verdicts.images(message.save)
                self._kept[message.save] = [(tier, tier.hold(message.save.step)) for tier, _ in images.values()]
            case n.Write():
                self._write(message)
            case n.Commit() | n.Settle() | n.Ask():
                if self.own is not None:
                    self.own.heard(message, self._say)
            case n.Evicted():
                if self.own is not None:
                    self._run.trickle.evict_whole(message.past)
            case n.Stored():
                self._let_go(message.save)
                if self.own is not None and message.failure is not None:
                    self.own.abandon(message.save.step)
                self._promises.stored(message.save, message.failure)
            case n.ToRank():
                if (berth := self._run.berths.get(message.rank)) is not None:
                    berth.send(message.message)

    def evicted(self, past: Past) -> None:
        """A committed step is no more in this node's own folder, for an image of it is dirty."""
        if self.own is not None:
            self._say(n.Evicted(past))

    def _let_go(self, save: Save | None = None) -> None:
        """Release the images of a save; of all, where none is named."""
        for one in [save] if save is not None else list(self._kept):
            for tier, held in self._kept.pop(one, []):
                tier.release(held)

    def _write(self, order: n.Write) -> None:
        kept, berths = self._kept.get(order.save, []), self._run.berths
        images = [berths[held.image.record.rank].image(tier, held, self._post) for tier, held in kept]
        here = [rank for rank in self._run.here if rank < self._run.world]

        def written(failure: Exception | None) -> None:
            if failure is not None and not isinstance(failure, ZerostallError):
                log.error("%s: step %d could not be written", self._run.where, order.save.step, exc_info=failure)
                failure = StorageError(f"cannot write step {order.save.step}: {failure!r}")
            refused = m.Refused.of(0, failure) if failure else None
            self._post(lambda: self._say(n.Written(order.save, refused)))

        def write() -> None:
            try:
                self._put(order, images)
            except Exception as error:  # noqa: BLE001 - the seat waits for an answer
                written(error)
            else:
                written(None)

        if len(images) != len(here):
            written(StorageError(f"step {order.save.step} is no longer in memory of ranks {here}"))
        elif self.own is not None:
            self.own.write(order, images, written)
        else:
            self._writer.submit(write)

    def _put(self, order: n.Write, images: list[Image]) -> None:
        disk, folder = self._run.folder.disk, self._run.where / order.folder
        if folder.parent != self._run.where or folder.name != order.folder:
            raise StorageError(f"{order.folder!r} is no folder of a step")
        with storage_errors(folder, f"step {order.save.step}", 0):
            disk.join(order.save.step, folder)
            try:
                for image in images:
                    disk.put(image)
            finally:
                disk.leave(order.save.step)

    # --------------------------------------------------------------------------------------- the connection

    def _here(self, drafts: tuple[int, ...] | None = None) -> n.Here:
        run = self._run
        trains = tuple(rank for rank in run.here if (berth := run.berths.get(rank)) is not None and berth.client)
        return n.Here(run.world, tuple(sorted(run.here)), trains, self.own is not None, drafts, run.member)

    def _say(self, message: n.FromOutpost) -> None:
        """Tell the seat; while there is none nothing is lost, for all that counts is said again."""
        if self._client is not None:
            self._client.send(message)

    def _connect(self) -> None:
        threading.Thread(target=self._reach, name=f"outpost of {self.meeting.address}", daemon=True).start()

    def _reach(self) -> None:
        """Try until the seat is there; for the first time not for ever."""
        began, failures = time.monotonic(), 0
        while not self._closing.is_set():
            try:
                channel, entered = self._enter()
                try:
                    facts = manifests.decode_run(entered.facts, source=f"the run at {self.meeting.address}")
                    apart = self._sees_another(facts, entered)
                    if not apart:
                        self._see(facts, began + _PATIENCE)
                except BaseException:
                    channel.close()
                    raise
                self._post(partial(self._connected, channel.detach(), facts, apart=apart))
                return
            except (ZerostallError, ValueError, OSError) as error:
                failures += 1
                other = not isinstance(error, p.PeerError)
                if not self._met and (other or time.monotonic() - began > _PATIENCE):
                    self._post(partial(self._failed, error))
                    return
                if failures == 1:
                    log.warning("%s: the agent of rank 0's node: %s; tried again", self._run.where, error)
                self._closing.wait(backoff.pause(min(failures, 5), 0.5))

    def _enter(self) -> tuple[p.PeerChannel, p.Entered]:
        channel = p.connect(self.meeting.address, self._host, self.meeting.secret)
        try:
            channel.send(p.Enter())
            answer = channel.receive(1 << 20)
            if not isinstance(answer, p.Entered):
                raise p.PeerError(f"{self.meeting.address} answered {type(answer).__name__}")
            return channel, answer
        except BaseException:
            channel.close()
            raise

    def _sees_another(self, facts: RunFacts, entered: p.Entered) -> bool:
        """Has this node a folder of its own at that path?

        Raises:
            RunMismatchError: it has, and that cannot be.
        """
        run = self._run
        found = sharing(ground_of(run.where), entered.ground)
        if not found.apart and found.apart is not None:
            return False
        why = ""
        if found.apart is None:
            why = found.reason
        elif not (run.member and entered.member):
            why = f"{found.reason}, and images get from node to node only where all agents belong to a cluster"
        elif run.carrier is not None:
            why = f"{found.reason}, and remote= takes steps from one folder"
        if why:
            raise RunMismatchError(
                f"{run.where} on {self._host} is not the folder of rank 0's node, run {facts.run}: {why}",
                hint="give the run one folder that all of them share; or set ZEROSTALL_MANAGER and ZEROSTALL_PEER on "
                "every node, and each keeps its ranks' images on its own disk",
            )
        return True

    def _see(self, facts: RunFacts, deadline: float) -> None:
        """Make sure that the folder is the seat's, too. A network file system may show it a little later.

        Raises:
            RunMismatchError: it is another folder.
        """
        while (there := self._run.folder.run_there()) != facts.run:
            if there is not None or time.monotonic() > deadline:
                says = f"is run {there}" if there else "has no run.json"
                raise RunMismatchError(
                    f"{self._run.where} {says} on {self._host}, and run {facts.run} on rank 0's node",
                    hint="a run on several nodes needs one folder that all of them share; or save in an object store "
                    "from there, with remote=",
                )
            if self._closing.wait(0.1):
                raise AgentError("this run is over")

    def _connected(self, sock: socket.socket, facts: RunFacts, *, apart: bool) -> None:
        if self._closing.is_set():
            sock.close()
            return
        sock.setblocking(False)
        if apart:
            try:
                self.own = self.own or OwnFolder(self._run, facts, self._post)
            except (ZerostallError, OSError) as error:
                sock.close()
                self._failed(error)
                return
        else:
            self._run.folder.follow(facts)
        forget_other_runs(self._run)
        self._client = NodeClient(Channel(sock, n.FromSeat), heard=self._heard, parted=self._part)
        self._watch(self._client)
        self._say(self._here(self.own.drafts() if self.own is not None else None))
        sealed = [
            (berth.wishes[step].save, berth, step)
            for berth in self._run.berths.values()
            for step in berth.sealed_steps()
            if step in berth.wishes
        ]
        for _, berth, step in sorted(sealed, key=lambda one: one[0]):
            tier = berth.tier_with(step)
            assert tier is not None
            self._say(_sealed(tier.record_of(step), berth.wishes[step]))
        if not self._met:
            log.info("%s: the agent of rank 0's node is at %s", self._run.where, self.meeting.address)
        self._answer(None)

    def _failed(self, error: Exception) -> None:
        ours = error if isinstance(error, ZerostallError) else AgentError(f"{self.meeting.address}: {error}")
        if isinstance(ours, p.PeerError):
            ours = AgentError(
                f"the agent of rank 0's node does not answer: {ours.args[0]}",
                hint="ZEROSTALL_PEER on that node is the address that other nodes reach it by",
            )
        self.failed = True
        self._answer(ours)

    def _answer(self, error: ZerostallError | None) -> None:
        self._met = error is None
        waiting, self._meeting = self._meeting, []
        for then in waiting:
            then(error)

    def _part(self) -> None:
        """The connection broke: what was kept for the disk need be kept no longer."""
        self._client = None
        self._let_go()
        if self.own is not None:
            self.own.parted()
        if not self._closing.is_set():
            self._connect()


def _sealed(record: Record, wish: Wish) -> n.Sealed:
    facts = manifests.facts(record, manifests.encode_record(record))
    return n.Sealed(wish.save, facts, record.created, wish.promise, wish.replace, wish.pin, wish.aside)
