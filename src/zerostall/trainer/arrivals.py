"""Chunks of images that come from a store through the agent, into tensors as they come, in whatever order.

Runs of bytes go by `native.Load`, as from a file; what lies here and there is copied by torch (`state/spread`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core import steps as names
from zerostall.errors import AgentError, CorruptError
from zerostall.trainer.file_loads import File
from zerostall.trainer.pouring import raise_first, through
from zerostall.trainer.state import writes
from zerostall.wire import messages as m

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable, Sequence

    from zerostall.core.manifest import Record
    from zerostall.trainer.link import Link
    from zerostall.trainer.mappings import Mappings
    from zerostall.trainer.pouring import Loading
    from zerostall.trainer.state.spread import Loose

_AT_ONCE = 2
"""Chunks that go to their tensors at the same time: each is cut into blocks, of which threads have one each."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """Where the chunks of one image go."""

    record: Record
    pool: native.Pool
    loading: Loading
    loose: Loose

    def pour(self, chunk: int, segment: native.Segment, offset: int) -> None:
        """Copy what lies here and there in a chunk that is at that offset; its bytes are checked first.

        Raises:
            CorruptError: they are not what the checksum says.
        """
        if chunk not in self.loose:
            return
        _, nbytes = self.record.extent(chunk)
        sums = self.record.checksums[chunk : chunk + 1]
        check = native.Verify(self.pool, segment.address + offset, nbytes, self.record.chunk_bytes, sums)
        through(check)
        if check.bad:
            name = names.image_file(self.record.rank)
            raise CorruptError(f"{name}: chunk {chunk} of {len(self.record.checksums)} fails its checksum")
        self.loose.pour(chunk, writes.as_bytes(segment.view(offset, nbytes)))


class Arrivals:
    """What one trainer has on its way. To be closed, by a stack."""

    def __init__(self, link: Link, mappings: Mappings, stack: contextlib.ExitStack) -> None:
        self._link = link
        self._mappings = mappings
        self._stack = stack
        self._segment: native.Segment | None = None
        self._place_bytes = 0
        self._expected: dict[int, _Expected] = {}
        self._left: dict[int, set[int]] = {}  # chunks that have not come, by rank

    def image(self, answer: m.Coming, fd: int, record: Record, chunks: Iterable[int] | None = None) -> Coming:
        """One of which the agent has said that these chunks are coming, or all; takes the descriptor over.

        Raises:
            CorruptError: its chunks do not fit where they are to come to.
            AgentError: another agent says so than of the images before.
        """
        if self._segment is None:
            self._segment = self._stack.enter_context(self._mappings.passing(fd, answer.memory.nbytes))
            self._place_bytes = answer.place_bytes
        else:
            same = os.path.samestat(os.fstat(fd), os.fstat(self._segment.fileno()))
            os.close(fd)
            if not same:
                raise AgentError("the agent that brings images from the store is another one than at first")
        self._left[record.rank] = set(range(len(record.checksums)) if chunks is None else chunks)
        nbytes = self._segment.nbytes
        if min(record.chunk_bytes, record.nbytes) > nbytes or answer.memory.nbytes != nbytes:
            raise CorruptError(f"the image of rank {record.rank} does not fit the memory it is to come in")
        path = Path(names.image_file(record.rank))
        file = File(self._segment.fileno(), path, record.nbytes, record.chunk_bytes, record.checksums)
        return Coming(record, file, self)

    def expect(self, record: Record, pool: native.Pool, loading: Loading, loose: Loose) -> None:
        """Have the chunks of that image go there."""
        self._expected[record.rank] = _Expected(record, pool, loading, loose)

    def bring(self) -> None:
        """Take all chunks of all images that are expected, as they come.

        Raises:
            CorruptError: one is not what its checksum says, or is not there.
            StorageError: the store cannot be read.
            AgentError: the agent has died, or has not brought all. It, or another, may be asked for all of it again.
        """
        agent = self._link.welcome
        try:
            self._take_all()
        except CorruptError as error:
            if self._link.welcome is not agent or not self._link.up():
                # Then others have got the places that it was taken from.
                raise AgentError("the connection to the agent broke while an image came from the store") from error
            raise
        if lacking := {rank: len(left) for rank, left in self._left.items() if left}:
            raise AgentError(f"the agent says that all has come; chunks that have not, by rank: {lacking}")

    def _take_all(self) -> None:
        assert self._segment is not None
        come = self._come(())
        while come:
            for first in range(0, len(come), _AT_ONCE):
                self._bring_some(come[first : first + _AT_ONCE], self._segment)
            come = self._come(tuple(one.place for one in come))

    def _bring_some(self, some: Sequence[m.Arrival], segment: native.Segment) -> None:
        expected = [self._expected[one.rank] for one in some]
        problems: list[BaseException] = []
        try:
            for where, one in zip(expected, some, strict=True):
                where.loading.bring(one.chunk, segment.address + one.place * self._place_bytes)
                self._left[one.rank].discard(one.chunk)
        finally:
            for where in expected:
                where.loading.settled(problems)
        raise_first(problems)
        for where, one in zip(expected, some, strict=True):
            where.pour(one.chunk, segment, one.place * self._place_bytes)

    def _come(self, taken: tuple[int, ...]) -> tuple[m.Arrival, ...]:
        answer, _ = self._link.ask(lambda id: m.Take(id=id, taken=taken))
        assert isinstance(answer, m.Arrived)
        return answer.chunks


@dataclass(frozen=True, slots=True)
class Coming:
    """One rank's image, of which chunks come; the file is the memory that they come to."""

    record: Record
    file: File
    arrivals: Arrivals

    def fill(self, pool: native.Pool, loading: Loading, loose: Loose) -> None:
        """Bring all of it there."""
        self.arrivals.expect(self.record, pool, loading, loose)
        self.arrivals.bring()
