"""An empty folder: whose run goes on there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerostall.core import layout as layouts
from zerostall.core.heirs import Claim, Holding, elder, heir
from zerostall.core.manifest import RunFacts

claims = st.lists(
    st.builds(
        Claim,
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["", "gpt"]),
        st.sampled_from(["/x", "/y"]),
        st.sampled_from([(), ("n1",), ("n1", "n2")]),
        st.booleans(),
        st.floats(0, 9),
    ).filter(lambda claim: claim.homes or not claim.trains),
    max_size=4,
    unique_by=lambda claim: claim.run,
)


@given(claims, st.sampled_from(["/x", "/y"]), st.sampled_from(["", "gpt"]), st.floats(0, 9))
def test_no_run_is_taken_from_who_has_it(known: list[Claim], where: str, name: str, asked: float) -> None:
    found = heir(known, where, name, asked)
    assert found.reason
    if found.run:
        (claim,) = [claim for claim in known if claim.run == found.run]
        assert not claim.trains and claim.name == name
        assert name or (claim.where == where and not claim.homes)
        assert not found.wait
    if found.wait:
        assert any(claim.homes and claim.silent >= asked for claim in known)


def lost(**changed: object) -> Claim:
    return Claim(**{"run": "a", "name": "", "where": "/x", "homes": (), "trains": False, "silent": 0.0, **changed})  # pyright: ignore


def test_what_is_said() -> None:
    assert heir([lost()], "/x", "", 0.0).run == "a"
    assert "the node that trained it is gone" in heir([lost()], "/x", "", 0.0).reason
    assert heir([lost()], "/y", "", 0.0).reason == "no run with the folder /y is known that has a clean step"
    there = lost(homes=("n1",))
    assert heir([there], "/x", "", 0.0).wait
    ended = heir([there], "/x", "", 1.0)
    assert (
        not ended.run and "was trained on node n1, which is there; to go on with it elsewhere give it" in ended.reason
    )
    trains = lost(homes=("n1",), trains=True, silent=2.0)
    assert heir([trains], "/x", "", 1.0).wait and not heir([trains], "/x", "", 3.0).wait
    named = lost(name="gpt", homes=("n1",))
    assert heir([named], "/elsewhere", "gpt", 0.0).run == "a" and not heir([named], "/x", "", 0.0).run
    assert "2 runs named 'gpt'" in heir([named, lost(run="b", name="gpt")], "/x", "gpt", 0.0).reason


def holding(run: str, newest: int = 5, name: str = "") -> Holding:
    return Holding(RunFacts(run=run, name=name, fingerprint=layouts.fingerprint([])), newest)


holdings = st.builds(holding, st.sampled_from(["a", "b"]), st.integers(-1, 9))


@given(st.lists(st.none() | holdings, min_size=1, max_size=5))
def test_an_empty_folder_of_rank_0_goes_on_with_the_one_run_that_the_others_hold(held: list[Holding | None]) -> None:
    found = elder(held, "")
    runs = {one.facts.run for one in held if one is not None}
    assert found.clash == (held[0] is None and len(runs) > 1)
    assert (found.holding is None) == (found.clash or not runs)
    if found.holding is not None:
        run = found.holding.facts.run
        assert run == held[0].facts.run if held[0] is not None else runs == {run}
        assert found.holding.newest == max(one.newest for one in held if one is not None and one.facts.run == run)


def test_what_is_said_of_the_others_folders() -> None:
    found = elder([None, holding("a"), holding("b"), holding("a")], "")
    assert found.clash and "run a on rank 1 and 1 more; run b on rank 2" in found.reason
    assert elder([None, holding("a", 7)], "").reason == "run a is in the folder of rank 1"
    assert elder([None, holding("a", name="gpt")], "").holding == holding("a", name="gpt")
    assert elder([None, holding("a", name="gpt")], "gpt").holding == holding("a", name="gpt")
    other = elder([None, holding("a", name="gpt")], "bert")
    assert other.clash and "of run 'gpt', id a, on rank 1; this trainer is run 'bert'" in other.reason
    assert elder([None, holding("a")], "bert").clash
    assert elder([None, holding("a", -1)], "bert").holding == holding("a", -1)
    assert not elder([holding("a"), holding("b")], "").clash, "the agents say that, once they have looked themselves"
