"""Uploads to Azure in its own words: what breaks is sent again, and what it does not know is left to obstore."""

from __future__ import annotations

import base64
import hmac
import re
from urllib.parse import unquote

import pytest

from stores.proxy import is_complete, is_part
from stores.runs import THREE_PARTS, fetched, stored
from zerostall.core import shared_key, upload_parts
from zerostall.core.shared_key import Account
from zerostall.errors import StorageError
from zerostall.tiers import azure
from zerostall.tiers.uploads import PlainUploads, blocks_of

on_azurite = pytest.mark.parametrize("s3_server", ["azurite"], indirect=True)
NO_KEY = {"AZURE_STORAGE_ACCOUNT_KEY": ""}
FAILS = ["drop", "lose", "503 ServerBusy", "500 OperationTimedOut"]


def length_of_name(target: str) -> int:
    return len(base64.b64decode(unquote(re.findall("[?&]blockid=([^&]+)", target)[0])))


@on_azurite
@pytest.mark.parametrize("do", FAILS)
def test_a_block_that_fails_is_sent_again(open_tier, proxy, s3_server, bucket, large, do: str) -> None:
    rule = proxy.rule(do, is_part)
    tier = open_tier()
    stored(tier, large)
    assert rule.seen == 4  # three parts, one of them twice
    assert fetched(tier, 7, THREE_PARTS) == large.bytes
    assert s3_server.unfinished(bucket) == []


@on_azurite
@pytest.mark.parametrize("do", FAILS[:3])
def test_the_end_of_an_upload_is_said_again(open_tier, proxy, s3_server, bucket, large, do: str) -> None:
    """Where only the answer was lost, the blocks are gone the second time, for they are the blob."""
    proxy.rule(do, is_complete)
    tier = open_tier()
    stored(tier, large)
    assert fetched(tier, 7, THREE_PARTS) == large.bytes


@on_azurite
def test_blocks_that_obstore_left_behind_are_in_nobodys_way(open_tier, proxy, s3_server, bucket, large) -> None:
    """An agent without the account's key began. All names of a blob's blocks are to have one length."""
    proxy.rule("403 AuthorizationFailure", is_complete)
    tier = open_tier()
    ours, tier._images._uploads = tier._images._uploads, PlainUploads(tier.store)
    with pytest.raises(StorageError):
        tier.put(large.image)
    assert len(s3_server.unfinished(bucket)) == 1
    tier._images._uploads = ours
    stored(tier, large)
    assert fetched(tier, 7, THREE_PARTS) == large.bytes
    assert len({length_of_name(request.target) for request in proxy.requests if request.is_part}) == 1
    assert sum(map(is_part, proxy.requests)) == 6


@on_azurite
def test_a_token_does_what_the_key_does(open_tier, proxy, s3_server, bucket, large) -> None:
    """Goes on where it was, and says the token to nobody else."""
    token = s3_server.token()
    with_token = {**NO_KEY, "AZURE_STORAGE_SAS_TOKEN": token}
    broken = proxy.rule("403 AuthorizationFailure", lambda r: r.part == 3, times=100)
    with pytest.raises(StorageError) as told:
        open_tier(**with_token).put(large.image)
    assert "sig=" not in str(told.value)
    broken.times = 0
    before = proxy.count(is_part)
    tier = open_tier(**with_token)
    stored(tier, large)
    assert proxy.count(is_part) - before == 1
    assert fetched(tier, 7, THREE_PARTS) == large.bytes


@on_azurite
def test_a_wrong_key_is_refused_and_not_told(open_tier, large, caplog) -> None:
    wrong = base64.b64encode(b"of somebody else's account").decode()
    with pytest.raises(StorageError) as told:
        open_tier(AZURE_STORAGE_ACCOUNT_KEY=wrong).put(large.image)
    assert wrong not in f"{told.value!r} {caplog.text} {Account('name', wrong)}"


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, ""),
        ({"AZURE_STORAGE_TOKEN": "a token"}, "no account's key"),
        ({"AZURE_STORAGE_ACCOUNT_KEY": "no base64 !"}, "no account's key"),
        ({**NO_KEY, "AZURE_STORAGE_SAS_TOKEN": "?sv=1&sig=2"}, ""),
        ({**NO_KEY, "AZURE_STORAGE_SAS_TOKEN": "sv=1"}, "no SAS token"),
        ({**NO_KEY, "AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=2", "AZURE_CLIENT_ID": "one"}, "no SAS token"),
        ({"AZURE_STORAGE_USE_EMULATOR": "true"}, "emulator"),
    ],
)
def test_what_is_left_to_obstore(environment: dict[str, str], why: str) -> None:
    pytest.importorskip("obstore")
    known = {"AZURE_STORAGE_ACCOUNT_NAME": "name", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}

    class Named:
        scheme, bucket = "az", "container"

    named = Named()
    named.environment = {**known, **environment}
    found = azure.why_not(named)
    assert why in found and bool(found) == bool(why)


def test_names_of_blocks_are_as_long_as_those_that_are_there() -> None:
    cuts = upload_parts.cut(50 << 20, 16 << 20, [1, 2, 3, 0xABCDEF01])
    assert blocks_of(cuts, [])[4] == "000004-abcdef01".ljust(32, ".")
    assert blocks_of(cuts, blocks_of(cuts, []).values()) == blocks_of(cuts, [])
    assert {len(name) for name in blocks_of(cuts, ["x" * 48]).values()} == {48}


def test_the_signature_of_a_request() -> None:
    """Azurite checks it, too; here is said what goes into it."""
    headers = {"content-length": "0", "x-ms-meta-a": " b   c "}
    query = {"comp": "blocklist", "blocklisttype": "uncommitted"}
    account = Account("name", base64.b64encode(b"key").decode())
    sent = shared_key.sign("GET", "/c/a%20b", query, headers, account=account, date="Mon, 30 Nov 2026 20:00:00 GMT")
    text = (
        "GET" + "\n" * 12 + "x-ms-date:Mon, 30 Nov 2026 20:00:00 GMT\nx-ms-meta-a:b c\nx-ms-version:2021-08-06\n"
        "/name/c/a%20b\nblocklisttype:uncommitted\ncomp:blocklist"
    )
    mark = base64.b64encode(hmac.digest(b"key", text.encode(), "sha256")).decode()
    assert sent["authorization"] == f"SharedKey name:{mark}"
