"""What may go wrong as a step is put into an object store: nothing is lost, no half step is seen."""

from __future__ import annotations

import threading
from urllib.parse import unquote

import pytest

from hand import wait_until
from images import HandMade, manifest_of
from stores.proxy import is_complete, is_manifest, is_part
from stores.runs import SMALL, THREE_PARTS, fetched, stored
from stores.seaweed import on_all, on_both, on_resumable
from zerostall.errors import CapabilityError, CorruptError, FormatError, StepExistsError, StorageError

# ------------------------------------------------------------------------------------------------------- uploads


@on_resumable
def test_an_upload_that_broke_off_goes_on_where_it_was(open_tier, proxy, s3_server, bucket, large) -> None:
    """Also in another process: the store knows which parts it has."""
    broken = proxy.rule("403 AccessDenied", lambda r: r.part == 3, times=100)
    with pytest.raises(StorageError, match="AccessDenied"):
        open_tier().put(large.image)
    assert len(s3_server.unfinished(bucket)) == 1
    broken.times = 0
    before = proxy.count(is_part)
    tier = open_tier()
    stored(tier, large)
    assert proxy.count(is_part) - before == 1
    assert s3_server.unfinished(bucket) == []
    assert fetched(tier, 7, THREE_PARTS) == large.bytes


def test_what_is_there_already_is_not_sent_again(open_tier, proxy, large) -> None:
    """A step whose commit failed, or that another rank's failure held up, goes on without its bytes."""
    open_tier().put(large.image)
    before = proxy.count(is_part)
    stored(open_tier(), large)
    assert proxy.count(is_part) == before


@pytest.mark.parametrize(
    "do", ["drop", "lose", "stall", "spoil", "503 SlowDown", "500 InternalError", "400 RequestTimeout"]
)
def test_a_part_that_fails_is_sent_again(open_tier, proxy, s3_server, bucket, large, do: str) -> None:
    proxy.rule(do, is_part)
    tier = open_tier(timeout=5.0 if do == "stall" else 20.0)
    stored(tier, large)
    assert fetched(tier, 7, THREE_PARTS) == large.bytes
    assert s3_server.unfinished(bucket) == []


@pytest.mark.parametrize("do", ["drop", "lose", "503 SlowDown"])
def test_the_end_of_an_upload_is_said_again(open_tier, proxy, s3_server, bucket, large, do: str) -> None:
    proxy.rule(do, is_complete)
    tier = open_tier()
    stored(tier, large)
    assert fetched(tier, 7, THREE_PARTS) == large.bytes
    assert s3_server.unfinished(bucket) == []


@pytest.mark.parametrize("do", ["drop", "lose", "503 SlowDown"])
@pytest.mark.parametrize("replace", [False, True])
def test_a_commit_is_said_again(open_tier, proxy, do: str, replace: bool) -> None:
    """Where only the answer was lost, the second try is refused, for the first had got there."""
    tier = open_tier()
    if replace:
        stored(tier, HandMade(SMALL, 5, seed=1))
    proxy.rule(do, is_manifest)
    made = HandMade(SMALL, 5, seed=2)
    stored(tier, made, replace=replace)
    assert fetched(tier, 5, SMALL) == made.bytes


def test_a_store_that_is_busy_is_left_alone_for_as_long_as_it_asks(open_tier, proxy, large) -> None:
    rule = proxy.rule("503 SlowDown", is_part, retry_after="1")
    stored(open_tier(), large)
    assert rule.seen >= 4


@on_all
def test_no_half_step_is_seen_and_nothing_else_is_lost(open_tier, proxy, large) -> None:
    before = HandMade(SMALL, 5)
    tier = open_tier()
    stored(tier, before)
    for which in (is_part, is_complete, lambda r: r.method == "PUT" and ".json" in unquote(r.target), is_manifest):
        rule = proxy.rule("403 AccessDenied", which, times=1000)
        with pytest.raises((StorageError, FormatError)):
            stored(open_tier(), large)
        rule.times = 0
        assert open_tier().steps() == [5]
        assert fetched(tier, 5, SMALL) == before.bytes
    stored(tier, large)
    assert open_tier().steps() == [5, 7]


def test_bytes_that_have_rotted_in_memory_are_not_sent(open_tier, s3_server, bucket) -> None:
    made = HandMade(SMALL, 5)
    made.memory.view(60_000, 1)[0] ^= 1
    with pytest.raises(CorruptError, match="chunk 0"):
        open_tier().put(made.image)
    assert not [key for key in s3_server.keys(bucket) if "rank" in key]


def test_leftovers_are_cleared_when_they_are_old(open_tier, proxy, s3_server, bucket, large) -> None:
    tier = open_tier()
    stored(tier, HandMade(SMALL, 5))
    forgotten = HandMade(SMALL, 6)
    tier.put(forgotten.image)
    rule = proxy.rule("403 AccessDenied", is_complete, times=1)
    with pytest.raises(StorageError):
        tier.put(large.image)
    assert rule.seen
    kept = [key for key in s3_server.keys(bucket) if "step-000000000006" not in key]
    assert [name for name in tier.clear_leftovers() if "000006" in name] == []  # young: it may belong to a live writer
    assert tier.clear_leftovers(older=0.0)
    assert s3_server.keys(bucket) == kept
    assert s3_server.unfinished(bucket) == []


@on_all
def test_what_is_abandoned_leaves_nothing(open_tier, proxy, s3_server, bucket, large) -> None:
    tier = open_tier()
    proxy.rule("403 AccessDenied", is_complete, times=1)
    with pytest.raises(StorageError):
        tier.put(large.image)
    tier.abandon(7)
    assert s3_server.scheme == "az" or s3_server.unfinished(bucket) == []  # Azure forgets blocks after a week
    stored(tier, large)
    tier.abandon(7)
    assert fetched(tier, 7, THREE_PARTS) == large.bytes  # what is committed is not abandoned


# ------------------------------------------------------------------------------------------------- two writers


@on_all
def test_of_two_writers_one_wins(open_tier, proxy) -> None:
    """Both have put their images and write their manifests at the same moment."""
    one, other = HandMade(SMALL, 5, seed=1), HandMade(SMALL, 5, seed=2)
    tiers = [open_tier(), open_tier()]
    for tier, made in zip(tiers, (one, other), strict=True):
        tier.put(made.image)
    gate = proxy.rule("hold", is_manifest, times=2)
    outcomes: list[Exception | None] = [None, None]

    def commit(index: int) -> None:
        try:
            tiers[index].commit(manifest_of((one, other)[index].record))
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=commit, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: proxy.count(is_manifest) >= 2)
    gate.released.set()
    for thread in threads:
        thread.join(60)
    losers = [index for index, error in enumerate(outcomes) if error is not None]
    assert len(losers) == 1 and isinstance(outcomes[losers[0]], StepExistsError)
    winner = (one, other)[1 - losers[0]]
    assert fetched(open_tier(), 5, SMALL) == winner.bytes
    tiers[losers[0]].abandon(5)
    assert fetched(open_tier(), 5, SMALL) == winner.bytes


@on_all
def test_of_two_that_replace_one_wins(open_tier, proxy) -> None:
    stored(open_tier(), HandMade(SMALL, 5, seed=1))
    slow, quick = HandMade(SMALL, 5, seed=2), HandMade(SMALL, 5, seed=3)
    tier = open_tier()
    tier.put(slow.image)
    gate = proxy.rule("hold", is_manifest)
    errors: list[Exception] = []

    def commit() -> None:
        try:
            tier.commit(manifest_of(slow.record), replace=True)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=commit)
    thread.start()
    assert gate.reached.wait(60)
    stored(open_tier(), quick, replace=True)
    gate.released.set()
    thread.join(60)
    assert [type(error) for error in errors] == [StepExistsError]
    assert fetched(open_tier(), 5, SMALL) == quick.bytes


def test_the_same_step_twice_is_one(open_tier) -> None:
    """A writer that died before it could say so, and the one that begins anew."""
    made = HandMade(SMALL, 5)
    stored(open_tier(), made)
    tier = open_tier()
    stored(tier, made)
    assert fetched(tier, 5, SMALL) == made.bytes


@on_both
def test_a_replaced_step_leaves_nothing_behind(open_tier, s3_server, bucket) -> None:
    tier = open_tier()
    stored(tier, HandMade(SMALL, 5, seed=1))
    count = len(s3_server.keys(bucket))
    stored(tier, HandMade(SMALL, 5, seed=2), replace=True)
    assert len(s3_server.keys(bucket)) == count
    tier.evict(5)
    assert [key for key in s3_server.keys(bucket) if "step" in key] == []


def test_a_store_without_conditions_is_refused(open_tier, proxy) -> None:
    proxy.rule("501 NotImplemented", is_manifest, times=100)
    with pytest.raises((CapabilityError, StorageError), match=r"NotImplemented|conditions"):
        stored(open_tier(), HandMade(SMALL, 5))
