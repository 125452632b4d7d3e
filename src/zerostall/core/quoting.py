"""Text out of files, made fit for messages: what a file says may be as long as the file."""

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


def dims(sizes: Sequence[object]) -> str:
    """Return a shape, or the beginning of one that is long."""
    text = ", ".join(str(size) if isinstance(size, int) and size.bit_length() < 64 else "odd" for size in sizes[:8])
    return f"({text}{', ...' if len(sizes) > 8 else ''})"
