"""Steps that were put on rank 0's node and not committed, from when another node had rank 0 and committed first.

Each of the others that has a folder of its own is asked which of them it has committed. Those are so here then; what
nobody speaks of stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.agent.own_folder import commit_here
from zerostall.core import manifest as manifests
from zerostall.tiers.drafts import ranks_in, unsettled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from zerostall.agent.loop_call import Post
    from zerostall.agent.standing import Standing
    from zerostall.wire import nodes as n


class SeatDrafts:
    """On the loop; what it writes, the run's own writer writes."""

    def __init__(self, run: Standing, post: Post) -> None:
        self._run = run
        self._post = post
        self._found: list[tuple[int, Path]] | None = None  # when the folder was looked at first
        self._answered: set[int] = set()  # ranks
        self._waiting: list[Callable[[], None]] = []

    def steps(self) -> tuple[int, ...]:
        """Of which the other nodes are to say whether they have committed them."""
        if self._found is None:
            self._found = unsettled(self._run.folder.disk, several=True)
        return tuple(sorted({step for step, _ in self._found}))

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call once this folder has what any of the other nodes knows to be committed; now, if it has."""
        self._waiting.append(call)
        self._go_on()

    def known(self, ranks: Iterable[int], told: n.Known) -> None:
        """The node with these ranks has answered."""
        whole = [manifests.decode_manifest(one, source="a manifest from another node") for one in told.manifests]
        found = [(*one, manifest) for manifest in whole for one in self._found or () if one[0] == manifest.step]

        def settle() -> None:
            for step, folder, manifest in found:
                if folder.exists() and ranks_in(folder, manifest):
                    self._run.folder.disk.join(step, folder)
                    if commit_here(self._run, manifest, folder=folder):
                        self._post(lambda step=step: self._run.folder.on_disk.add(step))

        if found:
            self._run.trickle.meanwhile(settle)
        answered = frozenset(ranks)
        self._run.trickle.meanwhile(lambda: self._post(lambda: self.settled(answered)))

    def settled(self, ranks: Iterable[int]) -> None:
        """Of the node with these ranks there is nothing to wait for any more."""
        self._answered.update(ranks)
        self._go_on()

    def _go_on(self) -> None:
        others = frozenset(range(self._run.world)) - self._run.here
        if not self.steps() or self._answered >= others:
            calls, self._waiting = self._waiting, []
            for call in calls:
                call()
