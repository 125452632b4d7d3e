"""What is kept of another node's rank: the newest whole image until a newer one is there, and no abandoned one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerostall.core.candidates import Past
from zerostall.core.replicas import Stored, makes_way, next_stored, next_wanted, outdated, outlived, unneeded

DAY = 24 * 3600.0
images = st.frozensets(st.builds(Past, st.integers(0, 6), st.sampled_from([1.0, 2.0])), max_size=5)


@given(images, images, images)
def test_what_goes_and_what_stays(here: frozenset[Past], home: frozenset[Past], clean: frozenset[Past]) -> None:
    gone = unneeded(here, home, clean)
    stays = here - gone
    assert not gone & home
    if not home:
        assert not gone
        return
    newest = max(past.step for past in home)
    assert all(past.step <= newest for past in stays)  # nothing that the run has gone back from
    usable = {
        past
        for past in here
        if past.step <= newest and (past in home or past in clean or past.step not in {h.step for h in home})
    }
    if usable:
        assert max(past.step for past in usable) in {past.step for past in stays}
    if usable & clean:
        assert max(past.step for past in usable & clean) in {past.step for past in stays & clean}
    assert not unneeded(stays, home, clean)


@given(images, images, images, images)
def test_a_clean_image_stays_until_a_clean_one_takes_its_place(
    here: frozenset[Past], home: frozenset[Past], clean: frozenset[Past], void: frozenset[Past]
) -> None:
    """Also where its number was saved anew, and whatever becomes of that make."""
    better = here & home & clean
    for past in (here & clean) - home:
        stays = past not in unneeded(here, home, clean, void=void)
        if any(one.step >= past.step for one in better):
            assert not stays
        elif any(one.step == past.step and one.created != past.created for one in home):
            assert stays
        elif any(one.step == past.step and one > past for one in void):
            assert stays or any(one.step < past.step and one.created > past.created for one in home)


def test_what_was_saved_anew_is_not_fetched_before_it_is_clean_and_not_lost_when_it_never_is() -> None:
    before, anew, older = Past(5, 1.0), Past(5, 2.0), Past(4, 0.5)
    here, home = {before}, {older, anew}
    assert not unneeded(here, home, {before})
    assert next_wanted(here, home, clean={before}) is None and not makes_way(anew, before, {before})
    assert next_wanted(here, home, (anew, older), {before}) == older
    assert next_wanted(here, home, clean={before, anew}) == anew
    assert unneeded({before, anew}, home, {before, anew}) == {before}
    # It was dirty, and its home has only an older one left.
    assert outlived({before, older}, {anew}) == ({before}, {anew})
    assert outlived({anew}, {before}) == (set(), set())
    assert not unneeded(here, {older}, {before}, void={anew})
    assert unneeded(here, {older}, {before}) == {before}
    assert unneeded(here, {Past(4, 3.0)}, {before}, void={anew}) == {before}  # the run went back before it since


@given(images, images)
def test_fetching_until_nothing_is_wanted_ends_with_the_newest(here: frozenset[Past], home: frozenset[Past]) -> None:
    wanted = next_wanted(here, home)
    if wanted is None:
        assert not home or max(home) in here
    else:
        assert wanted == max(home)
        assert next_wanted(here | {wanted}, home) is None


@given(images, images, images, st.floats(0, 100), st.floats(0, 100))
def test_what_goes_to_a_partners_disk(
    here: frozenset[Past], settled: frozenset[Past], stored: frozenset[Past], rested: float, every: float
) -> None:
    past, reason = next_stored(here, settled, stored, rested, every)
    assert reason
    newest = max(here & settled, default=None)
    if past is not None:
        assert past == newest and past not in stored and rested >= every
    else:
        assert newest is None or newest in stored or rested < every


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 5)), st.integers(0, 40), max_size=16
    )
)
def test_however_old_the_newest_of_each_run_stays(written: dict[tuple[str, int, int], int]) -> None:
    stored = {Stored(run, rank, step, day * DAY) for (run, rank, step), day in written.items()}
    going, staying = outdated(stored)
    last = max((one.written for one in stored), default=0.0)
    old = {one for one in stored if last - one.written > 7 * DAY}
    assert going | staying == old and not going & staying
    left = stored - going
    for run in "ab":
        before, after = ({(o.rank, o.step) for o in some if o.run == run} for some in (stored, left))
        ranks = {rank for rank, _ in before}
        assert {max(step for other, step in after if other == rank) for rank in ranks} == {
            max(step for other, step in before if other == rank) for rank in ranks
        }
        whole = [step for step in range(6) if all((rank, step) in before for rank in ranks)]
        assert not ranks or not whole or all((rank, whole[-1]) in after for rank in ranks)
    assert outdated(left)[0] == frozenset()


def test_a_node_that_rested_for_a_year_loses_nothing() -> None:
    assert outdated([Stored("a", 0, step, 0.0) for step in (1, 2)]) == (frozenset(), frozenset())
