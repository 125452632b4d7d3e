"""What may go wrong as a step is read from an object store, and what is said of a store that refuses or is silent."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor

import pytest

from images import HandMade, manifest_of
from stores.proxy import parts_of
from stores.runs import SMALL, THREE_PARTS, fetched, stored
from stores.seaweed import on_all
from zerostall import native
from zerostall.core.candidates import Past
from zerostall.errors import CorruptError, StorageError
from zerostall.tiers.store import Store, told

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
