"""Reading other people's pickles without running any of them.

A pickle is a small program. This reader knows the instructions that build plain values, and takes classes and
functions only by name: what an allowed one would have made becomes an inert `Made`, with what it would have been given.
Nothing is imported, looked up or called, whatever the file says; all other names are refused. Memory is bounded by the
file's size.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from zerostall.core.inert import CONTAINERS, Global, Made, contained, plain_key
from zerostall.core.quoting import clip, quote
from zerostall.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from zerostall.core.inert import Name

MAX_PICKLE = 1 << 30
"""The largest pickle that is read, in bytes."""


def read(
    data: bytes, allowed: Collection[Name], *, persistent: Callable[[object], object] | None = None, source: str
) -> object:
    """Return the value of a pickle.

    Args:
        allowed: the classes and functions that may be named, besides those of plain containers.
        persistent: what becomes of a persistent id, if the file may have such.
        source: what messages call it.

    Raises:
        FormatError: it is damaged, or names anything else.
    """
    if len(data) > MAX_PICKLE:
        raise FormatError(f"{source}: a pickle of {len(data)} bytes, more than {MAX_PICKLE}")
    machine = _Machine(data, frozenset(allowed), persistent)
    try:
        return machine.run()
    except FormatError as error:
        raise FormatError(f"{source}: {error.args[0]}", hint=error.hint) from None
    except (IndexError, KeyError, TypeError, ValueError, struct.error, RecursionError, OverflowError) as error:
        what = f"{type(error).__name__} at byte {machine.at}"
        raise FormatError(f"{source} is a damaged pickle: {clip(error) or what} ({what})") from None


class _Machine:
    """The stack machine that a pickle is a program for."""

    def __init__(self, data: bytes, allowed: frozenset[Name], persistent: Callable[[object], object] | None) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.allowed = allowed
        self.persistent = persistent

    def run(self) -> object:
        data, steps = self.data, _STEPS
        end = len(data)
        while self.at < end:
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                if len(self.stack) != 1 or self.marks:
                    raise FormatError("it ends with values left over")
                return self.stack[0]
            step = steps.get(code)
            if step is None:
                raise FormatError(f"instruction {code:#04x} at byte {self.at - 1} is not one that is read")
            step(self)
        raise FormatError("it ends too early")

    # ------------------------------------------------------------------------------------------ reading

    def take(self, count: int) -> bytes:
        begin = self.at
        if not 0 <= count <= len(self.data) - begin:
            raise FormatError("it ends too early")
        self.at = begin + count
        return self.data[begin : self.at]

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise FormatError("it ends too early")
        begin, self.at = self.at, end + 1
        return self.data[begin:end]

    # ------------------------------------------------------------------------------------------ the stack

    def pop(self) -> Any:
        if self.marks and self.marks[-1] == len(self.stack):
            raise FormatError("a value is taken from behind a mark")
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def remember(self, index: int) -> None:
        if index > len(self.data):
            raise FormatError("it remembers more than it has")
        self.memo[index] = self.stack[-1]

    # ------------------------------------------------------------------------------------------ making

    def named(self, module: object, name: object) -> Global:
        if type(module) is not str or type(name) is not str:
            raise FormatError("a class is named by something else than text")
        found = (module, name)
        if found not in CONTAINERS and found not in self.allowed:
            raise FormatError(
                f"it names {quote('.'.join(found))}: to read it, code would have to be run",
                hint="if you trust it, load it yourself and save plain tensors and values",
            )
        return Global(found)

    def make(self, what: object, args: object) -> object:
        if type(what) is not Global or type(args) is not tuple:
            raise FormatError("something that is no class is called")
        module, name = what.name
        if what.name in self.allowed:
            return Made(what.name, args)
        if module == "_codecs":
            text, encoding = args
            if type(text) is not str or encoding != "latin1":
                raise FormatError("bytes in an unknown encoding")
            return text.encode("latin1")
        return contained(name, args)

    def set_items(self, target: object, items: list[Any]) -> None:
        if not isinstance(target, dict) or len(items) % 2:
            raise FormatError("items are put into something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[plain_key(key)] = value


# ------------------------------------------------------------------------------------------------ instructions


def _constant(value: object) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _fresh(kind: type) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(kind())


def _integer(size: int, *, signed: bool = False) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.number(size, signed=signed))


def _long(size: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.number(machine.number(size), signed=True))


def _sized(size: int, convert: Callable[[bytes], object]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(convert(machine.take(machine.number(size))))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _put(size: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.remember(machine.number(size))


def _get(size: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.memo[machine.number(size)])


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        items = [machine.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(items)))

    return step


def _proto(machine: _Machine) -> None:
    if machine.number(1) > 5:
        raise FormatError("a pickle of a newer protocol")


def _mark(machine: _Machine) -> None:
    machine.marks.append(len(machine.stack))


def _append(machine: _Machine) -> None:
    value, target = machine.pop(), machine.stack[-1]
    if type(target) is not list:
        raise FormatError("something is appended to what is no list")
    target.append(value)


def _appends(machine: _Machine) -> None:
    items, target = machine.since_mark(), machine.stack[-1]
    if type(target) is not list:
        raise FormatError("something is appended to what is no list")
    target.extend(items)


def _add_items(machine: _Machine) -> None:
    items, target = machine.since_mark(), machine.stack[-1]
    if type(target) is not set:
        raise FormatError("something is added to what is no set")
    target.update(plain_key(item) for item in items)


def _set_item(machine: _Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items(machine.stack[-1], [key, value])


def _set_items(machine: _Machine) -> None:
    items = machine.since_mark()
    machine.set_items(machine.stack[-1], items)


def _tuple(machine: _Machine) -> None:
    machine.stack.append(tuple(machine.since_mark()))


def _list(machine: _Machine) -> None:
    machine.stack.append(machine.since_mark())


def _dict(machine: _Machine) -> None:
    made: dict[object, object] = {}
    machine.set_items(made, machine.since_mark())
    machine.stack.append(made)


def _frozenset(machine: _Machine) -> None:
    machine.stack.append(frozenset(plain_key(item) for item in machine.since_mark()))


def _pop(machine: _Machine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _pop_mark(machine: _Machine) -> None:
    machine.since_mark()


def _memoize(machine: _Machine) -> None:
    machine.remember(len(machine.memo))


def _text_put(machine: _Machine) -> None:
    machine.remember(int(machine.line()))


def _text_get(machine: _Machine) -> None:
    machine.stack.append(machine.memo[int(machine.line())])


def _text_int(machine: _Machine) -> None:
    line = machine.line()
    machine.stack.append({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line))


def _text_long(machine: _Machine) -> None:
    machine.stack.append(int(machine.line().removesuffix(b"L")))


def _text_float(machine: _Machine) -> None:
    machine.stack.append(float(machine.line()))


def _float(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _global(machine: _Machine) -> None:
    module = machine.line().decode()
    machine.stack.append(machine.named(module, machine.line().decode()))


def _stack_global(machine: _Machine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.stack.append(machine.named(module, name))


def _reduce(machine: _Machine) -> None:
    args, what = machine.pop(), machine.pop()
    machine.stack.append(machine.make(what, args))


def _new_object_with(machine: _Machine) -> None:
    names, args, what = machine.pop(), machine.pop(), machine.pop()
    if names != {}:
        raise FormatError("an object is made with named arguments")
    machine.stack.append(machine.make(what, args))


def _build(machine: _Machine) -> None:
    state, target = machine.pop(), machine.stack[-1]
    if type(target) is Made:
        target.state = state
    elif not isinstance(target, OrderedDict):  # a module's state_dict carries versions as an attribute
        raise FormatError("a state is given to a plain value")


def _persistent(machine: _Machine) -> None:
    pid = machine.pop()
    if machine.persistent is None:
        raise FormatError("it refers to something outside of itself")
    machine.stack.append(machine.persistent(pid))


_STEPS: dict[int, Callable[[_Machine], None]] = {
    ord("\x80"): _proto,
    ord("\x95"): lambda machine: void(machine.take(8)),
    ord("("): _mark,
    ord("0"): _pop,
    ord("1"): _pop_mark,
    ord("2"): lambda machine: machine.stack.append(machine.stack[-1]),
    ord("N"): _constant(None),
    ord("\x88"): _constant(True),
    ord("\x89"): _constant(False),
    ord("I"): _text_int,
    ord("L"): _text_long,
    ord("F"): _text_float,
    ord("J"): _integer(4, signed=True),
    ord("K"): _integer(1),
    ord("M"): _integer(2),
    ord("\x8a"): _long(1),
    ord("\x8b"): _long(4),
    ord("G"): _float,
    ord("X"): _sized(4, _text),
    ord("\x8c"): _sized(1, _text),
    ord("\x8d"): _sized(8, _text),
    ord("C"): _sized(1, bytes),
    ord("B"): _sized(4, bytes),
    ord("\x8e"): _sized(8, bytes),
    ord("\x96"): _sized(8, bytearray),
    ord("]"): _fresh(list),
    ord("}"): _fresh(dict),
    ord("\x8f"): _fresh(set),
    ord(")"): _constant(()),
    ord("a"): _append,
    ord("e"): _appends,
    ord("\x90"): _add_items,
    ord("s"): _set_item,
    ord("u"): _set_items,
    ord("t"): _tuple,
    ord("l"): _list,
    ord("d"): _dict,
    ord("\x91"): _frozenset,
    ord("\x85"): _tuple_of(1),
    ord("\x86"): _tuple_of(2),
    ord("\x87"): _tuple_of(3),
    ord("\x94"): _memoize,
    ord("p"): _text_put,
    ord("q"): _put(1),
    ord("r"): _put(4),
    ord("g"): _text_get,
    ord("h"): _get(1),
    ord("j"): _get(4),
    ord("c"): _global,
    ord("\x93"): _stack_global,
    ord("R"): _reduce,
    ord("\x81"): _reduce,
    ord("\x92"): _new_object_with,
    ord("b"): _build,
    ord("Q"): _persistent,
}


def void(value: object) -> None:
    """Take a value and do nothing with it."""
