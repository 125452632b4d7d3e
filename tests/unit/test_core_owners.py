"""What some ranks hold together: whose it is called, and who gets it back."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from zerostall.core import layout as layouts
from zerostall.core import own, values
from zerostall.core.kinds import kinds
from zerostall.core.layout import Layout, Shard
from zerostall.core.manifest import Record


@pytest.mark.parametrize(
    ("ranks", "size", "called"),
    [
        ((0, 1), 4, "ranks 0-1 of 4"),
        ((3, 1, 2), 4, "ranks 1-3 of 4"),
        ((0, 8, 16), 24, "ranks 0-16/8 of 24"),
        ((0, 1, 4, 5), 8, "ranks 0-1 4-5 of 8"),
        ((2,), 3, "ranks 2 of 3"),
        ((5, 7), 8, "ranks 5-7/2 of 8"),
    ],
)
def test_ranks_without_a_name_are_called_by_their_numbers(ranks: tuple[int, ...], size: int, called: str) -> None:
    assert own.unnamed_owner(ranks, size) == called
    name = own.owned_name("m.a", called)
    assert own.shared_by(name) == ("m.a", called) and own.bare(name) == "m.a" and not own.is_own(name)


def test_different_ranks_are_never_called_alike() -> None:
    sets = [tuple(rank for rank in range(9) if bits >> rank & 1) for bits in range(1, 512)]
    assert len({own.unnamed_owner(ranks, 9) for ranks in sets}) == len(sets)


@pytest.mark.parametrize("who", ["", "ranks 0-1 of 4", "a]", "a.b", "a\n", " a", "a" * 65, "ä"])
def test_what_names_no_owner(who: str) -> None:
    assert own.owner_problem(who)


def rank_layout(who: str, start: int) -> Layout:
    """Half of an expert, half of what an optimizer keeps of it, and half of what all ranks have."""
    names = [own.owned_name("m.expert", who), own.owned_name("o.expert.exp", who), "m.w"]
    return layouts.build([Shard(name, "int8", (2,), (4,), (start,)) for name in names])


def images(owners: Iterable[str]) -> object:
    stored_step = pytest.importorskip("zerostall.trainer.state.stored_step", exc_type=ImportError)
    made = [rank_layout(who, start) for who in owners for start in (0, 2)]
    assert {one.version for one in made} == {2}
    records = {
        rank: Record.of(
            one, [0], values.encode({"parts": {"m": ("module", {}), "v": ("container", rank)}, "rng": rank}),
            run="r", step=7, rank=rank, world=len(made), created=1.5,
        )
        for rank, one in enumerate(made)
    }  # fmt: skip
    return stored_step.Images(kinds(enumerate(made)), len(made), records)


def test_a_rank_gets_what_is_its_owners_and_that_owners_values_in_any_world() -> None:
    from zerostall.trainer.state import stored_step

    stored = images(["expert 0", "expert 1"])
    for rank, size, number in ((0, 4, 0), (3, 4, 1), (0, 1, 1), (1, 2, 1), (5, 6, 0)):
        who = f"expert {number}"
        step = stored_step.read(stored, rank, size, stored_step.Owners({"m.expert": who}, frozenset([who])))
        assert sorted(step.state.names()) == ["m.expert", "m.w", "o.expert.exp"]  # the optimizer has no state yet
        assert [piece.rank for piece in step.wholes["m.expert"].pieces] == [2 * number, 2 * number + 1]
        assert not step.state.refused
        assert step.strangers == [f"m.expert[=owner expert {1 - number}]"]
        said = step.state.parts["v"].tree
        assert said == (rank if size == 4 else 2 * number + (rank % 4 == 2 * number + 1)), (rank, size)
        assert step.state.rng == (rank % 4 if rank < 4 else None)


@pytest.mark.parametrize(
    ("owners", "here", "why"),
    [
        (["ranks 0-1 of 4", "ranks 2-3 of 4"], "ranks 0-1 of 8", "here it is 'ranks 0-1 of 8''s"),
        (["expert 0", "expert 1"], "expert 2", "that of 'expert 0', 'expert 1' (RankLocal)"),
        (["expert 0", "expert 1"], "", "here it is this rank's own"),
        (["expert 0", "expert 1"], None, "here it is nobody's"),
    ],
)
def test_where_whose_it_is_is_not_clear_it_is_refused_by_name(owners: list[str], here: str | None, why: str) -> None:
    from zerostall.trainer.state import stored_step

    mine = stored_step.Owners({} if here is None else {"m.expert": here}, frozenset([here] if here else []))
    step = stored_step.read(images(owners), 1, 4, mine)
    assert step.state.names() == ["m.w"]
    assert sorted(step.state.refused) == ["m.expert", "o.expert.exp"] and why in step.state.refused["m.expert"]
    assert len(step.strangers) == 2


def test_what_an_optimizer_does_not_have_yet_is_its_parameters_owners_and_no_other_of_this_ranks() -> None:
    """Two experts on a rank, of which one was never trained: it is not given what is kept of the other."""
    torch = pytest.importorskip("torch")
    from zerostall import RankLocal
    from zerostall.trainer.state.state import State
    from zerostall.trainer.state.stored_step import Owners

    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    state = State(
        {"a": RankLocal(first, owner="expert 0"), "b": RankLocal(second, owner="expert 1"), "o": optimizer}, rng=False
    )
    mine = Owners.among(state._walk(state._roots))
    assert mine.choose("o.a.weight.exp_avg", {"expert 1", "expert 5"}) is None
    assert mine.choose("o.a.weight.exp_avg", {"expert 0", "expert 1"}) == "expert 0"
    assert mine.choose("o.b.weight.deep.exp_avg", {"expert 0", "expert 1"}) == "expert 1"
    assert mine.choose("o.another.exp_avg", {"expert 1", "expert 5"}) == "expert 1"  # it has another name here

    marked = State({"a": first, "o": RankLocal(torch.optim.AdamW(first.parameters()), "weight*", owner="x")}, rng=False)
    mine = Owners.among(marked._walk(marked._roots))
    assert mine.choose("o.weight.exp_avg", {"x", "y"}) == "x" and mine.choose("o.weight.exp_avg", {"y"}) is None
    assert mine.choose("o.bias.exp_avg", {"x"}) is None


def test_what_rows_and_columns_of_ranks_hold_is_told_apart_by_who_has_it() -> None:
    from zerostall.trainer.state import stored_step

    of = {"a": "ranks 0-1 of 4", "b": "ranks 0-2/2 of 4"}
    mine = stored_step.Owners(of, frozenset(of.values()))
    assert mine.choose("a", {"ranks 0-1 of 4", "ranks 2-3 of 4"}) == "ranks 0-1 of 4"
    assert mine.choose("b", {"ranks 0-2/2 of 4", "ranks 1-3/2 of 4"}) == "ranks 0-2/2 of 4"
    assert mine.choose("o.b.exp", {"ranks 0-2/2 of 4", "ranks 1-3/2 of 4"}) == "ranks 0-2/2 of 4"
    assert mine.choose("o.c", {"ranks 0-1 of 4", "ranks 0-2/2 of 4"}) is None
