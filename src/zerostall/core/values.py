"""Small values (counters, options, generator states) as JSON that keeps every type exact.

`None`, booleans, integers of 64 bits, finite floats, strings, lists and dicts with string keys are JSON as
they are; all else is an object of one key, `$` and a tag (docs/format.md lists them). No pickle: a file names
tags from a fixed table, never classes, and reading one runs no code of its choice. Only exact types are
taken, for a subclass would come back as something else. A list that is referred to twice comes back as two.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import NoneType
from typing import TypeAlias, TypeVar

import msgspec

from zerostall.core import codecs, names
from zerostall.core.codecs import Codec
from zerostall.core.quoting import clip, quote
from zerostall.errors import FormatError, StateError

Document: TypeAlias = msgspec.Raw
"""Values as JSON text, ready to stand in a larger JSON message. In messages of another kind, send
`bytes(document)`.
"""

MAX_DEPTH = 200
"""How deep lists and objects may lie in each other in a document; what is in a plain list or dict is one
deeper.
"""

_LISTED = 200


class TensorRef(msgspec.Struct, frozen=True):
    """Stands in a tree of values for the tensor of this name."""

    name: str


class Draft:
    """A copy of values that no later change of theirs can reach; `encode()` may be called later, by any
    thread.
    """

    __slots__ = ("_json",)

    def __init__(self, json: object) -> None:
        self._json = json

    def encode(self) -> Document:
        """Return the document."""
        return Document(msgspec.json.encode(self._json))


class _Unsupported(Exception):
    pass


_Lower: TypeAlias = Callable[[object, int], object]
_Tensor: TypeAlias = Callable[[str], object]
_Value = TypeVar("_Value")

_TAG = re.compile(r"[a-z][a-z0-9_]*(?:\.[A-Za-z0-9_]+)+")


def draft(tree: object, path: str = "") -> Draft:
    """Copy a tree of values: dicts, lists and the like, down to leaves that are values or TensorRefs.

    Microseconds for an optimizer's options. `path` is the tree's name in messages. StateError names every
    value that cannot be stored, and its type.
    """
    try:
        return Draft(_lower(tree, 0))
    except (_Unsupported, TypeError, ValueError, RecursionError):
        pass
    problems: list[str] = []
    _explain(tree, path, 0, problems)
    more = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    raise StateError(
        "these values cannot be stored:\n  " + "\n  ".join(problems[:_LISTED]) + more,
        hint="store plain values, or give the object state_dict() and load_state_dict() that make some",
    )


def encode(tree: object, path: str = "") -> Document:
    """Return a tree of values as a document. As `draft`, at once."""
    return draft(tree, path).encode()


def decode(document: Document | bytes, tensor: Callable[[str], object]) -> object:
    """Return the tree a document holds.

    `tensor` is called with the name of each TensorRef and returns what to put there; what it raises, passes.
    FormatError for a document that no `encode` made.
    """
    try:
        json = msgspec.json.decode(document)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(f"values that cannot be read: {clip(error)}") from None
    try:
        return _lift(json, 0, tensor)
    except RecursionError:
        raise FormatError("values are nested too deep for what is left of this thread's stack") from None


def register(kind: type[_Value], tag: str, write: Callable[[_Value], object], read: Callable[[object], _Value]) -> None:
    """Teach this process to store values of exactly this type.

    Args:
        kind: the type.
        tag: its name in files, for ever, such as `numpy.float64`; lower case up to a dot.
        write: value -> values that can be stored.
        read: the reverse. Its argument comes from a file; it must check it, raise TypeError or ValueError at
            anything
            odd, and run nothing the file asks for.

    Doing so twice with the same type and tag changes nothing. ValueError where one of both is taken.
    """
    if not _TAG.fullmatch(tag):
        raise ValueError(f"{tag!r} is no tag: lower-case letters, a dot, and a name")
    if _TYPES.get(tag, kind) is not kind or (kind in _LOWER and _TYPES.get(tag) is not kind):
        raise ValueError(f"{kind.__name__} or the tag {tag!r} is taken")
    if tag not in _TYPES:
        _TYPES[tag] = kind
        _enter(Codec(kind, tag, write, read))


def part(key: object) -> names.Part:
    """Return the part of a path that a dict's key makes. TypeError for a key that cannot be stored."""
    if type(key) is str or type(key) is int:
        return key
    try:
        return names.Key(msgspec.json.encode(_lower(key, 0)).decode())
    except _Unsupported as error:
        raise TypeError(f"a key {error}") from None


# Writing: values -> what msgspec writes as JSON
# ------------------------------------------------------------------


def _lower(value: object, depth: int) -> object:
    lower = _LOWER.get(type(value))
    if lower is None:
        raise _Unsupported(f"of type {_type_name(value)}")
    return lower(value, depth)


def _deeper(depth: int) -> int:
    if depth >= MAX_DEPTH:
        raise _Unsupported(f"nested deeper than {MAX_DEPTH} levels, or inside itself")
    return depth + 1


def _same(value: object, depth: int) -> object:
    return value


def _lower_int(value: int, depth: int) -> object:
    return value if -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF else {"$int": format(value, "x")}


def _lower_float(value: float, depth: int) -> object:
    # Zeros go the long way to keep their sign.
    if value - value == 0.0 and (value or math.copysign(1.0, value) > 0):
        return value
    return {"$float": codecs.write_float(value)}


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lower_text(value: str, depth: int) -> object:
    return value if _is_unicode(value) else {"$str": codecs.write_text(value)}


def _lower_list(value: list[object], depth: int) -> object:
    depth = _deeper(depth)
    result: list[object] = []
    for item in value:
        lower = _LOWER.get(type(item))
        if lower is None:
            raise _Unsupported
        result.append(lower(item, depth))
    return result


def _lower_dict(value: dict[object, object], depth: int) -> object:
    below = _deeper(depth)
    result: dict[str, object] = {}
    for key, item in value.items():
        lower = _LOWER.get(type(item))
        if lower is None:
            raise _Unsupported
        if type(key) is not str or key.startswith("$") or not _is_unicode(key):
            return {"$dict": _lower_list(codecs.write_pairs(value), below)}  # type: ignore[arg-type]
        result[key] = lower(item, below)
    return result


def _lower_tensor(value: TensorRef, depth: int) -> object:
    return {"$tensor": value.name}


def _lower_nested(codec: Codec) -> _Lower:
    key, write = f"${codec.tag}", codec.write

    def lower(value: object, depth: int) -> object:
        return {key: _lower(write(value), _deeper(depth))}

    return lower


def _lower_set(codec: Codec) -> _Lower:
    key = f"${codec.tag}"

    def lower(value: object, depth: int) -> object:
        items = _lower(list(value), _deeper(depth))  # type: ignore[call-overload]
        return {key: sorted(items, key=msgspec.json.encode)}  # type: ignore[call-overload]

    return lower


def _lower_leaf(codec: Codec) -> _Lower:
    key, write = f"${codec.tag}", codec.write
    return lambda value, depth: {key: write(value)}


# Reading: JSON -> values
# -----------------------------------------------------------------------------------------


def _lift(node: object, depth: int, tensor: _Tensor) -> object:
    kind = type(node)
    if kind is dict:
        return _lift_object(node, depth, tensor)  # type: ignore[arg-type]
    if kind is list:
        if depth >= MAX_DEPTH:
            raise FormatError(f"values are nested deeper than {MAX_DEPTH} levels")
        return [_lift(item, depth + 1, tensor) for item in node]  # type: ignore[union-attr]
    return node


def _lift_object(node: dict[str, object], depth: int, tensor: _Tensor) -> object:
    if depth >= MAX_DEPTH:
        raise FormatError(f"values are nested deeper than {MAX_DEPTH} levels")
    result: dict[str, object] = {}
    for key, item in node.items():
        if key.startswith("$"):
            if len(node) > 1:
                raise FormatError(f"values with an odd key {quote(key)}")
            return _lift_tagged(key[1:], item, depth, tensor)
        result[key] = _lift(item, depth + 1, tensor)
    return result


def _lift_tagged(tag: str, payload: object, depth: int, tensor: _Tensor) -> object:
    if tag == "tensor":
        if type(payload) is not str:
            raise FormatError("a tensor's name is a text")
        return tensor(payload)
    codec = _READ.get(tag)
    if codec is None:
        raise FormatError(
            f"values of a type {quote(tag)} that is unknown here",
            hint="import what this state was saved with (torch, numpy) or install a newer zerostall",
        )
    if codec.nested:
        payload = _lift(payload, depth + 1, tensor)
    try:
        return codec.read(payload)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError(f"a damaged value of type {tag!r}: {clip(error)}") from None


# Explaining
# ------------------------------------------------------------------------------------------------------


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _explain(value: object, path: str, depth: int, problems: list[str]) -> None:
    """Add every value below this one that cannot be stored. Slow, for it is only asked after a failure."""
    before = len(problems)
    if depth < MAX_DEPTH:
        for below, item in _children(value, path, problems):
            _explain(item, below, depth + 1, problems)
    if len(problems) > before:
        return
    try:
        _lower(value, depth)
    except RecursionError:
        problems.append(f"{path or 'the state'}: nested too deep, or inside itself")
    except (_Unsupported, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, _Unsupported) else f"of type {_type_name(value)}: {error}"
        problems.append(f"{path or 'the state'}: {reason}")


def _children(value: object, path: str, problems: list[str]) -> Iterator[tuple[str, object]]:
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict, Counter):
        for key, item in list(value.items()):  # type: ignore[attr-defined]
            try:
                yield names.child(path, part(key)), item
            except (TypeError, ValueError) as error:
                problems.append(f"{path or 'the state'}: {error}")
    elif kind in (list, tuple, deque):
        for index, item in enumerate(value):  # type: ignore[arg-type]
            yield names.child(path, index), item
    elif kind in (set, frozenset):
        for item in value:  # type: ignore[attr-defined]
            yield path, item
    elif kind in _NAMESPACES:
        for key, item in vars(value).items():
            yield names.child(path, key), item


_LOWER: dict[type, _Lower] = {}
_READ: dict[str, Codec] = {}
_TYPES: dict[str, type] = {}
_NAMESPACES = tuple(codec.type for codec in codecs.CODECS if codec.tag in ("namespace", "arguments"))


def _enter(codec: Codec) -> None:
    if codec.type in (set, frozenset):
        _LOWER[codec.type] = _lower_set(codec)
    else:
        _LOWER[codec.type] = _lower_nested(codec) if codec.nested else _lower_leaf(codec)
    _READ[codec.tag] = codec


for _codec in codecs.CODECS:
    _enter(_codec)
for _codec in (
    Codec(int, "int", format, codecs.read_int, nested=False),
    Codec(float, "float", codecs.write_float, codecs.read_float, nested=False),
    Codec(str, "str", codecs.write_text, codecs.read_text, nested=False),
    Codec(dict, "dict", codecs.write_pairs, codecs.read_pairs),
):
    _READ[_codec.tag] = _codec
_LOWER |= {
    NoneType: _same,
    bool: _same,
    int: _lower_int,
    float: _lower_float,
    str: _lower_text,
    list: _lower_list,
    dict: _lower_dict,
    TensorRef: _lower_tensor,
}  # type: ignore[dict-item]
