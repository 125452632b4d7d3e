"""Names of ours for the flat ones of DCP, and the parts of a state that its nested dicts are.

Tensors by dotted names below one key are a module's (`model.layers.0.weight`), `state` and `param_groups` of named
parameters are an optimizer's (`optimizer.layers.0.weight.exp_avg`), so that `Checkpointer.restore` finds both. All else
is a container.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch.distributed.checkpoint.planner import WriteItemType

from zerostall.core import names as paths
from zerostall.core import values
from zerostall.core.layout import Shard
from zerostall.core.values import TensorRef
from zerostall.flow.foreign_dcp import nested
from zerostall.flow.forest import full_name, is_optimizer_state, optimizer_record
from zerostall.trainer.state import refs as refs  # teaches the small values torch's types
from zerostall.trainer.state import tensors as kinds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from zerostall.core.values import Document

_ROOT = "model"
"""Root of a flat dict of tensors, as `model.state_dict()` is."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    name: str
    tensor: bool


class Naming:
    """How the items of a save are called; made by `of`, by the coordinator, from the plans of all ranks."""

    def __init__(self, items: dict[str, tuple[tuple[str | int, ...], Shard | None]]) -> None:
        self._items = items
        self._tree = nested(
            [(path, _Leaf(name, shard is not None)) for name, (path, shard) in items.items()], "the plan"
        )
        self._kinds: dict[str, str] = {}
        self._flat = ""
        self.names: dict[str, str] = {}
        if items and all(shard is not None and len(path) == 1 for path, shard in items.values()):
            self._tree = {_ROOT: dict(self._tree)}
            self._flat = _ROOT
        for key, tree in self._tree.items():
            self._take(key, tree)

    @staticmethod
    def of(plans: Iterable[SavePlan]) -> Naming:
        items: dict[str, tuple[tuple[str | int, ...], Shard | None]] = {}
        for plan in plans:
            mapping = plan.planner_data if isinstance(plan.planner_data, dict) else {}
            for item in plan.items:
                name = item.index.fqn
                items[name] = (tuple(mapping.get(name) or (name,)), _shard(item))
        return Naming(items)

    def of_items(self, items: Iterable[WriteItem]) -> dict[str, str]:
        """The names of these."""
        return {item.index.fqn: self.names[item.index.fqn] for item in items}

    def shards(self) -> list[Shard]:
        """Every tensor, whole."""
        return [
            Shard.whole(self.names[name], shard.dtype, shard.global_shape)
            for name, (_, shard) in self._items.items()
            if shard is not None
        ]

    def values(self, found: Mapping[str, Document]) -> Document:
        """The small values of the state, from those that the ranks have handed over."""
        known = {name: values.decode(document, TensorRef) for name, document in found.items()}
        parts: dict[str, tuple[str, object]] = {}
        for key, tree in self._tree.items():
            root = paths.join((key,))
            kind = self._kinds[key]
            if kind == "module":
                parts[root] = (kind, {})
                continue
            filled = _filled(tree, self.names, known)
            if kind == "optimizer" and is_optimizer_state(filled):
                parts[root] = (kind, optimizer_record(cast("dict[str, object]", filled), TensorRef))
            else:
                parts[root] = ("container", filled)
        flat = {"flat": self._flat} if self._flat else {}
        return values.encode({"parts": parts, "rng": None, **flat})

    def _take(self, key: str, tree: object) -> None:
        root = paths.join((key,))
        leaves = list(_leaves(tree, (key,)))
        if isinstance(tree, dict) and leaves and all(leaf.tensor and len(path) == 2 for path, leaf in leaves):
            self._kinds[key] = "module"
            named = {leaf.name: full_name(str(path[1]), root) for path, leaf in leaves}
        elif _looks_like_optimizer(tree):
            self._kinds[key] = "optimizer"
            named = {leaf.name: _slot_name(root, path) for path, leaf in leaves}
        else:
            self._kinds[key] = "container"
            named = {leaf.name: paths.join(path) for path, leaf in leaves}
        if len(set(named.values())) < len(named):
            self._kinds[key] = "container"
            named = {leaf.name: paths.join(path) for path, leaf in leaves}
        self.names |= named


def _shard(item: WriteItem) -> Shard | None:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return None
    dtype = kinds.DTYPE_NAMES.get(item.tensor_data.properties.dtype, "uint8")
    return Shard.whole(item.index.fqn, dtype, tuple(item.tensor_data.size))


def _leaves(tree: object, path: tuple[str | int, ...]) -> Iterable[tuple[tuple[str | int, ...], _Leaf]]:
    if isinstance(tree, _Leaf):
        yield path, tree
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from _leaves(item, (*path, key))
    else:
        for number, item in enumerate(cast("list[object]", tree)):
            yield from _leaves(item, (*path, number))


def _looks_like_optimizer(tree: object) -> bool:
    """Whether it may be the state of an optimizer with named parameters; their names are values, and come later."""
    if not isinstance(tree, dict) or set(tree) != {"state", "param_groups"}:
        return False
    state = tree["state"]
    return isinstance(state, dict) and all(
        type(label) is str and not label.isdigit() and isinstance(slot, dict) for label, slot in state.items()
    )


def _slot_name(root: str, path: tuple[str | int, ...]) -> str:
    if path[1] == "state" and len(path) == 4:
        return full_name(f"{path[2]}.{path[3]}", root)
    return paths.join(path)


def _filled(tree: object, names: Mapping[str, str], known: Mapping[str, object]) -> object:
    if isinstance(tree, _Leaf):
        return TensorRef(names[tree.name]) if tree.tensor else known.get(tree.name)
    if isinstance(tree, dict):
        return {key: _filled(item, names, known) for key, item in tree.items()}
    return [_filled(item, names, known) for item in cast("list[object]", tree)]
