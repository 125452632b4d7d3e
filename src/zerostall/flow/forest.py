"""Somebody's nested dicts of tensors and values as a state of ours: parts, names of tensors, small values.

What looks like the state of a module (tensors by dotted names) becomes one, what looks like that of an optimizer whose
parameters have names becomes one too, so that `restore` puts both back into modules and optimizers. All else is a
container, and comes back as it was.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from zerostall.core import names as paths
from zerostall.core import values
from zerostall.core.inert import Global, Made
from zerostall.core.layout import View
from zerostall.core.mosaic import Tile, row_major
from zerostall.core.shards import DISTINCT
from zerostall.core.values import TensorRef
from zerostall.errors import FormatError, StateError
from zerostall.flow.readable import Assembled, Cast
from zerostall.flow.torch_archive import Loose
from zerostall.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerostall.core.exchange import ImportOptions
    from zerostall.core.values import Document
    from zerostall.flow.readable import Convert, Readable

if TYPE_CHECKING:
    Inert = Callable[[Made | Global], object]
    """What becomes of torch's data types and devices among the values."""

REST = "rest"
"""Root of what lies at the outermost level of a file and is neither a tensor nor a container."""

_DROPPED = object()
_MAX_DEPTH = 60


@dataclass(slots=True)
class Harvest:
    """What is to be stored.

    Attributes:
        tensors: by full name.
        views: other names, and expanded tensors.
        parts: name → kind and tree.
    """

    tensors: dict[str, Readable] = field(default_factory=dict)
    views: list[View] = field(default_factory=list)
    parts: dict[str, tuple[str, object]] = field(default_factory=dict)

    def values(self) -> Document:
        return values.encode({"parts": self.parts, "rng": None})


class Forest:
    """Takes in one root after the other.

    Args:
        inert: what becomes of torch's data types and devices among the values.
        convert: changes types, where the options ask for that.
    """

    def __init__(
        self,
        options: ImportOptions,
        convert: Convert | None = None,
        inert: Inert | None = None,
    ) -> None:
        self._options = options
        self._convert = convert
        self._inert = inert
        self._found: list[tuple[str, Loose]] = []
        self._trees: dict[str, tuple[str, object]] = {}

    def take(self, loaded: object) -> Harvest:
        """All that a file held, as `torch.load` would give it."""
        if is_module_state(loaded):
            self._module(self._options.root, cast("Mapping[str, Loose]", loaded))
        elif not isinstance(loaded, dict):
            self._container(self._options.root, loaded if isinstance(loaded, (list, Loose)) else {"value": loaded})
        elif not all(type(name) is str and name and not name.startswith("__") for name in loaded):
            self._container(self._options.root, cast("object", loaded))
        else:
            self._roots(cast("dict[str, object]", loaded))
        return self._harvest()

    # ------------------------------------------------------------------------------------------------- parts

    def _roots(self, loaded: dict[str, object]) -> None:
        rest: dict[object, object] = {}
        for name, value in loaded.items():
            root = paths.join((name,))
            if is_module_state(value):
                self._module(root, cast("Mapping[str, Loose]", value))
            elif is_optimizer_state(value):
                self._optimizer(root, cast("dict[str, object]", value))
            elif isinstance(value, (dict, list, Loose)):
                self._container(root, value)
            else:
                rest[name] = value
        if rest:
            free = REST
            while free in loaded:
                free += "_"
            self._container(free, rest)

    def _module(self, root: str, state: Mapping[str, Loose]) -> None:
        heads = {name.split(".", 1)[0] for name in state}
        if root in heads and (len(heads) == 1 or "optimizer" in heads):
            log.warning(
                "names of tensors begin with %s. already and become %s.%s.…, as of a module with a child of that name; "
                "root='' (--root '') keeps them as they are, as is right for what `zerostall export` has written",
                *(root,) * 3,
            )
        for name, tensor in state.items():
            self._found.append((full_name(name, root), tensor))
        for part in {str(paths.split(full_name(name, root))[0]) for name in state} if not root else {root}:
            self._trees[part] = ("module", {})

    def _optimizer(self, root: str, state: dict[str, object]) -> None:
        slots = cast("dict[str, dict[str, object]]", state["state"])
        for label, slot in slots.items():
            for key, value in slot.items():
                slot[key] = self._tree(full_name(f"{label}.{key}", root), value)
        groups = self._tree(paths.child(root, "param_groups"), state["param_groups"])
        tree = optimizer_record({"state": slots, "param_groups": groups}, TensorRef)
        self._trees[root] = ("optimizer", tree)

    def _container(self, root: str, value: object) -> None:
        self._trees[root] = ("container", self._tree(root, value))

    def _tree(self, name: str, value: object, depth: int = 0) -> object:
        if depth > _MAX_DEPTH:
            raise FormatError(f"{name}: nested deeper than {_MAX_DEPTH}")
        if isinstance(value, Loose):
            self._found.append((name, value))
            return TensorRef(name)
        if isinstance(value, (Made, Global)):
            if self._inert is None:
                raise FormatError(f"{name}: {'.'.join(value.name)} can be read where torch is installed")
            return self._inert(value)
        if isinstance(value, dict):
            return self._dict(name, cast("dict[object, object]", value), depth)
        if type(value) in (list, tuple):
            items = [
                self._tree(paths.child(name, number), item, depth + 1)
                for number, item in enumerate(cast("list[object]", value))
            ]
            return items if type(value) is list else tuple(items)
        return value

    def _dict(self, name: str, value: dict[object, object], depth: int) -> object:
        made: dict[object, object]
        if isinstance(value, defaultdict):
            made = defaultdict(value.default_factory)
        elif isinstance(value, OrderedDict):
            made = OrderedDict()
        else:
            made = {}
        for key, item in value.items():
            try:
                part = values.part(key)
            except TypeError as error:
                raise StateError(f"{name}: {error}") from None
            made[key] = self._tree(paths.child(name, part), item, depth + 1)
        # A Counter holds numbers alone; it is one still.
        return value if type(value) not in (dict, OrderedDict, defaultdict) and made == value else made

    # ------------------------------------------------------------------------------------------------- tensors

    def _harvest(self) -> Harvest:
        chosen = self._options.chosen([name for name, _ in self._found])
        wanted = set(chosen)
        kept = [(name, tensor) for name, tensor in self._found if name in wanted]
        renamed = dict(zip(chosen, self._options.renamed(chosen), strict=True))
        harvest = Harvest()
        places: dict[tuple[object, ...], str] = {}
        taken: set[str] = set()
        for name, tensor in kept:
            new = renamed[name]
            if new in taken:
                raise StateError(f"two tensors would be called {new}")
            taken.add(new)
            place = None if tensor.place is None or not tensor.nbytes else tensor.place
            if place is not None and place in places:
                base = harvest.tensors[places[place]]
                harvest.views.append(View(new, base.name, base.dtype, base.shape, row_major(base.shape), 0))
                continue
            stored = self._store(harvest, new, tensor)
            if place is not None and stored == new:
                places[place] = new
        self._parts(harvest, renamed)
        return harvest

    def _store(self, harvest: Harvest, name: str, tensor: Loose) -> str:
        """Take a tensor; of an expanded one (strides of 0) the distinct elements. Returns the entry's name."""
        tile = tensor.tiles[0] if len(tensor.tiles) == 1 else None
        expanded = tile is not None and any(
            size > 1 and not stride for size, stride in zip(tile.shape, tile.strides, strict=True)
        )
        if tile is None or not expanded or not tensor.nbytes:
            made = Assembled(name, tensor.dtype, tensor.shape, tensor.tiles, tensor.sources)
            harvest.tensors[name] = self._cast(made)
            return name
        shape = tuple(size if stride else 1 for size, stride in zip(tile.shape, tile.strides, strict=True))
        base = name + DISTINCT
        inner = Tile((0,) * len(shape), shape, tile.strides, tile.source, tile.offset)
        harvest.tensors[base] = stored = self._cast(Assembled(base, tensor.dtype, shape, [inner], tensor.sources))
        strides = tuple(step if size > 1 else 0 for step, size in zip(row_major(shape), shape, strict=True))
        harvest.views.append(View(name, base, stored.dtype, tensor.shape, strides, 0))
        return base

    def _cast(self, tensor: Assembled) -> Readable:
        dtype = self._options.cast(tensor.dtype)
        return tensor if dtype == tensor.dtype or self._convert is None else Cast(tensor, dtype, self._convert)

    def _parts(self, harvest: Harvest, renamed: dict[str, str]) -> None:
        for root, (kind, tree) in self._trees.items():
            if kind == "module":
                for name in [renamed[name] for name, _ in self._found if name in renamed and _is_below(name, root)]:
                    harvest.parts[str(paths.split(name)[0])] = (kind, {})
                continue
            pruned = _pruned(tree, renamed)
            whole = self._options.only is None
            if whole or any(name in renamed and _is_below(name, root) for name, _ in self._found):
                harvest.parts[root] = (kind, {} if pruned is _DROPPED else pruned)


def _is_below(name: str, root: str) -> bool:
    return name == root or name.startswith((root + ".", root + "["))


def _pruned(tree: object, renamed: Mapping[str, str]) -> object:
    """The tree with refs under their new names, and without those that were not chosen."""
    if isinstance(tree, TensorRef):
        return TensorRef(renamed[tree.name]) if tree.name in renamed else _DROPPED
    if type(tree) in (dict, OrderedDict, defaultdict):
        found = cast("dict[object, object]", tree)
        for key in list(found):
            item = _pruned(found[key], renamed)
            if item is _DROPPED:
                del found[key]
            else:
                found[key] = item
        return found
    if type(tree) in (list, tuple):
        items = [_pruned(item, renamed) for item in cast("list[object]", tree)]
        kept = [None if item is _DROPPED else item for item in items]
        return kept if type(tree) is list else tuple(kept)
    return tree


def is_module_state(value: object, leaf: type = Loose) -> bool:
    """Whether a value looks like what a module's state_dict() gives: tensors by dotted names, at least one."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(type(key) is str and isinstance(item, leaf) for key, item in value.items())
    )


def is_optimizer_state(value: object) -> bool:
    """Whether a value looks like the state of an optimizer whose parameters have names."""
    if not isinstance(value, dict) or set(value) != {"state", "param_groups"}:
        return False
    state, groups = value["state"], value["param_groups"]
    if not isinstance(state, dict) or type(groups) is not list or not all(isinstance(group, dict) for group in groups):
        return False
    labels = [label for group in groups for label in cast("list[object]", group.get("params") or [])]
    return (
        all(type(group.get("params")) is list for group in groups)
        and all(type(label) is str and label for label in [*labels, *state])
        and all(isinstance(slot, dict) and all(type(key) is str for key in slot) for slot in state.values())
        and all(type(key) is str for group in groups for key in group)
    )


def optimizer_record(state: dict[str, object], leaf: type) -> object:
    """What is stored of such an optimizer beside its tensors, `leaf` standing for each of these."""
    slots = cast("dict[str, dict[str, object]]", state["state"])
    groups = cast("list[dict[str, object]]", state["param_groups"])
    others = {
        label: {key: value for key, value in slot.items() if not isinstance(value, leaf)}
        for label, slot in slots.items()
    }
    return {
        "groups": [
            {
                "params": list(cast("list[str]", group["params"])),
                "shapes": {},
                "options": {key: value for key, value in group.items() if key != "params"},
            }
            for group in groups
        ],
        "state": {label: slot for label, slot in others.items() if slot},
        "extra": {},
        "keys": list(dict.fromkeys(key for slot in slots.values() for key in slot)),
        "host": [],
    }


def full_name(name: str, root: str) -> str:
    """The name of a tensor that a module's state_dict() would call `name`. FormatError for one that cannot be."""
    if root:
        return paths.join((*paths.split(root), *name.split(".")))
    try:
        paths.split(name)
    except FormatError as error:
        raise FormatError(f"without a root, names must be whole paths: {error}", hint="give a root") from None
    return name
