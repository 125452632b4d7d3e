"""What may go wrong on the way to an object store: nothing is lost, no half step is seen, errors say what was."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote, urlsplit

import pytest

from hand import wait_until
from images import HandMade, make_layout, manifest_of
from stores.proxy import Proxy, Request
from stores.seaweed import on_all, on_both
from stores.server import Server
from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core.candidates import Past
from zerostall.errors import CapabilityError, CorruptError, FormatError, StepExistsError, StorageError
from zerostall.tiers.host import stride_of
from zerostall.tiers.remote import RemoteTier
from zerostall.tiers.store import Store, told

THREE_PARTS = make_layout(35_000_000)
SMALL = make_layout(70_000, 5)


@pytest.fixture(scope="module")
def large() -> HandMade:
    return HandMade(THREE_PARTS, 7)


@pytest.fixture
def open_tier(s3_server: Server, proxy: Proxy, bucket: str) -> Iterator[Callable[..., RemoteTier]]:
    """Opens the run in the bucket as one more process would."""
    pools: list[ThreadPoolExecutor] = []
    tiers: list[RemoteTier] = []

    def open_tier(timeout: float = 20.0, **environment: str) -> RemoteTier:
        pools.append(ThreadPoolExecutor(4))
        store = Store(
            f"{s3_server.scheme}://{bucket}/run", s3_server.environment(proxy.url) | environment, timeout=timeout
        )
        tiers.append(RemoteTier(store, pools[-1]))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()
    for pool in pools:
        pool.shutdown()


def stored(tier: RemoteTier, made: HandMade, **commit: bool) -> None:
    tier.put(made.image)
    tier.commit(manifest_of(made.record), **commit)


def fetched(tier: RemoteTier, step: int, layout: layouts.Layout) -> bytes:
    target = native.Segment("target", stride_of(layout))
    try:
        tier.get(step, 0, target.address)
        return bytes(target.view(0, layout.nbytes))
    finally:
        target.close()


def is_part(request: Request) -> bool:
    return request.is_part


def parts_of(requests: list[Request]) -> set[str]:
    return {request.target for request in requests if request.is_part}


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and unquote(urlsplit(request.target).path).endswith("manifest.json")


def is_complete(request: Request) -> bool:
    in_blocks = request.method == "PUT" and "comp=blocklist" in request.target
    return in_blocks or (request.method == "POST" and "uploadId=" in request.target)


# ------------------------------------------------------------------------------------------------------- uploads


@on_both
def test_an_upload_that_broke_off_goes_on_where_it_was(open_tier, proxy, s3_server, bucket, large) -> None:
    """Also in another process: the store knows which parts it has."""
    broken = proxy.rule("403 AccessDenied", lambda r: r.is_part and "partNumber=3" in r.target, times=100)
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


# ------------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("do", ["drop", "cut", "stall", "flip", "503 SlowDown"])
def test_a_read_that_fails_is_done_again(open_tier, proxy, large, do: str) -> None:
    tier = open_tier(timeout=2.0 if do == "stall" else 20.0)
    stored(tier, large)
    proxy.rule(do, lambda r: r.method == "GET" and "safetensors" in r.target)
    assert fetched(tier, 7, THREE_PARTS) == large.bytes


@on_all
def test_damage_is_found_chunk_by_chunk(open_tier, proxy, large) -> None:
    tier = open_tier()
    stored(tier, large)
    proxy.rule("flip", lambda r: "safetensors" in r.target and "bytes=16777216-" in r.headers.get("range", ""), times=9)
    with pytest.raises(CorruptError, match="1 of 3 chunks fail their checksum, first chunk 1"):
        fetched(tier, 7, THREE_PARTS)


def test_a_missing_object_is_damage(open_tier) -> None:
    tier = open_tier()
    stored(tier, HandMade(SMALL, 5))
    tier.store.delete([tier.image_name(5, 0)])
    with pytest.raises(CorruptError, match="missing"):
        fetched(tier, 5, SMALL)


def test_a_folder_that_was_copied_into_a_bucket_is_a_run(open_tier, s3_server, bucket, tmp_path) -> None:
    from zerostall.tiers.disk import DiskTier

    made = HandMade(SMALL, 5)
    pool = native.Pool("test", 1)
    disk = DiskTier(tmp_path, pool)
    disk.put(made.image)
    disk.commit(manifest_of(made.record))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            s3_server.put(bucket, f"run/{path.relative_to(tmp_path)}", path.read_bytes())
    tier = open_tier()
    assert tier.steps() == [5]
    assert fetched(tier, 5, SMALL) == made.bytes
    tier.evict(5)
    assert [key for key in s3_server.keys(bucket) if "step" in key] == []


def test_thousands_of_steps_are_listed_at_once(open_tier, proxy, s3_server, bucket) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda step: s3_server.put(bucket, f"run/step-{step:012d}/manifest.json", b""), range(1001)))
    assert open_tier().steps() == list(range(1001))
    assert proxy.count(lambda request: True) == 2


@on_all
def test_steps_of_a_past_are_set_aside(open_tier, s3_server, bucket) -> None:
    tier = open_tier()
    for step in (5, 6):
        stored(tier, HandMade(SMALL, step))
    assert tier.set_aside([Past(6, 123.0)]) == []  # another one of that number
    assert tier.set_aside([Past(6, tier.created(6))]) == [6]
    assert (tier.steps(), tier.rewound()) == ([5], [6])
    again = HandMade(SMALL, 6, seed=9)
    stored(tier, again)
    tier.forget_rewound(6)
    assert fetched(tier, 6, SMALL) == again.bytes
    assert len([key for key in s3_server.keys(bucket) if "step-000000000006/rank" in key]) == 2


# --------------------------------------------------------------------------------------------- clear, and silent


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("ExpiredToken", "renew"),
        ("RequestTimeTooSkewed", "clock"),
        ("AccessDenied", "right"),
        ("NoSuchBucket", "create"),
        ("QuotaExceeded", "keep fewer"),
    ],
)
def test_what_a_store_refuses_is_said_with_what_to_do(open_tier, proxy, code: str, hint: str) -> None:
    status = 404 if code == "NoSuchBucket" else 403
    proxy.rule(f"{status} {code}", lambda r: True, times=1000)
    tier = open_tier()
    for call in (tier.steps, lambda: stored(tier, HandMade(SMALL, 5)), lambda: tier.manifest(5)):
        with pytest.raises(StorageError, match=code) as caught:
            call()
        assert hint in caught.value.hint


def test_credentials_that_were_renewed_are_used(open_tier, proxy, s3_server, bucket, large, tmp_path) -> None:
    """In the middle of a long upload they run out; the next try reads them again and goes on where it was."""
    file = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = s\naws_session_token = {}\n"
    file.write_text(text.format("OLDKEY", "old"))
    none = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SHARED_CREDENTIALS_FILE": str(file)}
    tier = open_tier(**none)
    proxy.rule(
        "403 ExpiredToken", lambda r: r.is_part and "partNumber=3" in r.target and "OLDKEY" in str(r.headers), times=99
    )
    with pytest.raises(StorageError, match="ExpiredToken"):
        tier.put(large.image)
    assert s3_server.unfinished(bucket) != []
    before = len(proxy.requests)
    there = {target for target in parts_of(proxy.requests) if "partNumber=3" not in target}
    file.write_text(text.format("NEWKEY", "new"))
    stored(tier, large)
    again = parts_of(proxy.requests[before:])
    assert len(again) == 3 - len(there) and not again & there
    assert fetched(tier, 7, THREE_PARTS) == large.bytes


def test_an_unreachable_store_is_an_error_in_bounded_time(open_tier) -> None:
    with pytest.raises(StorageError):
        open_tier(timeout=1.0, AWS_ENDPOINT_URL="http://127.0.0.1:9").steps()


@pytest.mark.parametrize(
    ("url", "at", "hint"),
    [
        ("s3://bucket/run", "http://169.254.169.254/latest/api/token", "AWS_ACCESS_KEY_ID"),
        ("gs://bucket/run", "http://169.254.169.254/computeMetadata/v1/token", "GOOGLE_APPLICATION_CREDENTIALS"),
    ],
)
def test_missing_credentials_are_said_with_what_to_do(url: str, at: str, hint: str) -> None:
    """Whoever has none asks the machine, which only in a cloud has some to give."""
    store = Store(url, {"HOME": "/nowhere", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}, timeout=1.0)
    with pytest.raises(StorageError, match="no credentials were found") as caught, store.errors("read", "run.json"):
        raise OSError(f"Generic error: Error performing PUT {at} in 2s - HTTP error: error sending request")
    assert hint in caught.value.hint
    assert caught.value.errno == errno.EACCES


def test_no_key_and_no_token_is_ever_told(open_tier, proxy, s3_server, bucket, caplog) -> None:
    secrets = {
        "AWS_ACCESS_KEY_ID": "AKIAOFSOMEBODY",
        "AWS_SECRET_ACCESS_KEY": "a-very-secret-key",
        "AWS_SESSION_TOKEN": "a-session-token",
    }
    proxy.rule("403 SignatureDoesNotMatch", lambda r: True, times=1000)
    tier = open_tier(**secrets)
    texts = [repr(tier.store), repr(tier.store.keys()), str(vars(tier))]
    made = HandMade(SMALL, 5)
    for call in (tier.steps, lambda: tier.put(made.image)):
        with pytest.raises(StorageError) as caught:
            call()
        texts.append(f"{caught.value!r} {caught.value} {caught.value.__cause__!r} {caught.value.__context__!r}")
    texts.append(caplog.text)
    for secret in secrets.values():
        assert not any(secret in text for text in texts)


def test_of_an_answer_only_code_and_sentence_are_told() -> None:
    answer = (
        "Error performing PUT https://s3/x?X-Amz-Signature=abc in 3ms - Server returned non-2xx status code: 403 "
        "Forbidden: <Error><Code>SignatureDoesNotMatch</Code><Message>They differ</Message>"
        "<CanonicalRequest>x-amz-security-token:SECRET</CanonicalRequest></Error>\nDebug source: SECRET"
    )
    assert told(answer) == ("SignatureDoesNotMatch", "They differ")
    assert "SECRET" not in "".join(told(answer.replace("Code>", "C>").replace("Message>", "M>")))
    assert errno.EACCES == 13
