"""The agent of rank 0's node, where ranks are on several nodes: the others' agents come to it and say what theirs do.

See `wire.nodes` for what is said. What an outpost's ranks have sealed is known here by what the manifest will say of
it; the images stay where they are. To get a step to disk every agent writes its own ranks' images into one folder, and
the seat commits it when all have said that theirs are there and it sees them itself.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from zerostall.agent.client import NodeClient
from zerostall.agent.loop_call import Post, on_loop
from zerostall.agent.peers import Entrance, PeerDoor
from zerostall.agent.seat_drafts import SeatDrafts
from zerostall.core import manifest as manifests
from zerostall.errors import StorageError, ZerostallError
from zerostall.telemetry import log
from zerostall.tiers.drafts import committed_of
from zerostall.tiers.ground import ground_of
from zerostall.wire import messages as m
from zerostall.wire import nodes as n
from zerostall.wire import peers as p
from zerostall.wire.channel import Channel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from zerostall.agent.chair import Chair
    from zerostall.agent.promises import Promises
    from zerostall.agent.standing import Standing
    from zerostall.core.candidates import Past
    from zerostall.core.manifest import Manifest, RankFacts
    from zerostall.core.roll import Save
    from zerostall.flow.persist import Order


@dataclass(slots=True, eq=False)
class Outlying:
    """Another node, as the seat knows it.

    Attributes:
        images: what its ranks have sealed, by save and rank.
        apart: it has a folder of its own for them.
        copies: other nodes keep copies of their images.
    """

    client: NodeClient | None = None
    ranks: tuple[int, ...] = ()
    images: dict[Save, dict[int, n.Sealed]] = field(default_factory=dict)
    apart: bool = False
    copies: bool = False

    def tell(self, message: m.Message) -> None:
        if self.client is not None:
            self.client.send(message)


class Errand:
    """The writing of one save's images by the other nodes. `write` and `wait` are the writer's, the rest the loop's."""

    def __init__(self, save: Save, nodes: list[Outlying], post: Post) -> None:
        self.save = save
        self.nodes = nodes
        self._post = post
        self._missing = list(nodes)
        self._failure: ZerostallError | None = None
        self._over = threading.Event()
        if not nodes:
            self._over.set()

    def write(self, folder: Path, aside: tuple[Past, ...]) -> None:
        """Have all write into this folder of the run, or into the like of their own."""
        message = n.Write(self.save, folder.name, aside)

        def tell() -> None:
            for node in self.nodes:
                node.tell(message)

        self._post(tell)

    def wait(self) -> None:
        """Wait until all have written, or are gone.

        Raises:
            ZerostallError: what the first that failed has failed with.
        """
        self._over.wait()
        if self._failure is not None:
            raise self._failure

    def written(self, node: Outlying, failure: ZerostallError | None) -> None:
        """A node has; or it is gone, which is a failure, too."""
        if node not in self._missing:
            return
        self._missing.remove(node)
        self._failure = self._failure or failure
        if not self._missing:
            self._over.set()


class Seat:
    """See `fellows.Fellows`. Driven by the agent's loop; connections begin on threads of the door.

    Attributes:
        meeting: how the others find it.
        chair: what decides.
        drafts: what was put here when another node had rank 0.

    Raises (on construction): CapabilityError when it cannot listen for others.
    """

    chair: Chair

    def __init__(
        self,
        run: Standing,
        promises: Promises,
        nodes: m.Nodes,
        post: Post,
        watch: Callable[[NodeClient], None],
        advance: Callable[[], None],
    ) -> None:
        self._run = run
        self._promises = promises
        self._advance = advance
        self._post = post
        self._watch = watch
        self._nodes: list[Outlying] = []
        self._errand: Errand | None = None
        self.drafts = SeatDrafts(run, post)
        meeting = nodes.meeting
        secret = meeting.secret if meeting else secrets.token_urlsafe(32)
        entrance = Entrance(answer=lambda: on_loop(post, self._entered), enter=self._enter)
        self._door = PeerDoor(meeting.address if meeting else nodes.host, secret, entrance=entrance)
        self.meeting = m.Meeting(self._door.address, secret)
        log.info("%s: agents of other nodes meet at %s", run.where, self._door.address)

    def close(self) -> None:
        if self._errand is not None:
            for node in list(self._errand.nodes):
                self._errand.written(node, StorageError("the agent has been told to end"))
        self._door.close()
        for node in self._nodes:
            if node.client is not None:
                node.client.broken = True

    # ------------------------------------------------------------------------------------------ what is known

    def facts(self, save: Save) -> dict[int, RankFacts]:
        """What a manifest says of the images of a save on other nodes, by rank."""
        return {
            rank: sealed.facts
            for node in self._nodes
            for rank, sealed in node.images.get(save, {}).items()
            if rank in node.ranks
        }

    def covers(self, manifest: Manifest, save: Save) -> bool:
        """Are all images that are not this node's still on the others?"""
        afar = self.facts(save)
        here = self._run.here
        return all(facts.rank in here or afar.get(facts.rank) == facts for facts in manifest.ranks)

    def wishes(self, save: Save) -> list[n.Sealed]:
        """What was said beside the images of a save on other nodes."""
        return [sealed for node in self._nodes for sealed in node.images.get(save, {}).values()]

    def made_clean(self, step: int) -> None:
        """A save is clean: it stays if it is waited for. Older ones that this node has no longer are forgotten."""
        berth = self._run.berths[0]
        known = {berth.wishes[step].save for step in berth.sealed_steps() if step in berth.wishes}
        newest = berth.wishes[step].save
        if any(sealed.promise for sealed in self.wishes(newest)):
            self._promises.kept_for_others(newest)
        for node in self._nodes:
            node.images = {save: of for save, of in node.images.items() if save >= newest or save in known}

    # ------------------------------------------------------------------------------------------------ telling

    def tell(self, message: n.FromSeat) -> None:
        """All other nodes."""
        for node in self._nodes:
            node.tell(message)

    def errand(self, save: Save) -> Errand:
        """The save goes to disk: its images stay where they are until `stored`."""
        nodes = [node for node in self._nodes if save in node.images]
        for node in nodes:
            node.tell(n.Keep(save))
        self._errand = Errand(save, nodes, self._post)
        return self._errand

    def here(self, manifest: Manifest) -> frozenset[int] | None:
        """The ranks whose images get into this node's folder; None where all do."""
        afar = {rank for node in self._nodes if node.apart for rank in node.ranks}
        return frozenset(facts.rank for facts in manifest.ranks if facts.rank not in afar) if afar else None

    def stored(self, order: Order, save: Save, error: ZerostallError | None) -> None:
        """The save is committed on disk, or it is not."""
        apart = [node for node in self._errand.nodes if node.apart] if self._errand is not None else []
        self._errand = None
        if apart and error is None:
            commit = n.Commit(save, manifests.encode_manifest(order.manifest), order.pin)
            for node in apart:
                node.tell(commit)
        self.tell(n.Stored(save, m.Refused.of(0, error) if error else None))

    def tell_rank(self, rank: int, message: m.Reached | m.Failed) -> None:
        """The trainer of a rank on another node, if that is there."""
        for node in self._nodes:
            if rank in node.ranks:
                node.tell(n.ToRank(rank, message))

    # ------------------------------------------------------------------------------------------------ hearing

    def _entered(self) -> p.Entered:
        """On the loop. AgentError while the folder is not this agent's: who knocks comes again."""
        if not self._run.folder.taken():
            raise p.PeerError("the run's folder is not taken yet")
        run = self._run
        return p.Entered(manifests.encode_run(run.folder.facts), ground_of(run.where), run.member)

    def _enter(self, sock: socket.socket) -> None:
        """A connection's thread."""

        def come() -> None:
            sock.setblocking(False)
            node = Outlying()
            channel = Channel(sock, n.FromOutpost)
            node.client = NodeClient(channel, heard=partial(self._heard, node), parted=partial(self._part, node))
            self._nodes.append(node)
            self._watch(node.client)

        self._post(come)

    def _part(self, node: Outlying) -> None:
        self._nodes.remove(node)
        if self._errand is not None:
            lost = StorageError(f"the agent of ranks {list(node.ranks)} has gone before their images were written")
            self._errand.written(node, lost)
        for rank in node.ranks:
            self.chair.lost(rank, "the connection to its node's agent broke")
        self._advance()

    def _heard(self, node: Outlying, message: n.FromOutpost) -> None:
        match message:
            case n.Here():
                node.ranks, node.apart, node.copies = message.ranks, message.apart, message.copies
                mine = () if self._run.member else self._run.here
                others = (rank for one in self._nodes if not one.copies for rank in one.ranks)
                self.chair.choosing.without([*mine, *others])
                node.tell(self.chair.choosing.news())
                if message.drafts is not None:
                    self._settle(node, message.drafts)
                if not message.apart:
                    self.drafts.settled(message.ranks)  # it sees this very folder
                elif message.drafts is not None:
                    node.tell(n.Ask(self.drafts.steps()))
                for rank in message.trains:
                    self.chair.found(rank)
            case n.Known():
                self.drafts.known(node.ranks, message)
            case n.Found():
                self.chair.found(message.rank)
            case n.Lost():
                self.chair.lost(message.rank, message.reason)
            case n.Sealed():
                self._sealed(node, message)
            case n.Passed():
                self.chair.passed(message.rank, message.save, message.reason, skipped=message.skipped)
            case n.Revoked():
                if message.save is not None:
                    self._run.trickle.give_up(message.save.step)
                self.chair.revoked(message.rank, message.save, message.past, message.reason)
                image = node.images.get(message.save, {}).get(message.rank) if message.save is not None else None
                self._run.evict(message.rank, message.past, image.facts if image is not None else None)
            case n.Began():
                self.chair.began(message.rank, message.epoch)
            case m.Plan():
                self.chair.plan(message)
            case n.Copied():
                self.chair.copied(message)
            case n.Promise():
                self._promise(node, message)
            case n.Evicted():
                self._run.trickle.evict_whole(message.past)
            case n.Written():
                if self._errand is not None and self._errand.save == message.save:
                    self._errand.written(node, message.failure.error() if message.failure else None)

    def evicted(self, past: Past) -> None:
        """A committed step is no more in this node's folder, for an image of it is dirty."""
        for node in self._nodes:
            if node.apart:
                node.tell(n.Evicted(past))

    def _settle(self, node: Outlying, drafts: tuple[int, ...]) -> None:
        """Tell a node with a folder of its own what of it was committed here while it did not hear."""

        def look() -> None:
            settle = n.Settle(*committed_of(self._run.folder.disk, drafts))
            self._post(lambda: node.tell(settle))

        self._run.trickle.meanwhile(look)

    def _sealed(self, node: Outlying, message: n.Sealed) -> None:
        rank, save = message.facts.rank, message.save
        node.images.setdefault(save, {})[rank] = message
        if message.promise:
            self._run.trickle.hurry()
        berth = self._run.berths.get(0)
        manifest = berth.manifest(save.step) if berth is not None and berth.created_of(save) is not None else None
        if manifest is not None and manifest.ranks[rank : rank + 1] == (message.facts,):
            node.tell(n.Clean(save, manifest.created, manifest.metric))  # it says so again, after a break
        else:
            self.chair.sealed_afar(rank, save)

    def _promise(self, node: Outlying, message: n.Promise) -> None:
        """A rank there waits for its image; one that is here no longer will not get any farther."""
        sealed = node.images.get(message.save, {}) if message.save is not None else {}
        if message.tier == "disk" and message.rank in sealed:
            sealed[message.rank] = msgspec.structs.replace(sealed[message.rank], promise=True)
        if (why := self._promises.afar(message)) is not None:
            past = message.past
            failed = m.Failed.of(m.Refused.of(0, why), past.step, past.created, message.tier)
            node.tell(n.ToRank(message.rank, failed))
