"""Dicts, lists and like containers of tensors, arrays and values, restored in place."""

from __future__ import annotations

import argparse
import types
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, cast

from zerostall.core import names, values
from zerostall.trainer.state import tensors
from zerostall.trainer.state.aim import same
from zerostall.trainer.state.refs import ArrayRef, Composite, PartRef, names_in
from zerostall.trainer.state.tree import LiveTree

if TYPE_CHECKING:
    from zerostall.trainer.state.aim import Aim, Landing
    from zerostall.trainer.state.walk import Walk

_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_REFS = (values.TensorRef, ArrayRef, Composite)
_ABSENT = object()


def _family(container: object) -> tuple[type, ...]:
    kind = type(container)
    return next((family for family in (_MAPPINGS, _SEQUENCES, _NAMESPACES) if kind in family), ())


def _items(container: object) -> dict[object, object]:
    family = _family(container)
    if family is _MAPPINGS:
        return cast("dict[object, object]", container)
    if family is _SEQUENCES:
        return dict(enumerate(cast("list[object]", container)))
    return cast("dict[object, object]", vars(container)) if family else {}


def _part(container: object, key: object) -> names.Part:
    return cast("names.Part", key) if _family(container) is not _MAPPINGS else values.part(key)


class ContainerPart:
    """A container of the user's, and everything in it that is no part of its own."""

    kind = "container"
    still = False

    def __init__(self, name: str, root: object) -> None:
        self.name = name
        self.root = root
        self._tree = LiveTree(name)
        self._own: list[str] = []
        self._parts: set[int] = set()
        self._composites: dict[int, Composite] = {}
        self._structural: set[int] = set()
        self._stored: object = _ABSENT

    def gather(self, walk: Walk) -> None:
        first = len(walk.leaves)
        self._tree.gather(walk, self.root)
        own = {name for ref in self._tree.refs for name in names_in(ref)}
        found = list(zip(self._tree.held, self._tree.refs, strict=True))
        self._parts = {id(held) for held, ref in found if isinstance(ref, PartRef)}
        self._composites = {id(held): ref for held, ref in found if isinstance(ref, Composite)}
        self._own = [leaf.name for leaf in walk.leaves[first:] if leaf.name in own]

    def values(self) -> object:
        return self._tree.copy(self.root)

    def signs(self) -> None:
        return None

    # Before anything is written -------------------------------------------------------------------------------

    def aim(self, aim: Aim) -> None:
        for name in self._own:
            aim.want(name)
        stored = aim.part(self)
        self._structural.clear()
        self._note_structure(self.root)
        self._stored = _ABSENT if stored is None else stored.tree
        self._compare(aim, self.root, self._stored, self.name)

    def _note_structure(self, value: object) -> bool:
        """Remember the containers with a tensor or part below them: what they hold is compared key by key."""
        if not _family(value):
            return tensors.is_holder(value) or id(value) in self._parts
        below = [self._note_structure(item) for item in _items(value).values()]
        if any(below) or value is self.root:
            self._structural.add(id(value))
        return any(below)

    def _compare(self, aim: Aim, live: object, stored: object, name: str) -> None:
        if _family(live) and _items(live) and next(names_in(stored), None) is not None:
            self._structural.add(id(live))  # a tensor where there is none now is not slipped in
        if id(live) in self._structural and _family(live):
            if stored is not _ABSENT and _family(stored) is not _family(live):
                aim.differs(name, f"stored as {_describe(stored)}, the target is {_describe(live)}")
                return
            found = _items(stored)
            for key, item in _items(live).items():
                below = names.child(name, _part(live, key))
                self._compare(aim, item, found.get(key, _ABSENT), below)
        elif tensors.is_holder(live):
            if stored is _ABSENT:
                return
            if not isinstance(stored, _REFS):
                aim.differs(name, f"stored as {_describe(stored)}, the target is {_describe(live)}")
            elif isinstance(stored, Composite) and not same(stored, self._composites.get(id(live))):
                aim.differs(name, f"stored as {stored.kind} with other metadata than the target's")
        elif id(live) in self._parts:
            pass  # a part asks for itself
        else:
            aim.want_value(name, stored=stored is not _ABSENT)
            if stored is _ABSENT or next(names_in(stored), None) is None or not aim.selection.takes(name):
                return
            if live is None or _family(live):
                for ref in names_in(stored):
                    aim.tensor(ref, None)
            else:
                aim.differs(name, f"stored as {_describe(stored)}, the target is {_describe(live)}")

    # When the bytes have landed -------------------------------------------------------------------------------

    def accept(self, landing: Landing) -> None:
        if self._stored is not _ABSENT:
            self._pour(landing, self.root, self._stored, self.name)
        elif landing.aim.replaced:
            self._pour(landing, self.root, _ABSENT, self.name)
        self._stored = _ABSENT

    def _pour(self, landing: Landing, live: object, stored: object, name: str) -> object:
        """Put what is stored into `live`; return what stands in its place: itself, wherever it can be changed."""
        if id(live) in self._structural:
            return self._pour_structure(landing, live, stored, name)
        if tensors.is_holder(live):
            return landing.aim.replaced.get(name, live)
        if id(live) in self._parts:
            return live
        if stored is _ABSENT or not landing.selection.takes(name):
            return live
        if any(not landing.has(ref) for ref in names_in(stored)):
            return live
        return _renew(live, landing.resolve(stored))

    def _pour_structure(self, landing: Landing, live: object, stored: object, name: str) -> object:
        found = _items(stored)
        mine = dict(_items(live))
        made = {
            key: self._pour(landing, item, found.get(key, _ABSENT), names.child(name, _part(live, key)))
            for key, item in mine.items()
        }
        for key, item in found.items():
            new = key not in mine and next(names_in(item), None) is None
            if new and landing.selection.takes(names.child(name, _part(stored, key))):
                made[key] = landing.resolve(item)
        changed = {key: item for key, item in made.items() if key not in mine or mine[key] is not item}
        if not changed:
            return live
        if _family(live) is _MAPPINGS:
            cast("dict[object, object]", live).update(changed)
        elif _family(live) is _NAMESPACES:
            vars(live).update(cast("dict[str, object]", changed))
        elif type(live) is tuple:
            return tuple(made.values())
        else:
            items = cast("list[object]", live)
            for key, item in changed.items():
                if cast("int", key) < len(mine):
                    items[cast("int", key)] = item
                else:
                    items.append(item)
        return live


def _renew(live: object, stored: object) -> object:
    """Make a container of values equal to the stored one without replacing it; return what to hold instead."""
    if type(live) is not type(stored):
        return stored
    if type(live) in _MAPPINGS:
        mine, theirs = cast("dict[object, object]", live), cast("dict[object, object]", stored)
        merged = {key: _renew(mine[key], item) if key in mine else item for key, item in theirs.items()}
        mine.clear()
        mine.update(merged)
        return live
    if type(live) is list:
        ours, theirs_list = cast("list[object]", live), cast("list[object]", stored)
        paired = [_renew(one, other) for one, other in zip(ours, theirs_list, strict=False)]
        ours[:] = [*paired, *theirs_list[len(paired) :]]
        return live
    if isinstance(live, deque) and live.maxlen == cast("deque[object]", stored).maxlen:
        live.clear()
        live.extend(cast("deque[object]", stored))
        return live
    if isinstance(live, set):
        live.clear()
        live.update(cast("set[object]", stored))
        return live
    if isinstance(live, bytearray):
        live[:] = cast("bytearray", stored)
        return live
    if type(live) in _NAMESPACES:
        vars(live).clear()
        vars(live).update(vars(stored))
        return live
    return stored


def _describe(value: object) -> str:
    return "a tensor" if isinstance(value, _REFS) or tensors.is_holder(value) else type(value).__name__
