"""Small values: whatever the tree, it comes back exactly, or its bad places are named."""

from __future__ import annotations

import argparse
import datetime
import decimal
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from zerostall.core import values
from zerostall.core.values import TensorRef
from zerostall.errors import FormatError, StateError

FLOATS = st.floats() | st.binary(min_size=8, max_size=8).map(lambda data: struct.unpack(">d", data)[0])
TEXT = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(["$tuple", "$", "tensor", "\ud800"])
ZONES = (
    st.none()
    | st.builds(
        datetime.timezone,
        st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
        st.just("Zone") | st.just("UTC"),
    )
    | st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)).map(datetime.timezone)
)
HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | FLOATS
    | TEXT
    | st.binary(max_size=6)
    | st.builds(complex, FLOATS, FLOATS)
    # A signaling NaN has no hash.
    | st.decimals().filter(lambda number: not number.is_snan())
    | st.fractions()
    | st.uuids()
    | st.dates()
    | st.timedeltas()
    | st.datetimes(timezones=ZONES)
    | st.times(timezones=ZONES)
    | st.builds(range, st.integers(), st.integers(), st.integers(1))
    | st.just(...)
    | TEXT.filter(lambda text: "\0" not in text).map(pathlib.PurePosixPath)
    | TEXT.map(pathlib.PureWindowsPath)
    | st.just(pathlib.Path("a/b")),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
TREES = st.recursive(
    HASHABLE | st.builds(TensorRef, NAMES) | st.binary(max_size=6).map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(TEXT, inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(lambda items: defaultdict(list, items))
        | st.dictionaries(HASHABLE, st.integers(), max_size=3).map(Counter)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 9))
        | st.dictionaries(TEXT, inner, max_size=3).map(lambda items: SimpleNamespace(**items))
        | st.dictionaries(TEXT, inner, max_size=3).map(lambda items: argparse.Namespace(**items))
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=20,
)


def same(one: object, other: object) -> bool:
    """Equal in type, order and every bit; sets in what is in them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
            return False
        return same(list(one.items()), list(other.items()))
    if isinstance(one, deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        rest = list(other)
        return len(one) == len(rest) and all(any(same(item, found) for found in rest) for item in one)
    if isinstance(one, (SimpleNamespace, argparse.Namespace)):
        return same(list(vars(one).items()), list(vars(other).items()))
    if isinstance(one, slice):
        return same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    if isinstance(one, (datetime.datetime, datetime.time)):
        return (str(one), one.fold, one.tzname()) == (str(other), other.fold, other.tzname())
    if isinstance(one, decimal.Decimal):
        return one.as_tuple() == other.as_tuple()
    return one == other


@given(TREES)
@settings(max_examples=300)
def test_a_tree_comes_back_exactly(tree: object):
    document = values.encode(tree)
    read = values.decode(document, TensorRef)
    assert same(read, tree)
    assert bytes(values.encode(read)) == bytes(document)


@given(TREES)
def test_a_document_is_plain_json(tree: object):
    text = bytes(values.encode(tree))
    text.decode()
    # Any other JSON reader and writer may stand in between.
    again = msgspec.json.encode(msgspec.json.decode(text))
    assert same(values.decode(again, TensorRef), tree)


class Odd:
    pass


@given(st.lists(st.sampled_from(["a", "b.c", "", 0, 3, "\ud800"]), max_size=5), TREES)
def test_what_cannot_be_stored_is_named(path: list[str | int], good: object):
    tree: object = Odd()
    for part in reversed(path):
        tree = {"good": good, part: tree}
    name = "root"
    for part in path:
        name = values.names.child(name, part)
    try:
        values.encode(tree, "root")
    except StateError as error:
        assert f"{name}: of type" in str(error) and "Odd" in str(error)
    else:
        raise AssertionError


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.tuples(st.sampled_from([f"${tag}" for tag in values._READ]), inner).map(lambda item: dict([item]))
        | st.lists(st.tuples(inner, inner).map(list), max_size=3)
    ),
    max_leaves=25,
)


@given(JSON)
@settings(max_examples=500)
def test_json_that_nothing_wrote_is_read_or_refused(json: object):
    try:
        tree = values.decode(msgspec.json.encode(json), TensorRef)
    except FormatError:
        return
    assert same(values.decode(values.encode(tree), TensorRef), tree)


@given(
    st.binary(max_size=50)
    | st.text(max_size=50).map(str.encode)
    | st.text('[]{}":,$tuple0', max_size=60).map(str.encode)
)
def test_bytes_that_nothing_wrote_are_read_or_refused(data: bytes):
    try:
        values.decode(data, TensorRef)
    except FormatError:
        pass
