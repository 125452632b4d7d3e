"""What is each rank's own, in the names that layouts give it now and in those that they gave before version 3."""

from __future__ import annotations

import pytest

from zerostall.core import layout as layouts
from zerostall.core import own, pieces, values
from zerostall.core.kinds import kinds
from zerostall.core.layout import Layout, Shard, View
from zerostall.core.manifest import Record
from zerostall.errors import FormatError, StateError

WORLD = 3
DISTINCT = "[=distinct]"


def rank_layout(rank: int, *, version: int) -> Layout:
    """Two rows of a tensor, one of its own under two names, and an expanded one; of rank 2 the own one is larger."""
    mark = "[=own]" if version == 3 else f"[=rank {rank}]"
    expert = f"m.expert{mark}"
    size = 5 if rank == 2 else 4
    shards = [
        Shard("m.w", "int8", (2, 3), (2 * WORLD, 3), (2 * rank, 0)),
        Shard.whole(expert, "float32", (size,)),
        Shard.whole(f"m.spread{mark}{DISTINCT}", "int16", (1,)),
    ]
    views = [
        View(f"m.tied{mark}", expert, "float32", (size,), (1,), 0),
        View(f"m.spread{mark}", f"m.spread{mark}{DISTINCT}", "int16", (7,), (0,), 0),
    ]
    return layouts.build(shards, views)


@pytest.mark.parametrize("version", [2, 3])
def test_a_step_holds_each_ranks_own_under_that_ranks_number_in_every_version(version: int) -> None:
    made = [rank_layout(rank, version=version) for rank in range(WORLD)]
    assert {one.version for one in made} == {version}
    assert len({one.digest for one in made}) == (2 if version == 3 else WORLD)
    assert [layouts.decode(layouts.encode(one), one.begins) for one in made] == made
    step = pieces.gather(made)
    assert set(step.wholes) == {
        "m.w",
        *(
            f"m.{name}"
            for rank in range(WORLD)
            for name in (f"expert[=rank {rank}]", f"spread[=rank {rank}]{DISTINCT}")
        ),
    }
    for rank, layout in enumerate(made):
        expert = step.wholes[f"m.expert[=rank {rank}]"]
        (entry,) = (entry for entry in layout.entries if entry.name.startswith("m.expert"))
        assert [(piece.rank, piece.offset) for piece in expert.pieces] == [(rank, entry.offset)]
        assert expert.shape == entry.shape and not expert.problem()
        assert step.views[f"m.tied[=rank {rank}]"].base == expert.name
        assert step.views[f"m.spread[=rank {rank}]"].base == f"m.spread[=rank {rank}]{DISTINCT}"
    step.insist()


def test_what_is_others_own_is_left_out_where_nobody_asks_for_it() -> None:
    found = kinds(enumerate(rank_layout(rank, version=3) for rank in range(WORLD)))
    step = pieces.gathered(found, (1,))
    assert {name for name in (*step.wholes, *step.views) if "rank" in name} == {
        "m.expert[=rank 1]", f"m.spread[=rank 1]{DISTINCT}", "m.tied[=rank 1]", "m.spread[=rank 1]",
    }  # fmt: skip
    assert not any("rank" in name for name in pieces.gathered(found, ()).wholes)


@pytest.mark.parametrize("version", [2, 3])
def test_a_rank_gets_its_own_back_and_a_world_of_another_size_is_refused_by_name(version: int) -> None:
    stored_step = pytest.importorskip("zerostall.trainer.state.stored_step", exc_type=ImportError)
    made = [rank_layout(rank, version=version) for rank in range(WORLD)]
    tree = values.encode({"parts": {"m": ("module", {})}, "rng": None})
    records = {
        rank: Record.of(one, [0], tree, run="r", step=7, rank=rank, world=WORLD, created=1.5)
        for rank, one in enumerate(made)
    }
    images = stored_step.Images(kinds(enumerate(made)), WORLD, records)
    for rank in range(WORLD):
        step = stored_step.read(images, rank, WORLD)
        assert sorted(step.state.names()) == ["m.expert", "m.spread", "m.tied", "m.w"]
        assert step.state.shape("m.tied") == (5 if rank == 2 else 4,) and step.state.shape("m.spread") == (7,)
        assert [piece.rank for piece in step.wholes["m.expert"].pieces] == [rank]
        assert not step.state.refused
    other = stored_step.read(images, 0, WORLD + 1).state
    assert other.names() == ["m.w"] and sorted(other.refused) == ["m.expert", "m.spread", "m.tied"]


def test_a_part_cannot_be_a_ranks_own_nor_a_view_of_what_is_not() -> None:
    whole, part = Shard.whole("m.a[=own]", "int8", (4,)), Shard("m.a[=own]", "int8", (2,), (4,), (0,))
    assert layouts.build([whole]).version == 3
    with pytest.raises(StateError, match="a rank's own, and yet a part"):
        layouts.build([part])
    for name, base in (("m.b", whole), ("m.b[=own]", Shard.whole("m.a", "int8", (4,)))):
        with pytest.raises(StateError, match="one of them is a rank's own"):
            layouts.build([base], [View(name, base.name, "int8", (4,), (1,), 0)])


def test_names_for_layouts_and_for_steps() -> None:
    name = own.own_name("m.a")
    assert (name, own.bare(name), own.named_for(name, 12)) == ("m.a[=own]", "m.a", "m.a[=rank 12]")
    assert own.named_for(name + DISTINCT, 3) == f"m.a[=rank 3]{DISTINCT}"
    assert own.named_for("m.a", 3) == "m.a" and own.bare("m.a") == "m.a"
    assert own.owner(own.named_for(name, 12)) == ("m.a", 12) and own.owner("m.a") == ("m.a", None)


@pytest.mark.parametrize("first", [0, 1])
def test_what_would_be_one_ranks_own_twice_is_refused(first: int) -> None:
    """Files made to do harm: one layout says it in the words of version 1, another in those of version 3."""
    mine = layouts.build([Shard.whole("m.w[=own]", "int8", (2,))])
    theirs = layouts.build([Shard.whole(f"m.w[=rank {first}]", "int8", (first + 2,))])
    ranks = [mine, theirs] if first == 0 else [theirs, mine]
    with pytest.raises(FormatError, match=r"m\.w\[=rank \d\] is stored twice"):
        pieces.gather(ranks)
