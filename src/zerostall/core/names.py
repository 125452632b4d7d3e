"""Names of tensors and values: the path that leads to one, as one string.

A path is a root and what follows: attribute names and string keys, list indexes and integer keys, other keys.
`("model", "layers", "0", "weight")` is `model.layers.0.weight`, `("data", 3, "a.b")` is `data[3].a\\.b`.
Inside a string part `.` `[` `]` `\\` stand behind a backslash, an empty part is `\\e`, and a lone surrogate
is `\\ud800` (four hex digits), so that a name is always valid Unicode. A key of another type is `[=text]`,
the text escaped the same way. Every path has one name and every name one path; a text that is no name is
refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from zerostall.core.quoting import quote
from zerostall.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Key(msgspec.Struct, frozen=True):
    """A part of a path that is neither a string nor an integer: a dict's key, as `values.key_text` spells
    it.
    """

    text: str


Part: TypeAlias = str | int | Key

# What int() and str() take without their limit on digits.
_MAX_DIGITS = 4_000
_LISTED = 20  # roots, in a message
_SPECIAL = re.compile(r"[.\[\]\\\ud800-\udfff]")
_TEXT = r"\\e|(?:[^.\[\]\\\ud800-\udfff]|\\[.\[\]\\]|\\ud[89a-f][0-9a-f]{2})+"
_PART = re.compile(rf"\[=(?P<key>{_TEXT})\]|\[(?P<index>0|-?[1-9][0-9]*)\]|(?P<dot>\.?)(?P<text>{_TEXT})")
_ESCAPE = re.compile(r"\\(?:u(.{4})|(.))")


def _escape_one(match: re.Match[str]) -> str:
    character = match[0]
    return f"\\u{ord(character):04x}" if character >= "\ud800" else "\\" + character


def _escape(text: str) -> str:
    if text.isidentifier() or text.isalnum():  # nearly all; no special character is part of such a text
        return text
    return _SPECIAL.sub(_escape_one, text) if text else "\\e"


def _unescape_one(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else match[2]


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return "" if text == "\\e" else _ESCAPE.sub(_unescape_one, text)


def child(name: str, part: Part) -> str:
    """Return the name of what lies one step below `name`; below the empty string, the part's own name."""
    if isinstance(part, str):
        return f"{name}.{_escape(part)}" if name else _escape(part)
    if isinstance(part, Key):
        return f"{name}[={_escape(part.text)}]"
    if isinstance(part, int) and not isinstance(part, bool):
        if part.bit_length() > 3 * _MAX_DIGITS:
            raise ValueError(f"an index of {part.bit_length()} bits is too long for a name")
        return f"{name}[{int(part)}]"
    raise TypeError(f"a part of a path is a str, an int or a Key, not a {type(part).__name__}")


def join(path: tuple[Part, ...]) -> str:
    """Return the name of a path. ValueError for the empty path."""
    if not path:
        raise ValueError("the empty path has no name")
    name = ""
    for part in path:
        name = child(name, part)
    return name


def split(name: str) -> tuple[Part, ...]:
    """Return the path a name stands for. FormatError for a text that is no name."""
    parts: list[Part] = []
    at = 0
    while at < len(name):
        match = _PART.match(name, at)
        # A dot stands before each string part but the first of all.
        if match is None or (match["text"] is not None and bool(match["dot"]) != bool(at)):
            raise FormatError(f"{quote(name)} is no name: stuck at character {at}")
        if match["text"] is not None:
            parts.append(_unescape(match["text"]))
        elif match["key"] is not None:
            parts.append(Key(_unescape(match["key"])))
        elif len(match["index"]) > _MAX_DIGITS:
            raise FormatError(f"{quote(name)} is no name: an index of {len(match['index'])} digits")
        else:
            parts.append(int(match["index"]))
        at = match.end()
    if not parts:
        raise FormatError("the empty text is no name")
    return tuple(parts)


# What torch.compile, FSDP and activation checkpointing put between a module and its children, wherever that
# is.
_ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# DistributedDataParallel and DataParallel wrap the outermost module, so only there `module` may be theirs.
_OUTERMOST = _ANYWHERE | {"module"}
_SEGMENT = re.compile(r"(?:[^.\\]|\\.)+", re.DOTALL)


def strip_wrappers(name: str, *, rooted: bool = True) -> str:
    """Return a name without the parts that wrappers of modules add.

    `_orig_mod.`, `_fsdp_wrapped_module.` and `_checkpoint_wrapped_module.` go wherever they are, `module.`
    only right behind the root (behind other wrappers there, too), for deeper down it may be a module's real
    name. The last part stays. `rooted=False` is for names that begin without a root, as those of
    `module.state_dict()` do. Pure text: it cannot know whether an outermost `module.` is real, so use it only
    for what does not match as it stands.
    """
    if "_orig_mod." not in name and "module." not in name:
        return name
    segments = _SEGMENT.findall(name)
    start = int(rooted)
    inner = start
    while inner < len(segments) - 1 and segments[inner] in _OUTERMOST:
        inner += 1
    kept = [segment for segment in segments[inner:-1] if segment not in _ANYWHERE]
    return ".".join([*segments[:start], *kept, *segments[max(start, len(segments) - 1) :]])


def roots(found: Iterable[str]) -> str:
    """What these begin with, in words. A text that ends with a dot counts as the name before it, one that is no name
    as it is.
    """
    first = sorted({_root(text) for text in found})
    more = f" and {len(first) - _LISTED} more" if len(first) > _LISTED else ""
    return f"names begin with {', '.join(first[:_LISTED]) or 'nothing'}{more}"


def _root(text: str) -> str:
    try:
        return str(split(text.removesuffix("."))[0])
    except FormatError:
        return text
