"""Azure's Shared Key signature of a request to its blob store: pure, with the time as an argument."""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = "2021-08-06"
"""Of the protocol."""

_SIGNED = (
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)


class Account(msgspec.Struct, frozen=True):
    """Who asks. Its `repr` tells none of the key."""

    name: str
    key: str

    def __repr__(self) -> str:
        return f"<Account {self.name}>"


def usable(account: Account) -> bool:
    """Whether its key is one."""
    try:
        return bool(account.name and base64.b64decode(account.key, validate=True))
    except (binascii.Error, ValueError):
        return False


def sign(
    method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], *, account: Account, date: str
) -> dict[str, str]:
    """Return the headers to send: those given, and what signs them all.

    Args:
        path: encoded, as it is sent.
        query: names in lower case, values not encoded.
        headers: names in lower case; content-length among them, if there is a body.
        date: the time, as HTTP writes it.
    """
    sent = dict(headers) | {"x-ms-date": date, "x-ms-version": VERSION}
    lines = [method]
    lines += ["" if (name, sent.get(name)) == ("content-length", "0") else sent.get(name, "") for name in _SIGNED]
    lines += [f"{name}:{' '.join(sent[name].split())}" for name in sorted(sent) if name.startswith("x-ms-")]
    lines.append(f"/{account.name}{path}")
    lines += [f"{name}:{query[name]}" for name in sorted(query)]
    mark = hmac.digest(base64.b64decode(account.key), "\n".join(lines).encode(), "sha256")
    return sent | {"authorization": f"SharedKey {account.name}:{base64.b64encode(mark).decode()}"}
