"""Putting back a step of several ranks, or into several: each rank reads what it needs of every image.

In two stages, each of which every rank ends before the next begins: first everything is compared and fetched, then it
is written. So a rank that finds the step unfit for it keeps all from writing. Files on this node's disk are only opened
in the first: each rank reads what it alone needs right into its tensors, and the agent reads for all what several need.
What is in a store comes in the second, chunk by chunk (`arrivals`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from zerostall import config, native
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.kinds import Kind
from zerostall.errors import CorruptError, FormatError, SnapshotNotFoundError
from zerostall.telemetry import log
from zerostall.trainer.arrivals import Arrivals, Coming
from zerostall.trainer.file_loads import File
from zerostall.trainer.pouring import Filed, Loading, Mapped, pour, through
from zerostall.trainer.state import writes
from zerostall.trainer.state.stored_step import Images
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zerostall.core.candidates import Copy
    from zerostall.core.manifest import Record
    from zerostall.trainer.restore import Request, Source
    from zerostall.trainer.state import State
    from zerostall.trainer.state.gathering import Share
    from zerostall.trainer.state.spread import Loose
    from zerostall.trainer.state.tensors import Holder


_AHEAD = 2
"""Files that are read at once."""


def collect(source: Source, state: State, request: Request, copy: Copy, label: str) -> str:
    """Restore one step, on all ranks or on none; the tier that this rank's came from.

    Raises on every rank what it raised on one.
    """
    start = time.perf_counter()
    threads = config.read_threads() if copy.tier == "disk" else config.restore_threads()
    pool = native.Pool("restore", threads, awaited=True)
    stack = contextlib.ExitStack()
    stack.callback(pool.close)
    stack.push(_releasing(source))
    with stack:
        what = f"restore: {label} is compared"
        with source.world.excused(what), source.world.pulse():
            described = _describe(source, copy)
            met = state.meet(described.images, request.asked)
            stack.callback(met.let_go)
        unexpected = _expected_nowhere(source, met.match.unexpected, what)
        with source.world.together(f"restore: {label} is fetched"):
            landings = state.landings(met, unexpected)
            # Each rank begins with its own image, so that not all wait for the same one.
            mine, world = source.world.rank, described.images.world
            needed = sorted(landings.gathering.shares.items(), key=lambda share: (share[0] - mine) % world)
            records = _records(source, copy, described, [rank for rank, _ in needed])
            # Several ranks of a node share what is read for one of them, so all of it stays until all are through.
            early = needed if source.world.size > 1 else []
            arrivals = Arrivals(source.link, source.mappings, stack)
            lent = [(_fetch(source, stack, arrivals, copy, records[rank], share), share) for rank, share in early]
        with source.world.together(f"restore: {label} is written"), _released_where_it_fails(source):
            state.about_to_write(landings)
            writing = _Writing(source, pool, copy, label)
            for image, share in lent:
                writing.begin(stack, image, share)
            writing.end(stack)
            if source.world.size == 1:
                for rank, share in needed:
                    with contextlib.ExitStack() as shortly:
                        alone = Arrivals(source.link, source.mappings, shortly)
                        image = _fetch(source, shortly, alone, copy, records[rank], share)
                        writing.begin(shortly, image, share)
                        writing.end(shortly)
                    source.link.tell(m.Release(), timeout=1.0)
            report = state.finish(landings)
    seconds = time.perf_counter() - start
    log.info("restored %s, saved by %d ranks, in %.3f s: %s", label, described.images.world, seconds, report)
    return "peer" if writing.recalled else writing.source()


def _releasing(source: Source) -> Callable[[object, BaseException | None, object], None]:
    """Lets go of what was fetched; where it was damaged, on this rank or another, the agent is to look at it itself."""

    def release(kind: object, error: BaseException | None, trace: object) -> None:
        damaged = m.plain(str(error.args[0])) if isinstance(error, CorruptError) else ""
        source.link.tell(m.Release(damaged), timeout=1.0)

    return release


@contextlib.contextmanager
def _released_where_it_fails(source: Source) -> Iterator[None]:
    """Let go before the others are waited for: they may wait for memory that holds what this rank has not taken."""
    try:
        yield
    except BaseException as error:
        _releasing(source)(None, error, None)
        raise


def _expected_nowhere(source: Source, unexpected: Sequence[str], what: str) -> list[str]:
    """Of the names that are stored and not expected here, those that no rank expects."""

    def decide(every: Sequence[bytes]) -> bytes:
        first, *others = (msgspec.msgpack.decode(one, type=list[str]) for one in every)
        common = set(first).intersection(*others)
        return msgspec.msgpack.encode([name for name in first if name in common])

    answer = source.world.decide(msgspec.msgpack.encode(unexpected), decide, what=what)
    return msgspec.msgpack.decode(answer, type=list[str])


@dataclass(frozen=True, slots=True)
class _Described:
    """A step, as the agent told of it.

    Attributes:
        created: tells it from others of that number.
        images: what is compared.
        layouts: of each rank, the layout's digest and the rank's begins.
    """

    created: float
    images: Images
    layouts: Sequence[tuple[str, tuple[int, ...]]]


def _describe(source: Source, copy: Copy) -> _Described:
    """What all ranks' images are; and the small values of some.

    Raises:
        SnapshotNotFoundError: the step that is there by now is another one of that number than the ranks agreed on.
    """
    answer, _ = source.link.ask(lambda id: m.Describe(id=id, step=copy.step, tier=copy.tier))
    assert isinstance(answer, m.Described)
    if copy.created and answer.created != copy.created:
        raise SnapshotNotFoundError(f"step {copy.step} in {copy.tier} is another one by now")
    ranks: dict[int, list[int]] = {number: [] for number in range(len(answer.layouts))}
    for rank, number in enumerate(answer.layout_of):
        ranks[number].append(rank)
    kinds: list[Kind] = []
    for number, data in enumerate(answer.layouts):
        begins = [answer.begins[rank] for rank in ranks[number]]
        kinds.append(Kind(layouts.decode(data, begins[0]), ranks[number], begins))
    told = [(kinds[number].layout.digest, answer.begins[rank]) for rank, number in enumerate(answer.layout_of)]
    records = _checked(answer.records, told)
    return _Described(answer.created, Images(kinds, len(told), {record.rank: record for record in records}), told)


def _records(source: Source, copy: Copy, described: _Described, ranks: Sequence[int]) -> dict[int, Record]:
    """The records of these ranks, as far as they were not told yet they are asked for."""
    known = described.images.records
    missing = tuple(rank for rank in ranks if rank not in known)
    if not missing:
        return {rank: known[rank] for rank in ranks}
    answer, _ = source.link.ask(
        lambda id: m.Quote(id=id, step=copy.step, tier=copy.tier, created=described.created, ranks=missing)
    )
    assert isinstance(answer, m.Quoted)
    found = {record.rank: record for record in _checked(answer.records, described.layouts)}
    return {rank: known[rank] if rank in known else found[rank] for rank in ranks}


def _checked(files: Sequence[bytes], told: Sequence[tuple[str, tuple[int, ...]]]) -> list[Record]:
    found = [manifests.decode_record(data) for data in files]
    for record in found:
        if record.world != len(told) or (record.layout, record.begins) != told[record.rank]:
            raise FormatError(f"the record of rank {record.rank} is of another layout")
    return found


def _fetch(
    source: Source, stack: contextlib.ExitStack, arrivals: Arrivals, copy: Copy, record: Record, share: Share
) -> Mapped | Filed | Coming:
    """The chunks of one rank's image that are needed, in memory or coming; where all are read run by run, its file."""
    chunks = tuple(share.chunks(record.chunk_bytes))
    if copy.tier != "remote" and share.loose_chunks(record.chunk_bytes):
        return _in_memory(source, stack, copy, record, chunks)
    answer, fds = source.link.ask(
        lambda id: m.Fetch(id=id, step=copy.step, tier=copy.tier, rank=record.rank, chunks=chunks, as_file=True)
    )
    if isinstance(answer, m.Coming):
        return arrivals.image(answer, fds[0], record, chunks)
    if isinstance(answer, m.Opened):
        stack.callback(os.close, fds[0])
        path = Path(os.fsdecode(answer.path))
        return Filed(record, File(fds[0], path, record.nbytes, record.chunk_bytes, record.checksums))
    assert isinstance(answer, m.Fetched)
    return _mapped(source, stack, record, answer, fds[0])


def _in_memory(
    source: Source, stack: contextlib.ExitStack, copy: Copy, record: Record, chunks: tuple[int, ...]
) -> Mapped:
    """Chunks of one rank's image, all of them in memory at once."""
    answer, fds = source.link.ask(
        lambda id: m.Fetch(id=id, step=copy.step, tier=copy.tier, rank=record.rank, chunks=chunks)
    )
    assert isinstance(answer, m.Fetched)
    return _mapped(source, stack, record, answer, fds[0])


def _mapped(source: Source, stack: contextlib.ExitStack, record: Record, answer: m.Fetched, fd: int) -> Mapped:
    memory = answer.memory
    if answer.passing:
        segment = stack.enter_context(source.mappings.passing(fd, memory.nbytes))
    else:
        segment = source.mappings.get(memory.key, fd, memory.nbytes)
    if answer.offset + record.nbytes > segment.nbytes:
        raise CorruptError(f"the image of rank {record.rank} does not fit the memory it came in")
    return Mapped(record, segment, answer.offset, kept=answer.kept, source=answer.source)


@dataclass(frozen=True, slots=True)
class _Underway:
    """An image that is being read from its file; and the chunks of it that several ranks of this node want."""

    loading: Loading
    record: Record
    common: tuple[int, ...]


class _Writing:
    """Fills what is filled from one image after another; files are read ahead.

    Attributes:
        recalled: how many bytes came from another GPU's memory.
    """

    def __init__(self, source: Source, pool: native.Pool, copy: Copy, label: str) -> None:
        self.recalled = 0
        self._sources: set[str] = set()
        self._source = source
        self._pool = pool
        self._copy = copy
        self._label = label
        self._underway: deque[_Underway] = deque()
        self._spare: dict[int, list[native.Staging]] = {}
        self._coming: list[tuple[Coming, Loading, Loose]] = []

    def begin(self, stack: contextlib.ExitStack, image: Mapped | Filed | Coming, share: Share) -> None:
        """Fill from this image, or begin to; `stack` outlives that."""
        self._sources.add((image.source if isinstance(image, Mapped) else "") or self._copy.tier)
        if isinstance(image, Mapped):
            self.recalled += _write(self._source, self._pool, image, share, self._label)
            return
        record = image.record
        plan, targets = _runs(record, share)
        devices, pieces = self._source.devices, range(len(targets))
        loading = Loading(self._pool, devices, plan, targets, pieces, image.file, self._spare)
        stack.callback(loading.give_up)
        if isinstance(image, Coming):
            loose = share.loose(record.chunk_bytes)
            image.arrivals.expect(record, self._pool, loading, loose)
            self._coming.append((image, loading, loose))
            return
        if len(self._underway) == _AHEAD:
            self._end_first(stack)
        common = self._in_common(record)
        self._underway.append(_Underway(loading, record, common))
        if not common:
            loading.begin()
        elif alone := sorted(set(share.chunks(record.chunk_bytes)).difference(common)):
            loading.begin(alone)

    def source(self) -> str:
        """The tier that it came from: the one that was asked, unless all came from another."""
        return next(iter(self._sources)) if len(self._sources) == 1 else self._copy.tier

    def end(self, stack: contextlib.ExitStack) -> None:
        """Wait for all that was begun.

        Raises:
            CorruptError: a chunk fails its checksum.
        """
        while self._underway:
            self._end_first(stack)
        if self._coming:
            first, *_ = self._coming[0]
            first.arrivals.bring()
        for _, loading, loose in self._coming:
            loading.end()
            loose.settle()
        self._coming.clear()

    def _end_first(self, stack: contextlib.ExitStack) -> None:
        first = self._underway.popleft()
        if first.common:
            # Read once for all by the agent, while the rest comes from the file.
            image = _in_memory(self._source, stack, self._copy, first.record, first.common)
            stack.callback(first.loading.give_up)  # before that memory goes
            first.loading.begin(first.common, held=image.address)
        try:
            first.loading.end()
        except CorruptError as error:
            raise CorruptError(f"{self._label}, rank {first.record.rank}: {error.args[0]}") from None

    def _in_common(self, record: Record) -> tuple[int, ...]:
        """The chunks of an opened image that others of this node want, too."""
        if self._source.world.size == 1:
            return ()
        copy = self._copy
        answer, _ = self._source.link.ask(lambda id: m.Common(id=id, step=copy.step, tier=copy.tier, rank=record.rank))
        assert isinstance(answer, m.InCommon)
        return answer.chunks


def _runs(record: Record, share: Share) -> tuple[native.Plan, list[Holder]]:
    """The runs of bytes that are read of an image, and where each goes."""
    plan = native.Plan(
        nbytes=record.nbytes,
        header=b"",
        chunk_bytes=record.chunk_bytes,
        offsets=[offset for offset, _, _ in share.runs],
        sizes=[nbytes for _, nbytes, _ in share.runs],
    )
    return plan, [target for _, _, target in share.runs]


def _write(source: Source, pool: native.Pool, image: Mapped, share: Share, label: str) -> int:
    """Fill what is filled from that image; how many bytes came from another GPU's memory."""
    record, recalled = image.record, 0
    if share.runs:
        plan, targets = _runs(record, share)
        # As much of it is registered with CUDA as is worth it: where a rank goes on from its own image that is all.
        most = 2 * sum(nbytes for _, nbytes, _ in share.runs) >= record.nbytes
        try:
            recalled = pour(pool, source.devices, plan, targets, range(len(targets)), image, pin=most)
        except CorruptError as error:
            raise CorruptError(f"{label}, rank {record.rank}: {error.args[0]}") from None
    loose = share.loose_chunks(record.chunk_bytes)
    if loose:
        _check(pool, image, loose, label)
        share.pour(writes.as_bytes(image.segment.view(image.offset, record.nbytes)))
    return recalled


def _check(pool: native.Pool, image: Mapped, chunks: Sequence[int], label: str) -> None:
    """Check chunks whose bytes are read past `native.Scatter`."""
    record = image.record
    for first, last in _stretches(chunks):
        begin = first * record.chunk_bytes
        job = native.Verify(
            pool,
            image.address + begin,
            min(record.nbytes, (last + 1) * record.chunk_bytes) - begin,
            record.chunk_bytes,
            record.checksums[first : last + 1],
        )
        through(job)
        if job.bad:
            chunk = first + job.bad[0]
            raise CorruptError(
                f"{label}, rank {record.rank}: chunk {chunk} of {len(record.checksums)} fails its checksum"
            )


def _stretches(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of numbers without a gap."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
