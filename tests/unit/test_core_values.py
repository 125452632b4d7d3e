"""Small values: every type comes back exactly, anything else is refused by name."""

from __future__ import annotations

import argparse
import datetime
import enum
import math
import random
import struct
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from uuid import UUID

import msgspec
import pytest

from zerostall.core import values
from zerostall.core.names import Key
from zerostall.core.values import TensorRef
from zerostall.errors import FormatError, StateError


def again(tree: object) -> object:
    document = values.encode(tree)
    read = values.decode(document, TensorRef)
    assert bytes(values.encode(read)) == bytes(document)
    return read


def test_every_type_comes_back_as_it_was():
    utc = datetime.UTC
    zone = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "IST")
    tree = [
        None,
        True,
        False,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        2**63,
        -(10**40),
        0.5,
        1e300,
        5e-324,
        "",
        "é\n\0",
        "$x",
        b"",
        b"\0\xff",
        bytearray(b"ab"),
        [],
        [[1]],
        (),
        (1, (2,)),
        {},
        {"a": {"b": 1}},
        {"$a": 1},
        {1: "i", "1": "s", (1, 2): 3},
        {None: 1, 2.5: 2, False: 3, b"x": 4},
        set(),
        {"one"},
        frozenset({(1, 2)}),
        OrderedDict(b=1, a=2),
        defaultdict(list, {"a": [1]}),
        defaultdict(None, {1: 2}),
        Counter("aab"),
        Counter({"x": -1}),
        deque([1, 2], maxlen=3),
        deque(),
        deque(maxlen=0),
        range(0, 10**30, 3),
        slice(None, 5, 2),
        ...,
        Path("a/b"),
        PurePosixPath("/x"),
        PureWindowsPath("c:\\x"),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.datetime(1, 1, 1, tzinfo=utc),
        datetime.datetime(2024, 1, 1, fold=1, tzinfo=zone),
        datetime.date(2024, 1, 2),
        datetime.time(23, 59, 59, 999999, zone),
        datetime.timedelta(-1, 5, 7),
        Decimal("1.10"),
        Decimal("-0"),
        Decimal("1E+1000"),
        Fraction(-3, 7),
        UUID(int=5),
        SimpleNamespace(a=1, b=[2]),
        argparse.Namespace(x=(1,)),
        TensorRef("model.w"),
        complex(1.5, -0.0),
        "\ud800",
        {"\ud800": 1},
        random.Random(5).getstate(),
    ]
    for value in tree:
        read = again(value)
        assert type(read) is type(value)
        assert read == value, value
        assert repr(read) == repr(value)
    assert repr(again(tree)) == repr(tree)


def test_integers_of_any_size_come_back():
    for value in (1 << 100_000, -(1 << 1_000_000), 2**64, -(2**63) - 1):
        assert again([value]) == [value]


def test_order_and_inner_types_are_kept():
    read = again({"z": 1, "a": 2, 5: 3})
    assert list(read) == ["z", "a", 5]
    default = again(defaultdict(set, {"a": {1}}))
    assert default.default_factory is set
    assert again(deque([1], maxlen=7)).maxlen == 7
    assert type(again({True: 1}).popitem()[0]) is bool
    aware = again(datetime.datetime(2024, 1, 1, fold=1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "X")))
    assert aware.fold == 1 and aware.tzname() == "X"


@pytest.mark.parametrize(
    "bits", [0, 1 << 63, 0x7FF0 << 48, 0xFFF0 << 48, 0x7FF8 << 48, 0x7FF8000000000001, 0xFFF8DEADBEEF0000, 1]
)
def test_floats_keep_every_bit(bits: int):
    value = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    read = again([value, {"k": value}, (complex(value, value),)])
    for found in (read[0], read[1]["k"], read[2][0].real, read[2][0].imag):
        assert struct.pack(">d", found) == bits.to_bytes(8, "big")


def test_equal_sets_have_equal_documents():
    # Both hash to the same slot of a small table, so that their order is the one they were added in.
    one, other = {8, 0}, {0, 8}
    assert list(one) != list(other)
    assert bytes(values.encode(one)) == bytes(values.encode(other))


def test_plain_values_are_plain_json():
    document = values.encode({"lr": 0.001, "betas": (0.9, 0.999), "n": 3, "x": None, "names": ["a"]})
    assert bytes(document) == b'{"lr":0.001,"betas":{"$tuple":[0.9,0.999]},"n":3,"x":null,"names":["a"]}'


def test_a_draft_does_not_follow_later_changes():
    tree = {"a": [1], "b": bytearray(b"x"), "s": {1}}
    draft = values.draft(tree)
    tree["a"].append(2)
    tree["b"][0] = 0
    tree["s"].add(2)
    tree["c"] = 1
    assert values.decode(draft.encode(), TensorRef) == {"a": [1], "b": bytearray(b"x"), "s": {1}}


def test_tensors_are_asked_for_by_name():
    document = values.encode({"a": [TensorRef("x.a[0]")]})
    assert values.decode(document, {"x.a[0]": "tensor"}.__getitem__) == {"a": ["tensor"]}
    with pytest.raises(KeyError):
        values.decode(document, {}.__getitem__)


class Mode(enum.IntEnum):
    A = 1


class Text(str):
    pass


def test_everything_else_is_refused_with_every_path_and_type():
    point = namedtuple("point", "x")
    tree = {
        "f": lambda: 0,
        "ok": 1,
        "l": [1, object(), (Mode.A,)],
        "a.b": {"": point(1)},
        "d": defaultdict(lambda: 0),
        "t": Text("x"),
        3: {object(): 1},
        "s": {Mode.A},
        "n": SimpleNamespace(q=print),
        "z": datetime.datetime(2024, 1, 1, tzinfo=type("Zone", (datetime.tzinfo,), {})()),
    }
    with pytest.raises(StateError) as caught:
        values.encode(tree, "root")
    text = str(caught.value)
    for words in (
        "root.f: of type function",
        "root.l[1]: of type object",
        "root.l[2][0]: of type",
        "Mode",
        r"root.a\.b.\e: of type",
        "point",
        "root.d: of type collections.defaultdict: its default_factory",
        "root.t: of type",
        "Text",
        "root[3]: a key of type object",
        "root.s: of type",
        "root.n.q: of type builtin_function_or_method",
        "root.z: of type datetime.datetime: its time zone is a Zone",
    ):
        assert words in text, text
    assert "root.ok" not in text
    assert "hint:" in text


def test_values_that_contain_themselves_are_refused():
    loop: list[object] = []
    loop.append({"a": (loop,)})
    with pytest.raises(StateError, match="inside itself"):
        values.encode(loop)
    deep: object = 1
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(StateError, match="nested"):
        values.encode(deep)


def test_what_is_just_not_too_deep_comes_back():
    deep: object = 1
    for _ in range(values.MAX_DEPTH):
        deep = [deep]
    assert again(deep) == deep
    with pytest.raises(StateError):
        values.encode([deep])
    pairs: object = 1
    for _ in range(values.MAX_DEPTH // 3):
        pairs = {(1,): pairs}
    assert again(pairs) == pairs


REFUSED = r"""
{"$nope":1}
{"$tuple":1}
{"$tuple":[],"a":1}
{"a":1,"$b":2}
{"$int":"x"}
{"$int":5}
{"$int":""}
{"$float":"00"}
{"$float":"zz"}
{"$str":"!"}
{"$bytes":"a"}
{"$bytes":[1]}
{"$set":[[]]}
{"$set":[1,1]}
{"$dict":[[1,2],[1,3]]}
{"$dict":[[1]]}
{"$dict":[[[],1]]}
{"$dict":{"a":1}}
{"$defaultdict":["eval",[]]}
{"$defaultdict":[[],[]]}
{"$deque":[1,[1,2]]}
{"$deque":[-1,[]]}
{"$deque":[1e3,[]]}
{"$deque":[{"$int":"8000000000000000"},[]]}
{"$range":[0,1,0]}
{"$range":[0,1.5,1]}
{"$slice":[1]}
{"$ellipsis":1}
{"$path":["Popen","x"]}
{"$path":["PurePosixPath",1]}
{"$datetime":["x",0,null]}
{"$datetime":["2024-01-01T00:00:00",2,null]}
{"$datetime":["2024-01-01T00:00:00",0,[9,0,0,null]]}
{"$time":["25:00",0,null]}
{"$date":"2024-02-30"}
{"$timedelta":[99999999999,0,0]}
{"$timedelta":[1.5,0,0]}
{"$decimal":"1x"}
{"$decimal":"1e99999999999999999999999"}
{"$fraction":[1,0]}
{"$fraction":[2,4]}
{"$fraction":[1,-2]}
{"$uuid":"x"}
{"$namespace":[[1,2]]}
{"$arguments":{}}
{"$complex":[1,2]}
{"$complex":[1.5]}
{"$tensor":5}
{
[1,
"\ud800"
nan
{"$tuple":[{"$tuple":5}]}
{"$counter":[["a"]]}
{"$frozenset":"ab"}
{"$ordereddict":[["a",1],["a",2]]}
"""
DEEP = ("[" * 300 + "]" * 300, "[" * 100_000, '{"$tuple":' * 2000)


@pytest.mark.parametrize("text", ["", *REFUSED.split(), *DEEP])
def test_documents_that_nothing_wrote_are_refused(text: str):
    with pytest.raises(FormatError):
        values.decode(text.encode(), TensorRef)


class Size(tuple):
    pass


def write_size(value: Size) -> object:
    return list(value)


def read_size(payload: object) -> Size:
    if type(payload) is not list:
        raise TypeError("no list")
    return Size(payload)


def test_registered_types_come_back():
    values.register(Size, "test.Size", write_size, read_size)
    values.register(Size, "test.Size", write_size, read_size)
    assert type(again((Size((1, 2)),))[0]) is Size
    assert again({Size((1,)): 1}) == {Size((1,)): 1}
    with pytest.raises(FormatError):
        values.decode(b'{"$test.Size":5}', TensorRef)
    for kind, tag in (
        (Size, "test.Other"),
        (Text, "test.Size"),
        (int, "test.int"),
        (Text, "tuple"),
        (Text, "Test.x"),
        (Text, "$.x"),
    ):
        with pytest.raises(ValueError):
            values.register(kind, tag, write_size, read_size)


def test_a_registered_type_that_cannot_be_written_is_named():
    def refuse(value: object) -> object:
        raise TypeError("not this one")

    values.register(Mode, "test.Mode", refuse, lambda payload: Mode.A)
    try:
        with pytest.raises(StateError, match=r"x: of type .*Mode: not this one"):
            values.encode({"x": Mode.A})
    finally:
        del values._LOWER[Mode], values._READ["test.Mode"], values._TYPES["test.Mode"]


def test_keys_make_parts():
    assert values.part("a") == "a" and values.part(3) == 3
    assert (
        values.part(True) == Key("true")
        and values.part(None) == Key("null")
        and values.part((1, 2)) == Key('{"$tuple":[1,2]}')
    )
    with pytest.raises(TypeError):
        values.part(object())


def test_options_of_an_optimizer_take_microseconds():
    group = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "amsgrad": False,
        "foreach": None,
        "maximize": False,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "params": list(range(8)),
    }
    groups = [dict(group) for _ in range(3)]
    best = math.inf
    for _ in range(50):
        start = time.perf_counter()
        values.draft(groups)
        best = min(best, time.perf_counter() - start)
    assert best < 1e-3


def test_100_000_values_take_less_than_half_a_second():
    tree = {f"key{index}": index / 7 for index in range(100_000)}
    best = math.inf
    for _ in range(10):  # what other threads of this process take counts, too
        start = time.process_time()
        document = values.encode(tree)
        best = min(best, time.process_time() - start)
        if best < 0.5:
            break
    assert best < 0.5
    assert values.decode(document, TensorRef) == tree


def test_a_document_stands_in_a_message():
    class Message(msgspec.Struct):
        values: values.Document

    data = msgspec.json.encode(Message(values.encode({"a": (1,)})))
    assert data == b'{"values":{"a":{"$tuple":[1]}}}'
    assert values.decode(msgspec.json.decode(data, type=Message).values, TensorRef) == {"a": (1,)}
