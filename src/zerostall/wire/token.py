"""The secret that agents and people show the manager: in a file that only its owner can read, never in a log."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from typing import TYPE_CHECKING

from zerostall.errors import CapabilityError

if TYPE_CHECKING:
    from pathlib import Path

SHORTEST = 16


def make(path: Path) -> None:
    """Write a new token where there is none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")


def read(path: Path) -> str:
    """The token.

    Raises:
        CapabilityError: the file is not there, others can read it, or it holds no token.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise CapabilityError(
            f"the token file {path} cannot be read: {error.strerror}",
            hint="the manager makes one; copy it to every node, or set ZEROSTALL_TOKEN_FILE",
        ) from error
    with os.fdopen(fd) as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or stat.S_IMODE(facts.st_mode) & 0o077:
            raise CapabilityError(f"others can read the token file {path}", hint=f"chmod 600 {path}")
        text = file.read(4096).strip()
    if len(text) < SHORTEST or not text.isascii() or not text.isprintable() or " " in text:
        raise CapabilityError(f"{path} holds no token: one line of {SHORTEST} or more characters without spaces")
    return text


def equal(one: str, other: str) -> bool:
    """Whether two tokens are the same, in a time that says nothing about where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "surrogateescape"), other.encode("utf-8", "surrogateescape"))
