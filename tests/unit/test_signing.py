"""Requests are signed as botocore signs them."""

from __future__ import annotations

import pytest

from zerostall.core import signing
from zerostall.core.signing import Keys

KEYS = Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "a+token/with=signs")


@pytest.mark.parametrize("token", [None, KEYS.token])
@pytest.mark.parametrize(
    ("method", "parts", "query", "headers"),
    [
        ("GET", ("bucket",), {"uploads": "", "prefix": "run 1/é=[x]*", "encoding-type": "url"}, {}),
        (
            "PUT",
            ("bucket", "a b/ü%20#1/~x.json"),
            {"partNumber": "7", "uploadId": "a/b+c=="},
            {"x-amz-meta-a": " b  c "},
        ),
        ("POST", ("up", "bucket", "x'y"), {"uploads": ""}, {"x-amz-checksum-algorithm": "CRC32C"}),
    ],
)
def test_as_botocore_signs(
    token: str | None, method: str, parts: tuple[str, ...], query: dict[str, str], headers: dict[str, str], monkeypatch
) -> None:
    auth = pytest.importorskip("botocore.auth")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    path = signing.path_of(*parts)
    url = f"https://s3.eu-central-1.example.com:8443{path}?{signing.query_of(query)}"
    theirs = AWSRequest(method, url, headers=headers, data=b"")
    signer = auth.S3SigV4Auth(Credentials(KEYS.access_key, KEYS.secret_key, token), "s3", "eu-central-1")
    signer.add_auth(theirs)
    ours = signing.sign(
        method,
        path,
        query,
        {"host": "s3.eu-central-1.example.com:8443", **headers},
        keys=Keys(KEYS.access_key, KEYS.secret_key, token),
        region="eu-central-1",
        stamp=theirs.context["timestamp"],
        payload=theirs.headers["X-Amz-Content-SHA256"],
    )
    assert ours["authorization"] == theirs.headers["Authorization"]


def test_keys_do_not_tell_themselves() -> None:
    assert "AKID" not in repr(KEYS) and "wJal" not in f"{KEYS}{[KEYS]}"
