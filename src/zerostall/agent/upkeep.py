"""What keeps the images of this node sound: doubts are looked into, and what nobody reads is looked at."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from zerostall.agent.copies import Copies
from zerostall.agent.disk_copies import DiskCopies
from zerostall.agent.good_copies import descriptions, good_copies
from zerostall.agent.loop_call import Post, on_loop
from zerostall.agent.mending import Mending
from zerostall.agent.scrubbing import Scrubbing
from zerostall.agent.vouchers import Vouchers
from zerostall.core.placement import ImageId
from zerostall.tiers.contract import Stored
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerostall.agent.neighbourhood import Neighbourhood
    from zerostall.agent.run import Run
    from zerostall.agent.runs import Runs
    from zerostall.config import AgentSettings
    from zerostall.core.manifest import Manifest


class Upkeep:
    """One an agent."""

    def __init__(self, runs: Runs, settings: AgentSettings, post: Post) -> None:
        self.copies = Copies(runs, post)
        self._neighbourhood: Neighbourhood | None = None
        disks = DiskCopies(runs, self.copies, post)
        vouchers = Vouchers(partial(_manifests, post), self._described)
        self.mending = Mending(
            self.copies, disks, vouchers, lambda wanted: good_copies(wanted, self._neighbourhood), post
        )
        self.scrubbing = Scrubbing(
            self.copies, disks, runs.governor, self.mending.doubt, settings.scrub_rate, settings.scrub_rest
        )

    def join(self, neighbourhood: Neighbourhood) -> None:
        """Other nodes have copies, and some of theirs are here."""
        self._neighbourhood = neighbourhood
        self.copies.guests = neighbourhood.replication.guests

    def doubt(self, image: ImageId, step: int, why: str, *, disk: bool = False) -> None:
        """See `doubt.Doubt`."""
        self.mending.doubt(image, step, why, disk=disk)

    def close(self) -> None:
        self.scrubbing.close()
        self.mending.close()

    def _described(self, run: Run, rank: int, step: int) -> Iterator[tuple[str, Stored]]:
        image = ImageId(run.folder.facts.run, rank)
        for copy in self.copies.of(image, step):
            yield "this node's memory", Stored(copy.memory.layout, copy.record)
        yield from descriptions(run, image, step, self._neighbourhood)

    def words(self) -> str:
        """What goes on just now."""
        scrubbing = self.scrubbing
        if not scrubbing.rate:
            return "copies are not scrubbed: the rate is 0"
        return f"scrubs at most {scrubbing.rate >> 10} KiB/s" + (
            f"; rests: {scrubbing.reason}" if scrubbing.reason else ""
        )

    def report(self) -> m.UpkeepReport:
        """For the node's status."""
        return m.UpkeepReport(
            words=self.words(),
            rate=self.scrubbing.rate,
            checked=self.scrubbing.checked,
            damaged=self.mending.damaged,
            mended=self.mending.mended,
            pace=self._neighbourhood.replication.pace.words() if self._neighbourhood else "",
        )


def _manifests(post: Post, run: Run, step: int) -> list[Manifest]:
    """What this node's memory says of a step that is clean."""
    return on_loop(
        post, lambda: [whole for berth in run.berths.values() if (whole := berth.manifest(step)) is not None]
    )
