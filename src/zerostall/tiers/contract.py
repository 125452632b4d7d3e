"""What every tier does: seven verbs over images, and one commit rule.

A tier moves the bytes of images; it knows nothing of tensors. A step is there when its manifest is, and the manifest is
written last. The truth of each verb in each state of a step:

    step is …        absent            put, not committed      committed
    put              stores            stores again (over)     aside, old one stays until commit
    commit           FormatError       visible, whole          needs replace=True, else StepExistsError
    steps            not listed        not listed              listed
    manifest, open   SnapshotNotFound  SnapshotNotFound        checked, or CorruptError
    get              SnapshotNotFound  SnapshotNotFound        bytes, checked, or CorruptError
    evict            nothing to do     forgotten               invisible first, then forgotten

A tier that keeps bytes durable makes them durable *before* `commit` makes the step visible. Every verb may raise
`StorageError`; afterwards the tier is as before, apart from leftovers that are never visible and that the next `put`
of the step or the next start clears away.

The same tests run over all tiers: tests/contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, Record


@dataclass(frozen=True, slots=True)
class Image:
    """One rank's image in memory.

    Attributes:
        layout, record: what it is and what its chunks must add up to.
        address: of `layout.nbytes` readable bytes, page aligned, readable up to the next page boundary.
    """

    layout: Layout
    record: Record
    address: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What a tier knows of one rank's image without reading its bytes."""

    layout: Layout
    record: Record


class Tier(Protocol):
    """A kind of place where images rest."""

    name: str

    def put(self, image: Image) -> None:
        """Store one rank's image of a step, not visible yet."""

    def commit(self, manifest: Manifest, *, replace: bool = False) -> None:
        """Make the step visible; all of its ranks' images were `put` before."""

    def steps(self) -> list[int]:
        """The committed steps, rising. One listing, no file is read."""
        ...

    def manifest(self, step: int) -> Manifest:
        """The manifest of a committed step, checked."""
        ...

    def open(self, step: int, rank: int) -> Stored:
        """Layout and record of one rank's image, checked against the manifest."""
        ...

    def get(self, step: int, rank: int, address: int) -> Stored:
        """Bring the image's bytes to `address` (page aligned, room for whole pages), checked on the way."""
        ...

    def evict(self, step: int) -> None:
        """Forget the step."""
