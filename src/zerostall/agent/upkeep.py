"""What keeps the images of this node sound: doubts are looked into, and what nobody reads is looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.agent.copies import Copies
from zerostall.agent.disk_copies import DiskCopies
from zerostall.agent.good_copies import good_copies
from zerostall.agent.mending import Mending
from zerostall.agent.scrubbing import Scrubbing
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from zerostall.agent.loop_call import Post
    from zerostall.agent.neighbourhood import Neighbourhood
    from zerostall.agent.runs import Runs
    from zerostall.core.placement import ImageId


class Upkeep:
    """One an agent."""

    def __init__(self, runs: Runs, rate: int, post: Post) -> None:
        self.copies = Copies(runs, post)
        self._neighbourhood: Neighbourhood | None = None
        disks = DiskCopies(runs, self.copies, post)
        self.mending = Mending(self.copies, disks, lambda wanted: good_copies(wanted, self._neighbourhood), post)
        self.scrubbing = Scrubbing(self.copies, runs.governor, self.mending.doubt, rate)

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
