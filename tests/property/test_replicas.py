"""What is kept of another node's rank: the newest whole image until a newer one is there, and no abandoned one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerostall.core.candidates import Past
from zerostall.core.replicas import next_stored, next_wanted, unneeded

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
        past for past in here if past.step <= newest and (past in home or past.step not in {h.step for h in home})
    }
    if usable:
        assert max(past.step for past in usable) in {past.step for past in stays}
    if usable & clean:
        assert max(past.step for past in usable & clean) in {past.step for past in stays & clean}
    assert not unneeded(stays, home, clean)


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
