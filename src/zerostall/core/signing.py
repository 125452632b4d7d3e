"""AWS Signature Version 4 of a request to an object store: pure, with the time as an argument."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

UNSIGNED = "UNSIGNED-PAYLOAD"
"""In place of a body's SHA-256: the connection, or a checksum of its own, vouches for the body."""

_ALGORITHM = "AWS4-HMAC-SHA256"


class Keys(msgspec.Struct, frozen=True):
    """What requests are signed with. Its `repr` tells none of it."""

    access_key: str
    secret_key: str
    token: str | None = None

    def __repr__(self) -> str:
        return "<Keys>"


def path_of(*parts: str) -> str:
    """A path as it is sent and signed, each part encoded once. Parts may hold slashes."""
    return "/" + "/".join(quote(part, safe="/-_.~") for part in parts if part)


def query_of(query: Mapping[str, str]) -> str:
    """A query as it is sent and signed."""
    return "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(query.items()))


def sign(
    method: str,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    *,
    keys: Keys,
    region: str,
    stamp: str,
    payload: str = UNSIGNED,
) -> dict[str, str]:
    """Return the headers to send: those given, and what signs them all.

    Args:
        path: as `path_of` gives it.
        headers: `host` among them; names in lower case.
        stamp: the time, as `20261129T232600Z`.
        payload: SHA-256 of the body in hex, or UNSIGNED.
    """
    sent = dict(headers) | {"x-amz-date": stamp, "x-amz-content-sha256": payload}
    if keys.token:
        sent["x-amz-security-token"] = keys.token
    names = ";".join(sorted(sent))
    lines = "".join(f"{name}:{' '.join(sent[name].split())}\n" for name in sorted(sent))
    request = "\n".join((method, path, query_of(query), lines, names, payload))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = "\n".join((_ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{keys.secret_key}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"{keys.access_key}/{scope}"
    sent["authorization"] = f"{_ALGORITHM} Credential={credential}, SignedHeaders={names}, Signature={signature}"
    return sent
