"""Chunks of an image for all trainers of a node, each read once while somebody holds them.

Whoever has the image's file reads it without us; only what several of them want is read here, for all.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.errors import FormatError, SnapshotNotFoundError
from zerostall.tiers.host import stride_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.agent.client import Client
    from zerostall.tiers.contract import Readable


@dataclass(slots=True, eq=False)
class SharedChunks:
    """Chunks of one image, as far as they were asked for, each at its place in the image.

    Attributes:
        users: how many requests hold it or wait for it; the loop's.
        wanted: who has the file, and the chunks that it is to read of it; the loop's.
        lent: the chunks that were asked for in memory; the loop's.
        segment: of the image's size, made when the first chunk is read; whoever has `lock`.
        present: the chunks that are there, checked; whoever has `lock`.
    """

    users: int = 0
    wanted: dict[Client, frozenset[int]] = field(default_factory=dict)
    lent: set[int] = field(default_factory=set)
    segment: native.Segment | None = None
    present: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, run: Readable, step: int, rank: int, chunks: Sequence[int]) -> native.Segment:
        """The segment with these chunks in it; what is there already is not read again. Any thread."""
        with self.lock:
            return self._read(run, step, rank, chunks)

    def in_common(self, client: Client) -> tuple[int, ...]:
        """Of the chunks that it reads of the file: what others want, too, or have in memory. The loop."""
        others = self.lent.union(*(chunks for other, chunks in self.wanted.items() if other is not client))
        return tuple(sorted(others.intersection(self.wanted.get(client, ()))))

    def _read(self, run: Readable, step: int, rank: int, chunks: Sequence[int]) -> native.Segment:
        missing = sorted(set(chunks) - self.present)
        if self.segment is None or missing:
            stored = run.open(step, rank)
            if missing and not 0 <= missing[0] <= missing[-1] < len(stored.record.checksums):
                raise FormatError(f"the image of rank {rank} at step {step} has no chunk {missing[-1]}")
            nbytes = stride_of(stored.layout)
            if self.segment is None:
                self.segment = native.Segment(f"zerostall-chunks-{rank}", nbytes, populate=False)
            elif self.segment.nbytes != nbytes:  # what was fetched before is of a step of that number no more
                raise SnapshotNotFoundError(f"step {step} of rank {rank} is another one by now")
            run.get(step, rank, self.segment.address, chunks=missing)
            self.present.update(missing)
        return self.segment

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()
