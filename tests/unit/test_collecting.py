"""What a rank learns of all ranks' images before it reads one: a layout, where each rank's boxes begin, few records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from images import CHUNK
from zerostall.agent.step_images import LISTENED, StepImages
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core import values
from zerostall.core.boxes import Box
from zerostall.core.candidates import Copy
from zerostall.core.layout import Layout, Shard
from zerostall.core.manifest import RankFacts, Record
from zerostall.core.pieces import gathered
from zerostall.core.reshard import reads
from zerostall.errors import CorruptError, FormatError, SnapshotNotFoundError
from zerostall.tiers.contract import RunTier, Stored
from zerostall.trainer import collecting
from zerostall.wire import messages as m

WORLD = 40
COPY = Copy(7, "disk")


class Run:
    """Files of a step in which every rank has two rows of a tensor, and which of the records were read."""

    def __init__(self) -> None:
        made = [layouts.build([Shard("m.w", "int8", (2, 3), (2 * WORLD, 3), (2 * rank, 0))]) for rank in range(WORLD)]
        self.stored = [Stored(layout, _record(layout, rank)) for rank, layout in enumerate(made)]
        self.opened: list[int] = []

    def layout(self, facts: RankFacts) -> Layout:
        return layouts.moved(self.stored[0].layout, facts.begins)

    def open(self, step: int, rank: int) -> Stored:
        self.opened.append(rank)
        return self.stored[rank]


class Agent:
    """Answers as an agent would; a request that it refuses is raised."""

    def __init__(self, run: Run) -> None:
        facts = [manifests.facts(one.record, manifests.encode_record(one.record)) for one in run.stored]
        self.images = StepImages(7, 1.5, facts, run=cast("RunTier", run))
        self.asked: list[m.Message] = []

    def ask(self, make: Any) -> tuple[m.Message, list[int]]:
        request = make(1)
        self.asked.append(request)
        if isinstance(request, m.Quote):
            return self.images.quoted(request), []
        return self.images.described(1, 30), []


def _record(layout: Layout, rank: int) -> Record:
    sums = [rank] * (-(-layout.nbytes // CHUNK))
    return Record.of(layout, sums, values.encode({"rank": rank}), run="r", step=7, rank=rank, world=WORLD, created=1.5)


def test_records_are_read_of_a_few_ranks_and_then_of_those_whose_bytes_are_wanted() -> None:
    run = Run()
    agent = Agent(run)
    source = cast("Any", SimpleNamespace(link=agent))
    described = collecting._describe(source, COPY)
    assert described.images.world == WORLD and len(described.images.kinds) == 1
    assert set(described.images.records) == set(run.opened) == {*range(LISTENED), 30}
    whole = gathered(described.images.kinds).wholes["m.w"]
    found = [(read.piece.rank, read.source, read.target) for read in reads(whole, Box((69, 1), (4, 2)))]
    assert found == [
        (34, Box((1, 1), (1, 2)), Box((0, 0), (1, 2))),
        (35, Box((0, 1), (2, 2)), Box((1, 0), (2, 2))),
        (36, Box((0, 1), (1, 2)), Box((3, 0), (1, 2))),
    ]
    run.opened.clear()
    records = collecting._records(source, COPY, described, [3, 30, 34, 35])
    assert run.opened == [34, 35]
    assert {rank: record.rank for rank, record in records.items()} == {rank: rank for rank in (3, 30, 34, 35)}
    assert records[35] == run.stored[35].record
    asked = len(agent.asked)
    collecting._records(source, COPY, described, [3, 30])
    assert len(agent.asked) == asked


def test_a_step_that_is_another_one_than_was_agreed_on_is_not_restored() -> None:
    run = Run()
    source = cast("Any", SimpleNamespace(link=Agent(run)))
    assert collecting._describe(source, msgspec.structs.replace(COPY, created=1.5)).created == 1.5
    with pytest.raises(SnapshotNotFoundError, match="step 7 in disk is another one by now"):
        collecting._describe(source, msgspec.structs.replace(COPY, created=1.25))
    # It takes the place of the one that was described while the records are read.
    run.stored[5] = Stored(run.stored[5].layout, msgspec.structs.replace(run.stored[5].record, checksum=77))
    with pytest.raises(SnapshotNotFoundError, match="step 7 is another one by now"):
        collecting._describe(source, COPY)


def test_a_step_that_was_replaced_meanwhile_is_not_mixed_with_the_one_that_was_described() -> None:
    run = Run()
    agent = Agent(run)
    source = cast("Any", SimpleNamespace(link=agent))
    described = collecting._describe(source, COPY)
    object.__setattr__(agent.images, "created", 2.5)
    with pytest.raises(SnapshotNotFoundError, match="another one by now"):
        collecting._records(source, COPY, described, [34])
    object.__setattr__(agent.images, "created", 1.5)
    other = msgspec.structs.replace(run.stored[34].record, begins=(0,))
    run.stored[34] = Stored(run.stored[34].layout, other)
    with pytest.raises(FormatError, match="rank 34 is of another layout"):
        collecting._records(source, COPY, described, [34])
    with pytest.raises(FormatError, match="no such ranks"):
        collecting._records(source, COPY, described, [WORLD])


@pytest.mark.parametrize(("rows", "registered"), [(4, True), (2, True), (1, False)])
def test_an_image_of_which_most_is_read_is_registered(
    monkeypatch: pytest.MonkeyPatch, rows: int, registered: bool
) -> None:
    """Unregistered memory goes to a device at a fraction of the rate; registering all of it for a sliver is slower."""
    poured: list[bool] = []
    monkeypatch.setattr(collecting, "pour", lambda *_, pin: poured.append(pin) or 0)
    row = 1 << 20
    share = SimpleNamespace(runs=[(k * row, row, object()) for k in range(rows)], loose_chunks=lambda _: [])
    record = SimpleNamespace(nbytes=4 * row, chunk_bytes=row, rank=1)
    source = cast("Any", SimpleNamespace(devices=None))
    assert (
        collecting._write(
            source, cast("Any", None), cast("Any", SimpleNamespace(record=record)), cast("Any", share), ""
        )
        == 0
    )
    assert poured == [registered]


def test_a_rank_that_fails_lets_go_before_it_waits_for_the_others() -> None:
    """They may wait for memory that holds what it was told of and has not taken."""
    told: list[object] = []

    @contextlib.contextmanager
    def together() -> Iterator[None]:
        try:
            yield
        finally:
            told.append("waits")

    source = cast("Any", SimpleNamespace(link=SimpleNamespace(tell=lambda message, timeout: told.append(message))))
    with pytest.raises(CorruptError), together(), collecting._released_where_it_fails(source):
        raise CorruptError("chunk 3 fails its checksum")
    assert told == [m.Release("chunk 3 fails its checksum"), "waits"]
    told.clear()
    with together(), collecting._released_where_it_fails(source):
        pass
    assert told == ["waits"]  # what is read for one is read for all: it stays until all are through


@pytest.mark.parametrize(("tier", "coming"), [("remote", True), ("disk", False)])
def test_what_lies_here_and_there_comes_from_a_store_chunk_by_chunk(
    monkeypatch: pytest.MonkeyPatch, tier: str, coming: bool
) -> None:
    """From elsewhere those chunks are in memory all at once."""
    asked: list[m.Fetch] = []
    monkeypatch.setattr(collecting, "_mapped", lambda *_: "mapped")

    def ask(make: Any) -> tuple[m.Message, list[int]]:
        asked.append(make(1))
        memory = m.Lent(0, 4096)
        if asked[-1].as_file:
            return m.Coming(id=1, memory=memory, place_bytes=4096, layout=b"", record=b""), [9]
        fetched = m.Fetched(id=1, memory=memory, offset=0, passing=True, layout=b"", record=b"", verified=True)
        return fetched, [9]

    share = cast("Any", SimpleNamespace(chunks=lambda _: [2, 3], loose_chunks=lambda _: [3]))
    source, arrivals = SimpleNamespace(link=SimpleNamespace(ask=ask)), SimpleNamespace(image=lambda *_: "coming")
    record = SimpleNamespace(rank=1, chunk_bytes=CHUNK)
    found = collecting._fetch(*cast("Any", (source, None, arrivals, Copy(7, tier), record, share)))
    assert found == ("coming" if coming else "mapped")
    assert [(one.chunks, one.as_file) for one in asked] == [((2, 3), coming)]
