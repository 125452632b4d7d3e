"""A folder of this node's own, for the images of its ranks, where the ranks of a run are on several nodes.

Rank 0's node commits a step when all nodes have written their images, each into its folder. Then the others commit what
they have with the same manifest. One that did not hear of it keeps what it has written as a draft, and is told when it
is connected again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.agent.takeover import take_own_folder
from zerostall.core import manifest as manifests
from zerostall.errors import ZerostallError
from zerostall.flow.persist import prune, put_images
from zerostall.telemetry import log
from zerostall.tiers.drafts import committed_of, drafts, ranks_in
from zerostall.tiers.files import remove_tree
from zerostall.wire import nodes as n

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from zerostall.agent.loop_call import Post
    from zerostall.agent.standing import Standing
    from zerostall.core.manifest import Manifest, RunFacts
    from zerostall.tiers.contract import Image
    from zerostall.wire import messages as m


class OwnFolder:
    """On the loop; what it writes, the run's own writer writes, one thing after the other.

    Raises (on construction): as `take_own_folder`.
    """

    def __init__(self, run: Standing, facts: RunFacts, post: Post) -> None:
        self._run = run
        self._facts = facts
        self._told: list[tuple[int, Path]] = []
        self._put: set[int] = set()  # since the drafts were told of
        self._post = post
        self._turn = 0  # of connections to rank 0's node, begun and broken
        self._settled_at = -1
        self._waiting: list[Callable[[], None]] = []
        take_own_folder(run, facts)

    def take(self, hello: m.Hello) -> None:
        """For a trainer that comes. Raises as on construction."""
        take_own_folder(self._run, self._facts)
        self._run.folder.spread(hello.rules.disks)

    def drafts(self) -> tuple[int, ...]:
        """Steps that were put here and not committed; `settle` answers it."""
        self._told, self._put = drafts(self._run.where), set()
        self._turn += 1
        return tuple(sorted({step for step, _ in self._told}))

    def parted(self) -> None:
        """Rank 0's node is not heard any more: what it commits is not known here."""
        self._turn += 1

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call once this folder has what rank 0's node knows to be committed; now, if it has."""
        self._waiting.append(call)
        self._go_on()

    def _settled(self, turn: int) -> None:
        self._settled_at = turn
        self._go_on()

    def _go_on(self) -> None:
        if self._settled_at == self._turn:
            calls, self._waiting = self._waiting, []
            for call in calls:
                call()

    def write(self, order: n.Write, images: Sequence[Image], then: Callable[[Exception | None], None]) -> None:
        """Have the images put, and call with why they could not be; not on the loop."""
        self._put.add(order.save.step)

        def write() -> None:
            failure: Exception | None = None
            try:
                self._run.folder.hold()
                self._run.folder.disk.set_aside(order.aside)
                put_images(self._run.folder.disk, images)
            except Exception as error:  # noqa: BLE001 - rank 0's node waits for an answer
                self._run.folder.disk.abandon(order.save.step)
                failure = error
            then(failure)

        self._run.trickle.meanwhile(write)

    def heard(self, message: n.Commit | n.Settle | n.Ask, say: Callable[[n.Known], None]) -> None:
        """From rank 0's node."""
        match message:
            case n.Commit():
                self.commit(message)
            case n.Settle():
                self.settle(message)
            case n.Ask():
                self._tell_which(message.steps, say)

    def _tell_which(self, steps: tuple[int, ...], say: Callable[[n.Known], None]) -> None:
        """Say which of these steps are committed here."""

        def look() -> None:
            manifests_here, _ = committed_of(self._run.folder.disk, steps)
            self._post(lambda: say(n.Known(manifests_here)))

        self._run.trickle.meanwhile(look)

    def commit(self, order: n.Commit) -> None:
        """Rank 0's node has committed the step."""
        manifest = manifests.decode_manifest(order.manifest, source="the manifest from rank 0's node")

        def commit() -> None:
            commit_here(self._run, manifest, pin=order.pin)

        self._run.trickle.meanwhile(commit)

    def abandon(self, step: int) -> None:
        """The step is not committed anywhere."""
        self._run.trickle.meanwhile(lambda: self._run.folder.disk.abandon(step))

    def settle(self, order: n.Settle) -> None:
        """What of the drafts is committed on rank 0's node is so here; the others go, where it can say."""
        whole = [manifests.decode_manifest(one, source="a manifest from rank 0's node") for one in order.manifests]
        told, self._told = self._told, []

        def settle() -> None:
            for step, folder in told:
                if step in self._put or step in order.unsure:
                    continue  # put anew since, or nobody knows
                manifest = next((one for one in whole if one.step == step), None)
                if manifest is not None and ranks_in(folder, manifest):
                    self._run.folder.disk.join(step, folder)
                    commit_here(self._run, manifest, folder=folder)
                else:
                    self._run.folder.disk.abandon(step)
                    remove_tree(folder)

        self._run.trickle.meanwhile(settle)
        turn = self._turn
        self._run.trickle.meanwhile(lambda: self._post(lambda: self._settled(turn)))


def commit_here(run: Standing, manifest: Manifest, *, pin: bool = False, folder: Path | None = None) -> bool:
    """Commit what was put here of a step that another node has committed; is it? The writer's thread."""
    step = manifest.step
    try:
        run.folder.hold()
        here = ranks_in(folder or run.folder.disk.draft(step), manifest)
        if not here:
            log.warning("%s: step %d is committed on another node, and nothing of it is here", run.where, step)
            return False
        run.folder.disk.commit(manifest, replace=True, pin=pin, here=here)
        log.info("%s: step %d is committed, with the images of ranks %s", run.where, step, sorted(here))
        prune(run.folder.disk, run.trickle.keep, run.fetches.steps() | {step})
    except (ZerostallError, OSError) as error:
        log.error("%s: step %d could not be committed here: %s", run.where, step, error)
        return False
    return True
