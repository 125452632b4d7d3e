"""16 384 ranks on paper: what is decided grows as the number of ranks does, not with its square; and files are small.

Work is counted in calls of Python functions, so that no machine is too busy for these tests.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from zerostall.agent.step_images import LISTENED, StepImages
from zerostall.core import checksum, partition, pieces, reshard, values
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.boxes import Box
from zerostall.core.cuts import Cut, held
from zerostall.core.kinds import Kind
from zerostall.core.layout import CHUNK, Layout, Shard
from zerostall.core.manifest import Manifest, RankFacts, Record
from zerostall.core.own import own_name
from zerostall.core.partition import Offer, Row, Stand
from zerostall.core.roll import Roll, Save
from zerostall.core.shards import tile_name
from zerostall.tiers.contract import Stored
from zerostall.wire import nodes

MANY = 16_384


def calls(work: Callable[[], object]) -> int:
    """How often functions are called, Python's own and built-in ones, until the work is done."""
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def growth(work: Callable[[int], Callable[[], object]], few: int, many: int) -> float:
    """How much more is to do for many than for few, by how many more there are: 1 is linear, 0 does not grow."""
    small, large = calls(work(few)), calls(work(many))
    return (large - small) / small / (many / few - 1)


def planned(world: int) -> Callable[[], object]:
    """What one rank decides when ranks share a model: an eighth of them has the same shard."""
    shards = world // 8
    rows = tuple(Row(f"m.w{n:03}", "float32", (shards * 4, 1024), 0) for n in range(40))
    offer = Offer(((Cut(0, shards),),), rows)
    stands = [Stand(offer.digest, ((rank % shards,),)) for rank in range(world)]
    return lambda: partition.decide(world // 3, stands, {offer.digest: offer})


def called(world: int) -> Callable[[], object]:
    """One save: every rank says that it has sealed it, and it is clean."""

    def work() -> None:
        roll = Roll(world)
        clean = [roll.sealed(rank, Save(1, 1), 0.0).clean for rank in range(world)]
        assert clean[-1] == (Save(1, 1),) and not any(clean[:-1])

    return work


def record(rank: int, world: int, nbytes: int) -> Record:
    sums = [4_000_000_000 + number % 1000 for number in range(-(-nbytes // CHUNK))]
    return Record(
        run="a" * 32,
        step=123_456,
        rank=rank,
        world=world,
        layout=hashlib.sha256(str(rank).encode()).hexdigest(),
        nbytes=nbytes,
        chunk_bytes=CHUNK,
        checksums=sums,
        checksum=checksum.whole(sums, nbytes, CHUNK),
        values=values.encode({"step": 123_456}),
        created=1_764_000_000.123456,
    )


def manifest(world: int) -> Manifest:
    one = record(0, world, 1 << 33)
    facts = manifests.facts(one, manifests.encode_record(one))
    ranks = tuple(msgspec.structs.replace(facts, rank=rank) for rank in range(world))
    return Manifest(run="a" * 32, step=123_456, world=world, ranks=ranks, created=1_764_000_000.123456)


def committed(world: int) -> Callable[[], object]:
    known = manifest(world)
    return lambda: manifests.decode_manifest(manifests.encode_manifest(known))


def shard(name: str, whole: tuple[int, ...], start: tuple[int, ...], shape: tuple[int, ...]) -> Shard:
    return Shard(name=name, dtype="float32", global_shape=whole, start=start, shape=shape)


def dealt(world: int) -> Iterator[Layout]:
    """A tensor cut over all ranks along its rows."""
    for rank in range(world):
        yield layouts.build([shard("m.w", (2 * world, 8), (2 * rank, 0), (2, 8))])


def gathered(world: int) -> Callable[[], object]:
    found = list(dealt(world))
    return lambda: pieces.gather(found)


def read(world: int) -> Callable[[], object]:
    """What one rank of as many, and one of half as many, have to read."""
    whole = pieces.gather(list(dealt(world))).wholes["m.w"]
    at = world // 2
    wanted = [Box((at, 0), (2, 8)), Box((at, 0), (4, 8)), Box((at + 1, 3), (3, 2))]
    assert [len(reshard.reads(whole, box)) for box in wanted] == [1, 2, 2]
    return lambda: [reshard.reads(whole, box) for box in wanted]


@pytest.mark.parametrize("work", [planned, called, committed, gathered], ids=lambda work: work.__name__)
def test_what_is_decided_grows_as_the_number_of_ranks(work: Callable[[int], Callable[[], object]]) -> None:
    few = 512
    assert growth(work, few, 8 * few) < 1.3


def test_what_is_decided_grows_as_the_number_of_tensors() -> None:
    def work(tensors: int) -> Callable[[], object]:
        rows = tuple(Row(f"m.w{n:05}", "float32", (64, 1024), 0) for n in range(tensors))
        offer = Offer(((Cut(0, 64),),), rows)
        stands = [Stand(offer.digest, ((rank % 64,),)) for rank in range(512)]
        return lambda: partition.decide(100, stands, {offer.digest: offer})

    assert growth(work, 500, 4_000) < 1.3


def test_what_a_rank_reads_does_not_grow_with_the_number_of_ranks() -> None:
    assert growth(read, 512, 4096) < 0.05  # a search among more of them


def test_files_and_messages_of_16384_ranks_are_small() -> None:
    """What docs/ranks.md says of sizes."""
    one = manifests.encode_record(record(12_345, MANY, 1 << 33))  # an image of 8 GiB
    assert len(one) < 6_500
    facts = manifest(2).ranks[1]
    assert len(msgspec.msgpack.encode(nodes.Sealed(Save(3, 123_456), facts, 1_764_000_000.1))) < 260
    assert len(manifests.encode_manifest(manifest(MANY))) < 3_600_000


ROWS = (1, 2, 4, 7)
NAMES = [f"model.layers.{n // 27}.w{n % 27:02}" for n in range(2_700)]


def cut_alike(rank: int, world: int) -> Layout:
    """2 700 tensors of four sizes; of each a rank has as many rows as the others, and stores them."""
    boxes = [(name, ROWS[n % 4]) for n, name in enumerate(NAMES)]
    return layouts.build([shard(name, (rows * world, 1024), (rows * rank, 0), (rows, 1024)) for name, rows in boxes])


def test_a_restore_of_16384_ranks_reads_one_layout_and_the_records_that_it_needs() -> None:
    first, mine = cut_alike(0, MANY), cut_alike(5_001, MANY)
    assert mine.digest == first.digest and len(mine.begins) == len(ROWS)
    assert len(layouts.encode(mine)) < 400_000

    # The begins of all ranks are in the manifest.
    whole = manifest(MANY)
    ranks = tuple(
        msgspec.structs.replace(facts, begins=tuple(begin // 5_001 * rank for begin in mine.begins))
        for rank, facts in enumerate(whole.ranks)
    )
    assert len(manifests.encode_manifest(msgspec.structs.replace(whole, ranks=ranks))) < 5_000_000

    # What the agent tells a trainer of all ranks: the layout once, begins, and the small values of a few.
    run = Run(first, ranks)
    told = StepImages(whole.step, whole.created, ranks, run=run).described(1, 5_001)
    assert len(told.layouts) == 1 and run.opened == {*range(LISTENED), 5_001}
    assert len(msgspec.msgpack.encode(told)) < 1_500_000

    # In a world of another size a rank reads of two or three others, whatever their number.
    step = pieces.gathered([Kind(first, range(MANY), told.begins)])
    found = {
        read.piece.rank
        for whole in step.wholes.values()
        for box in [held(whole.shape, [Cut(0, 12_000)], [77]).boxes()[0][0]]
        for read in reshard.reads(whole, box)
    }
    assert len(found) < 10


def with_experts(rank: int, world: int) -> Layout:
    """A share of 200 tensors, and 64 experts of a rank's own."""
    boxes = [shard(f"model.w{n:03}", (4 * world, 64), (4 * rank, 0), (4, 64)) for n in range(200)]
    own = [Shard.whole(own_name(f"model.experts.e{n:02}"), "float32", (256, 64)) for n in range(64)]
    return layouts.build(boxes + own)


def with_experts_read(world: int) -> Callable[[], object]:
    """What a rank of as many finds of a step of theirs, its own experts among it."""
    begins = [(4 * rank,) for rank in range(world)]
    kind = Kind(with_experts(0, world), range(world), begins)
    return lambda: pieces.gathered([kind], (world // 3,))


def test_ranks_with_experts_of_their_own_have_one_layout() -> None:
    first, mine = with_experts(0, MANY), with_experts(MANY - 1, MANY)
    assert first.digest == mine.digest
    assert len(layouts.encode(mine)) < 35_000  # and not as much for each of 16 384
    assert growth(with_experts_read, 512, 4096) < 0.05
    experts = with_experts_read(MANY)()
    assert isinstance(experts, pieces.Pieces)
    assert len(experts.wholes) == 264
    own = experts.wholes[f"model.experts.e07[=rank {MANY // 3}]"]
    assert [piece.rank for piece in own.pieces] == [MANY // 3]


class Run:
    """Files of a step on paper, and which records were read."""

    def __init__(self, layout: Layout, ranks: Sequence[RankFacts]) -> None:
        self.opened: set[int] = set()
        self._layout = layout
        self._ranks = ranks

    def layout(self, facts: RankFacts) -> Layout:
        return layouts.moved(self._layout, facts.begins)

    def open(self, step: int, rank: int) -> Stored:
        self.opened.add(rank)
        facts = self._ranks[rank]
        said = msgspec.structs.replace(record(rank, MANY, 1 << 33), checksum=facts.checksum)
        return Stored(self.layout(facts), said)


def meeting(world: int) -> Callable[[], object]:
    """Of every tensor, what a rank has to read where ranks that are cut alike have stored it."""
    first = layouts.build([shard(f"m.w{n:03}", (2 * world, 8), (0, 0), (2, 8)) for n in range(200)])
    kind = Kind(first, range(world), [(2 * rank,) for rank in range(world)])
    wanted = Box((world + 1, 0), (4, 8))
    wholes = pieces.gathered([kind]).wholes.values()
    assert [len(reshard.reads(whole, wanted)) for whole in wholes] == [3] * 200  # and the ranks are in order now
    return lambda: [reshard.reads(whole, wanted) for whole in pieces.gathered([kind]).wholes.values()]


def test_a_rank_meets_what_ranks_that_are_cut_alike_have_stored_in_work_that_does_not_grow_with_their_number() -> None:
    assert growth(meeting, 512, 8192) < 0.01


def test_replicas_of_shards_have_as_many_layouts_as_there_are_replicas() -> None:
    """HSDP: what the replicas of a shard have alike they store in turns, each the same parts of its shard."""
    replicas, shards = 4, 64
    rows = tuple(Row(f"m.w{n:03}", "float32", (shards * 4, 40_961), 0) for n in range(40))
    offer = Offer(((Cut(0, shards),),), rows)
    stands = [Stand(offer.digest, ((rank % shards,),)) for rank in range(replicas * shards)]
    digests: dict[int, set[str]] = {}
    for rank in (0, 1, 7, 63, 64, 65, 127, 128, 191, 192, 255):
        parts = partition.decide(rank, stands, {offer.digest: offer}).parts
        boxes = [
            Shard(tile_name(part.row.name, number), part.row.dtype, box.shape, part.row.shape, box.start)
            for part in parts
            for number, (box, _) in enumerate(part.boxes)
        ]
        digests.setdefault(rank // shards, set()).add(layouts.build(boxes).digest)
    assert [len(found) for found in digests.values()] == [1] * replicas
