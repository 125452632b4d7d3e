"""A run's ranks on other nodes, as they are to the agent of rank 0's node, which decides for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zerostall.core.manifest import Manifest, RankFacts
    from zerostall.core.roll import Save
    from zerostall.errors import ZerostallError
    from zerostall.flow.persist import Order, Others
    from zerostall.wire import messages as m
    from zerostall.wire import nodes as n


class Fellows(Protocol):
    """On the agent's loop; they are reached through `seat.Seat`."""

    def tell(self, message: n.FromSeat) -> None:
        """All other nodes."""

    def tell_rank(self, rank: int, message: m.Reached | m.Failed) -> None:
        """The trainer of a rank on another node, if that is there."""

    def facts(self, save: Save) -> dict[int, RankFacts]:
        """What a manifest says of the images of a save on other nodes, by rank."""
        ...

    def covers(self, manifest: Manifest, save: Save) -> bool:
        """Are all images that are not this node's still on the others?"""
        ...

    def wishes(self, save: Save) -> list[n.Sealed]:
        """What was said beside the images of a save on other nodes."""
        ...

    def errand(self, save: Save) -> Others:
        """The save goes to disk: its images stay where they are until `stored`."""
        ...

    def here(self, manifest: Manifest) -> frozenset[int] | None:
        """The ranks whose images get into this node's folder; None where all do."""
        ...

    def stored(self, order: Order, save: Save, error: ZerostallError | None) -> None:
        """The save is committed on disk, or it is not."""
