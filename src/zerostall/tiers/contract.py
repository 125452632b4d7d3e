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
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from zerostall.core.candidates import Past
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, RankFacts, Record, RunFacts
    from zerostall.core.retention import StepFacts


class Pace(Protocol):
    """When an image may be written, before which others may come."""

    def free(self) -> bool:
        """Whether it may go on just now."""
        ...

    def wait(self) -> None:
        """Return when it may."""


class DeviceCopy(Protocol):
    """The same image in a device's memory, from where a file may take it straight (`core.gds`)."""

    def write(self, fd: int, where: Path, pace: Pace) -> int:
        """Have the open file take whole chunks from there, from the first on; how many it has got.

        The rest is the caller's, who is told nothing but what was said once: it never raises. Nothing is synced.
        """
        ...


@dataclass(frozen=True, slots=True)
class Image:
    """One rank's image in memory.

    Attributes:
        layout, record: what it is and what its chunks must add up to.
        address: of `layout.nbytes` readable bytes, page aligned, readable up to the next page boundary.
        device: where it lies on a device, too.
    """

    layout: Layout
    record: Record
    address: int
    device: DeviceCopy | None = None


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


class ImageBytes(Protocol):
    """The bytes of one rank's image, wherever they lie, as they are. Any thread may ask for any range.

    Attributes:
        label: what messages call it.
    """

    label: str

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes from `offset` on.

        Raises:
            CorruptError: there are fewer.
            StorageError: they cannot be read.
        """

    def close(self) -> None:
        """Let go of what is open."""


class Readable(Protocol):
    """What a restore of several ranks reads: a tier that holds whole runs, or a step that is spread over nodes.

    Attributes:
        name: the tier's.
        where: what messages call it.
    """

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> Path | str: ...

    def manifest(self, step: int) -> Manifest: ...

    def open(self, step: int, rank: int) -> Stored: ...

    def get(self, step: int, rank: int, address: int, *, chunks: Sequence[int] | None = None) -> Stored: ...

    def layout(self, facts: RankFacts) -> Layout: ...


class RunTier(Tier, Protocol):
    """A tier that holds whole runs and is there without an agent: a folder, a URL.

    Attributes:
        where: the folder or the URL.
    """

    @property
    def where(self) -> Path | str: ...

    def get(self, step: int, rank: int, address: int, *, chunks: Sequence[int] | None = None) -> Stored:
        """As `Tier.get`; `chunks`: only these are read, each to its place in the image, and checked."""
        ...

    def commit(self, manifest: Manifest, *, replace: bool = False, pin: bool = False) -> None:
        """As `Tier.commit`; `pin` marks the step so that retention never evicts it."""

    def bytes_of(self, step: int, rank: int, stored: Stored) -> ImageBytes:
        """The bytes of the image that `open` told of, to be closed. CorruptError where it is missing or cut."""
        ...

    def layout(self, facts: RankFacts) -> Layout:
        """The layout of a rank of which a manifest says that, checked; its record is not read."""
        ...

    def missing(self, manifest: Manifest) -> str:
        """In words, which image or record of a committed step is not there in full; empty where all are."""
        ...

    def run_facts(self) -> RunFacts | None:
        """What run this is; None where nothing says so. FormatError where that is damaged."""
        ...

    def found_run(self, facts: RunFacts) -> RunFacts:
        """Say what run this is, if nothing says so yet; what run it is now."""
        ...

    def facts(self, steps: Iterable[int]) -> dict[int, StepFacts]:
        """What retention may ask of committed steps, but for pins.

        One that is damaged is best at nothing and older than all; one that cannot be read just now is left out.
        """
        ...

    def strangers(self, steps: Iterable[int], *, rewound: bool = False) -> set[int]:
        """Which of these steps, committed or (`rewound`) set aside, are another run's; a manifest is read once."""
        ...

    def remove_again(self) -> None:
        """Try once more to remove what could not be removed before."""

    def pinned(self, step: int, *, rewound: bool = False) -> bool:
        """Whether retention leaves the step alone."""
        ...

    def pin(self, step: int, pinned: bool = True) -> None:
        """Mark a committed step so that retention never evicts it (or no longer)."""

    def rewound(self) -> list[int]:
        """Steps that were set aside."""
        ...

    def forget_rewound(self, step: int) -> None:
        """Forget a step that was set aside."""

    def set_aside(self, past: Iterable[Past]) -> list[int]:
        """Let these very steps count no longer: the run has left the past they belong to."""
        ...

    def abandon(self, step: int) -> None:
        """Undo what was `put` of a step and will not be committed. Never raises."""
