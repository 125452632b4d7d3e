"""Words for messages: text out of files, which may be as long as the file, and numbers of things."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST = 200


def clip(text: object) -> str:
    """Return the text, or the beginning of one that is long."""
    words = str(text)
    return words if len(words) <= _MOST else f"{words[:_MOST]}... ({len(words)} characters)"


def quote(text: str) -> str:
    """Return the text in quotes, or the beginning of one that is long."""
    return repr(text) if len(text) <= _MOST else f"{text[:_MOST]!r}... ({len(text)} characters)"


def count(number: int, thing: str, things: str = "") -> str:
    """Return `1 node`, `2 nodes`; `things` where another plural is due."""
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def dims(sizes: Sequence[object]) -> str:
    """Return a shape, or the beginning of one that is long."""
    text = ", ".join(str(size) if isinstance(size, int) and size.bit_length() < 64 else "odd" for size in sizes[:8])
    return f"({text}{', ...' if len(sizes) > 8 else ''})"
