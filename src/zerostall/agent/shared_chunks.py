"""Chunks of an image in memory for all trainers of a node, each read once while somebody holds them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.errors import FormatError
from zerostall.tiers.host import stride_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.tiers.contract import Readable


@dataclass(slots=True, eq=False)
class SharedChunks:
    """Chunks of one image, as far as they were asked for, each at its place in the image.

    Attributes:
        users: how many requests hold it or wait for it; the loop's.
        segment: of the image's size, made when the first chunk is read; whoever has `lock`.
        present: the chunks that are there, checked; whoever has `lock`.
    """

    users: int = 0
    segment: native.Segment | None = None
    present: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, run: Readable, step: int, rank: int, chunks: Sequence[int]) -> native.Segment:
        """The segment with these chunks in it; what is there already is not read again. Any thread."""
        with self.lock:
            return self._read(run, step, rank, chunks)

    def _read(self, run: Readable, step: int, rank: int, chunks: Sequence[int]) -> native.Segment:
        missing = sorted(set(chunks) - self.present)
        if self.segment is None or missing:
            stored = run.open(step, rank)
            if missing and not 0 <= missing[0] <= missing[-1] < len(stored.record.checksums):
                raise FormatError(f"the image of rank {rank} at step {step} has no chunk {missing[-1]}")
            if self.segment is None:
                self.segment = native.Segment(f"zerostall-chunks-{rank}", stride_of(stored.layout), populate=False)
            run.get(step, rank, self.segment.address, chunks=missing)
            self.present.update(missing)
        return self.segment

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()
