"""The shell around every JSON file zerostall writes: `{"sha256":"<hex>","body":{...}}` and a line feed.

The digest is that of the body's exact bytes as they stand in the file, so no reader has to know how to spell
JSON again to check it. This shell is the same in all format versions; what may change is the body, which says
its version.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from zerostall.core.quoting import clip
from zerostall.errors import CorruptError, FormatError, VersionError

FIRST = 1
"""The first format version. A file is written in the lowest version that says all of it."""

_Body = TypeVar("_Body")


class _Shell(msgspec.Struct, frozen=True):
    sha256: str
    body: msgspec.Raw


class _Versioned(msgspec.Struct, frozen=True):
    version: int


_SHELL = msgspec.json.Decoder(_Shell)
_VERSIONED = msgspec.json.Decoder(_Versioned)


def seal(body: bytes) -> bytes:
    """Put a body into its shell. `body` is one JSON object, without white space around it."""
    digest = hashlib.sha256(body).hexdigest().encode()
    return b"".join((b'{"sha256":"', digest, b'","body":', body, b"}\n"))


def unseal(
    data: bytes, decoder: msgspec.json.Decoder[_Body], *, source: str, limit: int, newest: int = FIRST
) -> tuple[_Body, str]:
    """Check a sealed file and read its body.

    Args:
        data: the whole file.
        decoder: of the body's type.
        source: what messages call the file, best its path.
        limit: the most bytes such a file may have.
        newest: the newest format version of such a file that this zerostall reads.

    Returns the body and the SHA-256 (hex) of its bytes.
    Raises CorruptError for a file that is damaged, VersionError for one of a newer format, FormatError for
    one that is whole and yet not what it should be.
    """
    if len(data) > limit:
        raise FormatError(f"{source}: {len(data)} bytes, more than the {limit} such a file may have")
    if not data:
        raise CorruptError(f"{source}: the file is empty")
    try:
        shell = _SHELL.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CorruptError(f"{source}: cut off or damaged ({clip(error)})") from None
    body = bytes(shell.body)
    digest = hashlib.sha256(body).hexdigest()
    if digest != shell.sha256:
        raise CorruptError(f"{source}: damaged, its body does not have the SHA-256 that stands in front of it")
    try:
        version = _VERSIONED.decode(body).version
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(f"{source}: no format version ({clip(error)})") from None
    if version > newest:
        raise VersionError(
            f"{source}: written in format version {clip(version)}, and this zerostall reads up to {newest}",
            hint="install a newer zerostall",
        )
    if version < 1:
        raise FormatError(f"{source}: there is no format version {clip(version)}")
    try:
        return decoder.decode(body), digest
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(f"{source}: {clip(error)}") from None
