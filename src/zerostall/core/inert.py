"""What is left of the classes and functions that a pickle names: their names, and what they would have been given."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any, TypeAlias, cast

from zerostall.errors import FormatError

Name: TypeAlias = tuple[str, str]
"""Module and name of a class or a function."""

_MAX_KEY_DEPTH = 8
_PLAIN = (str, int, float, bytes, bool, type(None))
_BUILTINS = ("builtins", "__builtin__")  # the second as protocol 2 spells it
_KINDS = ("set", "frozenset", "complex", "bytes", "bytearray", "dict", "list", "tuple", "int", "float", "str", "bool")
CONTAINERS: frozenset[Name] = frozenset(
    {
        *(("collections", name) for name in ("OrderedDict", "Counter", "defaultdict")),
        *((module, name) for module in _BUILTINS for name in _KINDS),
        ("_codecs", "encode"),
    }
)
"""Plain containers and numbers, which any pickle may name."""


class Global:
    """A class or a function that a pickle names."""

    __slots__ = ("name",)

    def __init__(self, name: Name) -> None:
        self.name = name


class Made:
    """What a class or a function would have made of these arguments, and the state it would have been given."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: Name, args: tuple[object, ...]) -> None:
        self.name = name
        self.args = args
        self.state: object = None

    def field(self, name: str) -> object:
        """An attribute of an object whose state is the dict of its attributes; None where it has none of that name."""
        return cast("dict[object, object]", self.state).get(name) if type(self.state) is dict else None


def contained(name: str, args: tuple[object, ...]) -> object:
    """Plain containers and numbers, of plain arguments of the right types."""
    first = args[0] if args else None
    if name in ("OrderedDict", "dict", "Counter") and (not args or type(first) in (dict, list)):
        made: dict[object, object] = {"OrderedDict": OrderedDict, "dict": dict, "Counter": Counter}[name]()
        pairs = first.items() if type(first) is dict else cast("list[tuple[object, object]]", first or [])
        for pair in pairs:
            key, value = pair
            made[plain_key(key)] = value
        return made
    if name == "defaultdict" and len(args) == 1:
        if first is None:
            return defaultdict(None)
        kinds = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str, "bool": bool}
        kind = kinds.get(first.name[1]) if type(first) is Global and first.name[0] in _BUILTINS else None
        if kind is not None:
            return defaultdict(kind)
    if name in ("set", "frozenset") and len(args) <= 1 and (not args or type(first) in (list, tuple)):
        items = [plain_key(item) for item in cast("list[object]", first or [])]
        return set(items) if name == "set" else frozenset(items)
    if name in ("list", "bytes") and not args:
        return [] if name == "list" else b""
    if name == "complex" and len(args) == 2 and all(type(part) is float for part in args):
        return complex(cast("float", args[0]), cast("float", args[1]))
    if name == "bytearray" and (not args or type(first) is bytes):
        return bytearray(cast("bytes", first or b""))
    raise FormatError(f"a {name} is made of something else than plain values")


def plain_key(key: Any, depth: int = 0) -> Any:
    """A value that is a key. Only shallow ones: to hash a tuple is to go through all that is in it."""
    kind = type(key)
    if kind in _PLAIN or kind is Made or kind is complex:
        return key
    if kind in (tuple, frozenset) and depth < _MAX_KEY_DEPTH and len(key) < 1000:
        for item in key:
            plain_key(item, depth + 1)
        return key
    raise FormatError(f"a {kind.__name__} is a key, or a tuple that is too deep")
