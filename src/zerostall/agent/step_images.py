"""What the images of all ranks at a step are: told to a trainer in few bytes, and more of some ranks where it asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.errors import FormatError, SnapshotNotFoundError
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerostall.core.layout import Layout
    from zerostall.core.manifest import RankFacts, Record
    from zerostall.tiers.contract import Readable, Stored

LISTENED = 16
"""The small values of so many ranks are looked at, and those of one rank of each layout: what ranks say differently
shows in a few, and what is said on some ranks alone comes with tensors of its own.
"""


@dataclass(frozen=True, slots=True)
class StepImages:
    """One step in one place.

    Attributes:
        step, created: which one.
        ranks: what the manifest says of each rank.
        here: ranks of which all is at hand.
        run: where the others' files are; None where all are at hand.
    """

    step: int
    created: float
    ranks: Sequence[RankFacts]
    here: Mapping[int, Stored] = field(default_factory=dict)
    run: Readable | None = None

    @classmethod
    def of(cls, step: int, stored: Sequence[Stored]) -> StepImages:
        """Of images that are all at hand, in order."""
        facts = [manifests.facts(one.record, manifests.encode_record(one.record)) for one in stored]
        return cls(step, stored[0].record.created, facts, dict(enumerate(stored)))

    def described(self, id: int, rank: int) -> m.Described:
        """The layouts, and the small values that count for this rank of those that restore."""
        first: dict[str, RankFacts] = {}
        for facts in self.ranks:
            first.setdefault(facts.layout, facts)
        numbers = {digest: number for number, digest in enumerate(first)}
        listened = {rank % len(self.ranks), *range(min(LISTENED, len(self.ranks))), *self.here}
        listened.update(facts.rank for facts in first.values())
        return m.Described(
            id=id,
            created=self.created,
            layouts=tuple(layouts.encode(self._layout(facts)) for facts in first.values()),
            layout_of=tuple(numbers[facts.layout] for facts in self.ranks),
            begins=tuple(facts.begins for facts in self.ranks),
            records=tuple(manifests.encode_record(self._record(one)) for one in sorted(listened)),
        )

    def quoted(self, request: m.Quote) -> m.Quoted:
        """The records of some ranks. SnapshotNotFoundError where the step is not the one that was described."""
        if request.created != self.created:
            raise SnapshotNotFoundError(f"step {self.step} is another one by now")
        if not all(0 <= rank < len(self.ranks) for rank in request.ranks):
            raise FormatError(f"step {self.step} has no such ranks")
        return m.Quoted(
            id=request.id, records=tuple(manifests.encode_record(self._record(rank)) for rank in request.ranks)
        )

    def _layout(self, facts: RankFacts) -> Layout:
        return self.here[facts.rank].layout if self.run is None or facts.rank in self.here else self.run.layout(facts)

    def _record(self, rank: int) -> Record:
        if self.run is None or rank in self.here:
            return self.here[rank].record
        record = self.run.open(self.step, rank).record
        if record.checksum != self.ranks[rank].checksum:  # read by the manifest of now, which is another one's
            raise SnapshotNotFoundError(f"step {self.step} is another one by now")
        return record
