"""What a run's fetches ask of other nodes, and an image that one of them has given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.prefetch import MEMORY
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from zerostall import native
    from zerostall.core.candidates import Past
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record
    from zerostall.tiers.contract import Readable

TIER = "replica"
PARTNER = "partner"
"""What a restore says of bytes that came from a disk of another node."""


def source_of(tier: str) -> str:
    """What `Fetched.source` says of another node's copy in that tier."""
    return "" if tier in MEMORY else PARTNER


@dataclass(frozen=True, slots=True)
class Brought:
    """An image in memory for a trainer: what it is told, the memory's descriptor, and how that is let go.

    `release` is for the loop; where it is `slow`, for another thread.
    """

    answer: m.Fetched
    fd: int
    release: Callable[[], None]
    slow: bool


def whole(request: m.Fetch, segment: native.Segment, layout: Layout, record: Record, source: str = "") -> m.Fetched:
    """The answer where an image was brought into a segment of its own, and was checked on the way."""
    return m.Fetched(
        id=request.id,
        memory=m.Lent(0, segment.nbytes),
        offset=0,
        passing=True,
        layout=layouts.encode(layout),
        record=manifests.encode_record(record),
        verified=True,
        source=source,
    )


class OtherNodes(Protocol):
    """The copies of one run's ranks on other nodes, where this one belongs to a cluster."""

    @property
    def afar(self) -> Readable:
        """Their steps, read as from a tier."""
        ...

    def copies(self, rank: int, near: Collection[Past]) -> tuple[m.CopyFacts, ...]:
        """The steps of which another node has the rank's image; those `near` count only where memory has them."""
        ...

    def source(self, step: int, rank: int) -> str:
        """What `Fetched.source` is of what `afar` gave last of that image."""
        ...

    def lend(self, request: m.Fetch, rank: int) -> Brought | None:
        """On the loop: the image that the step was found to have, where this node keeps it as a guest."""
        ...

    def bring(self, request: m.Fetch, rank: int) -> Brought:
        """The image in memory, from the nearest node that has it."""
        ...
