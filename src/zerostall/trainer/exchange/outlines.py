"""A step as torch.distributed.checkpoint sees one: flat names, each with the path that leads to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from zerostall.core.parts import flat_root
from zerostall.trainer.exchange.export_pt import read
from zerostall.trainer.state import tensors
from zerostall.trainer.state.load import outline

if TYPE_CHECKING:
    from zerostall.flow.whole_step import WholeStep, WholeTensor


@dataclass(frozen=True, slots=True)
class Outline:
    """What `dcp.save` would have been given.

    Attributes:
        tensors: flat name → tensor of the step.
        paths: flat name → the keys and indexes that lead there.
    """

    tensors: dict[str, WholeTensor]
    paths: dict[str, tuple[str | int, ...]]
    _values: dict[str, object]
    _standing: dict[int, WholeTensor]

    def values(self, step: WholeStep) -> dict[str, object]:
        """Flat name → small value; a tensor within one (in a tuple, say) is read."""
        return {name: self._filled(value, step) for name, value in self._values.items()}

    def _filled(self, value: object, step: WholeStep) -> object:
        if isinstance(value, torch.Tensor) and id(value) in self._standing:
            return read(step.readable(self._standing[id(value)]))
        if type(value) in (list, tuple):
            items = [self._filled(item, step) for item in cast("list[object]", value)]
            return items if type(value) is list else tuple(items)
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self._filled(item, step)
        return value


def outline_of(step: WholeStep, root: str | None = None) -> Outline:
    """The outline of a step, or of what lies below one of its roots.

    ValueError for a root that is not there, or where two things would have one flat name.
    """
    standing: dict[int, WholeTensor] = {}
    kept: list[torch.Tensor] = []  # while they live, no two have one id

    def stand_in(name: str) -> torch.Tensor:
        whole = step.tensors[name]
        made = torch.empty(whole.shape, dtype=tensors.torch_dtype(whole.dtype), device="meta")
        standing[id(made)] = whole
        kept.append(made)
        return made

    merged = step.merged()
    tree = outline(merged, stand_in)
    root = root or flat_root(merged.record.values) or None
    if root is not None:
        if root not in tree:
            raise ValueError(f"root {root}: names begin with {', '.join(tree) or 'nothing'}")
        below = tree[root]
        tree = cast("dict[str, object]", below) if isinstance(below, dict) else {root: below}
    flat, paths = flatten_state_dict(tree)
    found: dict[str, WholeTensor] = {}
    values: dict[str, object] = {}
    for name, leaf in flat.items():
        if id(leaf) in standing:
            found[name] = standing[id(leaf)]
        else:
            values[name] = leaf
    return Outline(found, {name: tuple(path) for name, path in paths.items()}, values, standing)
