"""How each type of small value that JSON lacks is written: its tag, and what stands behind the tag.

A codec writes a value as a payload of simpler values and reads it back; `core.values` does the walking.
Readers take payloads from files, so they check what they are given and raise TypeError, ValueError or
ArithmeticError at anything odd.
"""

from __future__ import annotations

import argparse
import datetime
import math
import pathlib
import re
import struct
from binascii import a2b_base64
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from types import EllipsisType, SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec

_HEX = re.compile("-?[0-9a-f]+")
# Reducing a fraction takes time that grows with the square of its length.
_MAX_FRACTION_BITS = 1 << 18


class Codec(msgspec.Struct, frozen=True):
    """How one exact type is written.

    Attributes:
        type: the type; values of its subclasses are not meant.
        tag: what names it in a file, without the `$`.
        write: value -> payload, of types that have codecs themselves or are JSON.
        read: payload -> value.
        nested: whether payloads hold values to be walked in turn, or are plain JSON as they are.
    """

    type: type
    tag: str
    write: Callable[..., object]
    read: Callable[..., object]
    nested: bool = True


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"found a {type(value).__name__} in place of a text")
    return value


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"found a {type(value).__name__} in place of an integer")
    return value


def _items(value: object, length: int | None = None) -> list[object]:
    if type(value) is not list or (length is not None and len(value) != length):
        raise ValueError("found something else in place of a list" + (f" of {length}" if length else ""))
    return value


def read_int(payload: object) -> int:
    """Read an integer of any size from lower-case hex. Takes time in proportion to its length."""
    text = _text(payload)
    if not _HEX.fullmatch(text):
        raise ValueError("found no hex number")
    return int(text, 16)


def write_float(value: float) -> str:
    """Write a float as the hex of its 8 bytes, the sign's first."""
    return struct.pack(">d", value).hex()


def read_float(payload: object) -> float:
    """Read a float from the hex of its 8 bytes, with sign and payload where it is no number."""
    data = bytes.fromhex(_text(payload))
    if len(data) != 8:
        raise ValueError("found no 8 bytes")
    return struct.unpack(">d", data)[0]


def write_text(value: str) -> bytes:
    """Write a text that is no valid Unicode as bytes, as UTF-8 would be if it had lone surrogates."""
    return value.encode("utf-8", "surrogatepass")


def read_text(payload: object) -> str:
    """Read a text that may have lone surrogates."""
    return _read_bytes(payload).decode("utf-8", "surrogatepass")


def _read_bytes(payload: object) -> bytes:
    return a2b_base64(_text(payload), strict_mode=True)


def _read_complex(payload: object) -> complex:
    real, imaginary = _items(payload, 2)
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("found something else in place of a float")
    return complex(real, imaginary)


def _read_set(payload: object) -> set[object]:
    items = _items(payload)
    result = set(items)
    if len(result) != len(items):
        raise ValueError("an element is there twice")
    return result


def read_pairs(payload: object) -> dict[object, object]:
    """Read a dict from a list of [key, value], in that order. ValueError where a key is there twice."""
    items = _items(payload)
    result: dict[object, object] = {}
    for item in items:
        key, value = _items(item, 2)
        result[key] = value
    if len(result) != len(items):
        raise ValueError("a key is there twice")
    return result


def write_pairs(value: Mapping[Any, object]) -> list[list[object]]:
    """Write any mapping as a list of [key, value], in its order."""
    return [[key, item] for key, item in value.items()]


_FACTORIES: dict[str, Callable[[], object] | None] = {
    "none": None,
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "set": set,
    "str": str,
    "tuple": tuple,
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}


def _write_defaultdict(value: defaultdict[object, object]) -> list[object]:
    name = _FACTORY_NAMES.get(value.default_factory)
    if name is None:
        raise TypeError(f"its default_factory is none of {', '.join(_FACTORIES)}")
    return [name, write_pairs(value)]


def _read_defaultdict(payload: object) -> defaultdict[object, object]:
    name, pairs = _items(payload, 2)
    if _text(name) not in _FACTORIES:
        raise ValueError("found an unknown default_factory")
    return defaultdict(_FACTORIES[_text(name)], read_pairs(pairs))


def _read_counter(payload: object) -> Counter[object]:
    result: Counter[object] = Counter()
    # Counter(...) and Counter.update would add where dict.update sets, and so refuse counts that are no
    # numbers.
    dict.update(result, read_pairs(payload))
    return result


def _read_deque(payload: object) -> deque[object]:
    maxlen, items = _items(payload, 2)
    elements = _items(items)
    if maxlen is not None and _integer(maxlen) < len(elements):
        raise ValueError("more elements than its maxlen")
    return deque(elements, None if maxlen is None else _integer(maxlen))


def _read_range(payload: object) -> range:
    start, stop, step = _items(payload, 3)
    return range(_integer(start), _integer(stop), _integer(step))


def _read_ellipsis(payload: object) -> EllipsisType:
    _items(payload, 0)
    return ...


_PATHS = {
    path.__name__: path
    for path in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def _write_path(value: pathlib.PurePath) -> list[object]:
    return [type(value).__name__, str(value)]


def _read_path(payload: object) -> pathlib.PurePath:
    name, text = _items(payload, 2)
    kind = _PATHS.get(_text(name))
    if kind is None:
        raise ValueError("found an unknown kind of path")
    if issubclass(kind, pathlib.Path) and kind is not type(pathlib.Path()):
        # The other operating system's paths exist here only as pure ones.
        kind = _PATHS["Pure" + kind.__name__]
    return kind(_text(text))


def _write_zone(zone: datetime.tzinfo | None) -> list[object] | None:
    if zone is None:
        return None
    if type(zone) is not datetime.timezone:
        raise TypeError(f"its time zone is a {type(zone).__name__}, only datetime.timezone can be stored")
    offset = zone.utcoffset(None)
    name = zone.tzname(None)
    # A zone that was given no name makes one of its offset.
    return [*_write_delta(offset), None if name == datetime.timezone(offset).tzname(None) else name]


def _read_zone(payload: object) -> datetime.timezone | None:
    if payload is None:
        return None
    *offset, name = _items(payload, 4)
    delta = _read_delta(offset)
    return datetime.timezone(delta) if name is None else datetime.timezone(delta, _text(name))


def _write_datetime(value: datetime.datetime) -> list[object]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _write_zone(value.tzinfo)]


def _read_datetime(payload: object) -> datetime.datetime:
    text, fold, zone = _items(payload, 3)
    value = datetime.datetime.fromisoformat(_text(text))
    return value.replace(fold=_integer(fold), tzinfo=_read_zone(zone))


def _write_time(value: datetime.time) -> list[object]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _write_zone(value.tzinfo)]


def _read_time(payload: object) -> datetime.time:
    text, fold, zone = _items(payload, 3)
    value = datetime.time.fromisoformat(_text(text))
    return value.replace(fold=_integer(fold), tzinfo=_read_zone(zone))


def _write_delta(value: datetime.timedelta) -> list[object]:
    return [value.days, value.seconds, value.microseconds]


def _read_delta(payload: object) -> datetime.timedelta:
    days, seconds, microseconds = _items(payload, 3)
    return datetime.timedelta(_integer(days), _integer(seconds), _integer(microseconds))


def _write_fraction(value: Fraction) -> list[object]:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_FRACTION_BITS:
        raise ValueError(f"a fraction of more than {_MAX_FRACTION_BITS} bits")
    return [value.numerator, value.denominator]


def _read_fraction(payload: object) -> Fraction:
    numerator, denominator = (_integer(item) for item in _items(payload, 2))
    if max(numerator.bit_length(), denominator.bit_length()) > _MAX_FRACTION_BITS or denominator < 1:
        raise ValueError("found no fraction")
    if math.gcd(numerator, denominator) != 1:
        raise ValueError("found a fraction that is not reduced")
    return Fraction(numerator, denominator)


def _read_namespace(kind: Callable[..., object]) -> Callable[[object], object]:
    def read(payload: object) -> object:
        attributes = read_pairs(payload)
        value = kind()
        for name, item in attributes.items():
            vars(value)[_text(name)] = item
        return value

    return read


def _write_namespace(value: object) -> list[list[object]]:
    return write_pairs(vars(value))


CODECS: tuple[Codec, ...] = (
    Codec(tuple, "tuple", list, lambda payload: tuple(_items(payload))),
    # Plain JSON has no order for a set's elements: `core.values` sorts them, so that equal sets have equal
    # files.
    Codec(set, "set", list, _read_set),
    Codec(frozenset, "frozenset", list, lambda payload: frozenset(_read_set(payload))),
    Codec(OrderedDict, "ordereddict", write_pairs, lambda payload: OrderedDict(read_pairs(payload))),
    Codec(defaultdict, "defaultdict", _write_defaultdict, _read_defaultdict),
    Codec(Counter, "counter", write_pairs, _read_counter),
    Codec(deque, "deque", lambda value: [value.maxlen, list(value)], _read_deque),
    Codec(slice, "slice", lambda value: [value.start, value.stop, value.step], lambda p: slice(*_items(p, 3))),
    Codec(SimpleNamespace, "namespace", _write_namespace, _read_namespace(SimpleNamespace)),
    Codec(argparse.Namespace, "arguments", _write_namespace, _read_namespace(argparse.Namespace)),
    Codec(complex, "complex", lambda value: [value.real, value.imag], _read_complex),
    Codec(range, "range", lambda value: [value.start, value.stop, value.step], _read_range),
    Codec(Fraction, "fraction", _write_fraction, _read_fraction),
    Codec(bytes, "bytes", bytes, _read_bytes, nested=False),
    Codec(bytearray, "bytearray", bytes, lambda payload: bytearray(_read_bytes(payload)), nested=False),
    Codec(EllipsisType, "ellipsis", lambda value: [], _read_ellipsis, nested=False),
    Codec(Decimal, "decimal", str, lambda payload: Decimal(_text(payload)), nested=False),
    Codec(UUID, "uuid", str, lambda payload: UUID(_text(payload)), nested=False),
    Codec(datetime.datetime, "datetime", _write_datetime, _read_datetime),
    Codec(datetime.time, "time", _write_time, _read_time),
    Codec(
        datetime.date,
        "date",
        datetime.date.isoformat,
        lambda payload: datetime.date.fromisoformat(_text(payload)),
        nested=False,
    ),
    Codec(datetime.timedelta, "timedelta", _write_delta, _read_delta, nested=False),
    *(Codec(path, "path", _write_path, _read_path) for path in _PATHS.values()),
)
"""The codecs of types that JSON lacks. Several types may share a tag, whose payload then tells them apart."""
