"""A tree of containers the user may change at any time: the tensors found in it, and copies of its values."""

from __future__ import annotations

import argparse
import types
from collections import Counter, OrderedDict, defaultdict, deque
from operator import is_
from typing import TYPE_CHECKING, cast

import torch

from zerostall.core import names, values
from zerostall.core.values import TensorRef
from zerostall.errors import StateError
from zerostall.trainer.state import tensors
from zerostall.trainer.state.refs import ArrayRef, PartRef, SmallTensor, is_generator_state
from zerostall.trainer.state.walk import OutdatedError
from zerostall.trainer.state.writes import as_tensor, copy_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerostall.trainer.state.tensors import Holder
    from zerostall.trainer.state.walk import Walk

MAX_DEPTH = 60
"""How deep containers may be nested; reading has such a limit too."""

_MAX_ASIDE = 1 << 20  # of a tensor in a container: the user may have replaced a large one for good, just once
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_INLINE = object()  # stands in `held` for a generator's state: a new tensor at every look, copied into the values


def step_into(container: object) -> Iterator[tuple[names.Part, object]]:
    """Yield (part of the path, item) for a container that may hold tensors; TypeError for a key no name can hold."""
    if isinstance(container, dict):
        for key, value in container.items():
            yield values.part(key), value
    elif isinstance(container, (list, tuple, deque)):
        yield from enumerate(container)
    else:
        yield from vars(container).items()


def is_value(value: object) -> bool:
    """Return whether a leaf of a tree can be stored as a small value."""
    try:
        values.draft(value)
    except StateError:
        return False
    return True


def alike(one: Holder, other: Holder) -> bool:
    """Return whether one plain tensor or array could take the other's place in an image."""
    return (
        type(one) is type(other)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and (not isinstance(one, torch.Tensor) or one.device == cast("torch.Tensor", other).device)
    )


class Aside:
    """Memory of our own for a tensor that is another object at every look; filled at each look."""

    def __init__(self, value: Holder) -> None:
        self.holder: Holder = (
            torch.empty_like(value.detach(), memory_format=torch.contiguous_format)
            if isinstance(value, torch.Tensor)
            else value.copy()
        )
        self.take(value)

    def take(self, value: Holder) -> bool:
        """Copy what the tensor holds now; False where it is no longer of that type and shape."""
        if not alike(self.holder, value):
            return False
        copy_into(self.holder, as_tensor(value))
        return True


class LiveTree:
    """Remembers the tensors and parts a walk found in a tree, in order, and copies the values between them.

    `own_states`: copy generator states (small uint8 tensors that state_dict() makes anew each time) as values.
    `dotted`: keys of the outermost dict are paths with dots, as those of a module's state_dict().
    """

    def __init__(self, name: str, *, own_states: bool = False, dotted: bool = False) -> None:
        self.name = name
        self.own_states = own_states
        self.dotted = dotted
        self.held: list[object] = []
        self.refs: list[object] = []
        self._at = 0
        self._fresh: list[str] = []

    def gather(self, walk: Walk, tree: object) -> None:
        """Tell the walk every tensor and part in the tree, and refuse what is neither these nor a value."""
        self.held.clear()
        self.refs.clear()
        self._gather(walk, tree, self.name, [])

    def _gather(self, walk: Walk, value: object, name: str, above: list[int]) -> None:
        kind = type(value)
        if kind in _CONTAINERS:
            if id(value) in above or len(above) >= MAX_DEPTH:
                walk.refuse(name, "is nested too deep or holds itself")
                return
            above.append(id(value))
            try:
                for part, item in step_into(value):
                    self._gather(walk, item, self._child(name, part), above)
            except (TypeError, ValueError) as error:  # a key that cannot be stored
                walk.refuse(name, f"holds {error}")
            above.pop()
        elif isinstance(value, torch.Tensor) and self.own_states and is_generator_state(value):
            self._hold(_INLINE, None)
        elif tensors.is_holder(value):
            if name in walk.fresh:
                aside = Aside(value)
                self._hold(aside, walk.tensor(name, aside.holder))
            else:
                self._hold(value, walk.tensor(name, value))
        elif kind not in _ATOMS and not is_value(value):
            if walk.visit(name, value):
                self._hold(value, PartRef(name))
            else:
                walk.refuse(name, f"is a {kind.__module__}.{kind.__qualname__}")

    def _child(self, name: str, part: names.Part) -> str:
        if self.dotted and name == self.name and isinstance(part, str):
            for key in part.split("."):
                name = names.child(name, key)
            return name
        return names.child(name, part)

    def _hold(self, value: object, ref: object) -> None:
        self.held.append(value)
        self.refs.append(ref)

    def copy(self, tree: object) -> object:
        """Return a copy that later changes cannot reach, with refs for tensors. OutdatedError if those are others."""
        self._at = 0
        fresh = self._fresh = []
        made = self._copy(tree)
        if fresh or self._at != len(self.held):
            raise OutdatedError(self.name, tuple(fresh))
        return made

    def _copy(self, value: object) -> object:
        kind = type(value)
        if kind in _ATOMS:
            return value
        copier = _COPIERS.get(kind)
        if copier is not None:
            return copier(self, value)
        at = self._at
        if at < len(self.held):
            self._at = at + 1
            held, ref = self.held[at], self.refs[at]
            if held is value:
                return ref
            if held is _INLINE and isinstance(value, torch.Tensor) and is_generator_state(value):
                return SmallTensor.of(value)
            if isinstance(ref, (TensorRef, ArrayRef)) and tensors.is_holder(value):
                if isinstance(held, Aside):
                    if held.take(value):
                        return ref
                elif tensors.is_holder(held) and alike(held, value) and (self.own_states or value.nbytes <= _MAX_ASIDE):
                    self._fresh.append(ref.name)
                    return ref
            self._at = at
        if is_value(value) and not isinstance(value, torch.Tensor):
            if tensors.is_array(value):
                return value.copy()  # of a type that no image holds: dates, texts
            return value  # what is not among the containers above is immutable
        raise OutdatedError(self.name)

    def _dict(self, value: dict[object, object]) -> dict[object, object]:
        kinds = set(map(type, value.values()))
        if kinds <= _ATOMS:
            return value.copy()
        if kinds <= _TENSORS:
            start, stop = self._at, self._at + len(value)
            # Compared by identity in C: == on tensors would compute, and wait for a GPU.
            if stop <= len(self.held) and all(map(is_, value.values(), self.held[start:stop])):
                self._at = stop
                return dict(zip(value, self.refs[start:stop], strict=True))
        copy = self._copy
        return {key: copy(item) for key, item in value.items()}

    def _list(self, value: list[object]) -> list[object]:
        if _ATOMS.issuperset(map(type, value)):
            return value.copy()
        return [self._copy(item) for item in value]

    def _tuple(self, value: tuple[object, ...]) -> tuple[object, ...]:
        if _ATOMS.issuperset(map(type, value)):
            return value
        return tuple([self._copy(item) for item in value])

    def _ordered(self, value: OrderedDict[object, object]) -> object:
        return OrderedDict((key, self._copy(item)) for key, item in value.items())

    def _default(self, value: defaultdict[object, object]) -> object:
        return defaultdict(value.default_factory, {key: self._copy(item) for key, item in value.items()})

    def _deque(self, value: deque[object]) -> object:
        return deque([self._copy(item) for item in value], value.maxlen)

    def _namespace(self, value: types.SimpleNamespace | argparse.Namespace) -> object:
        return type(value)(**{key: self._copy(item) for key, item in vars(value).items()})

    def _flat(self, value: set[object] | bytearray | Counter[object]) -> object:
        return value.copy()


_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.Size})
_COPIERS: dict[type, Callable[..., object]] = {
    dict: LiveTree._dict,
    list: LiveTree._list,
    tuple: LiveTree._tuple,
    OrderedDict: LiveTree._ordered,
    defaultdict: LiveTree._default,
    deque: LiveTree._deque,
    types.SimpleNamespace: LiveTree._namespace,
    argparse.Namespace: LiveTree._namespace,
    set: LiveTree._flat,
    bytearray: LiveTree._flat,
    Counter: LiveTree._flat,
}
MUTABLE = frozenset({dict, list, OrderedDict, defaultdict, deque, types.SimpleNamespace, argparse.Namespace})
"""Containers that can be restored in place."""
_CONTAINERS = MUTABLE | {tuple}
