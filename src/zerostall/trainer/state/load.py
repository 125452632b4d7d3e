"""A stored state as new tensors on the CPU, with no objects to restore into."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from zerostall.core import names
from zerostall.trainer.state import refs, tensors, writes
from zerostall.trainer.state.aliasing import DISTINCT
from zerostall.trainer.state.parts.optimizer_record import OptimizerRecord
from zerostall.trainer.state.stored import StoredState

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.tiers.contract import Stored
    from zerostall.trainer.state.stored import StoredPart


def tree(stored: Stored, image: memoryview) -> dict[str, object]:
    """Return what was saved, by root: containers as they were, a module or an optimizer as a dict.

    Every tensor is new memory of its own, but tensors that shared memory share it again. A module is a flat dict of
    tensors by path, an optimizer has "state" by parameter and "param_groups".
    """
    state = StoredState.read(stored)
    return _Loading(state, _Tensors(state, writes.as_bytes(image)).named).roots()


def outline(stored: Stored, tensor: Callable[[str], torch.Tensor]) -> dict[str, object]:
    """As `tree`, with what `tensor` says in the place of the tensor of each name; no bytes are looked at."""
    return _Loading(StoredState.read(stored), tensor).roots()


class _Tensors:
    """New tensors with the bytes of an image."""

    def __init__(self, stored: StoredState, image: torch.Tensor) -> None:
        self._stored = stored
        self._image = image
        self._made: dict[str, torch.Tensor] = {}

    def named(self, name: str) -> torch.Tensor:
        made = self._made.get(name)
        if made is None:
            view = self._stored.views.get(name)
            if view is not None:
                made = writes.view_of(self.named(view.base), view)
            else:
                entry = self._stored.layout.entries[self._stored.entries[name]]
                made = torch.empty(entry.shape, dtype=tensors.torch_dtype(entry.dtype))
                if entry.nbytes:
                    writes.copy_into(made, writes.read_view(self._stored, self._image, writes.entry_view(entry)))
            self._made[name] = made
        return made


class _Loading:
    def __init__(self, stored: StoredState, tensor: Callable[[str], torch.Tensor]) -> None:
        self._stored = stored
        self._tensor = tensor
        self._resolver = refs.Resolver(tensor, self._nested)

    def roots(self) -> dict[str, object]:
        parts = self._stored.parts
        paths = {name: names.split(name) for name in parts}
        return {str(path[0]): self._part(parts[name]) for name, path in paths.items() if len(path) == 1}

    def _nested(self, name: str) -> object:
        part = self._stored.parts.get(name)
        return None if part is None else self._part(part)

    def _part(self, part: StoredPart) -> object:
        if part.kind == "module":
            return self._module(part)
        if part.kind == "optimizer":
            return self._optimizer(part)
        return refs.resolve(part.tree, self._resolver)

    def _module(self, part: StoredPart) -> dict[str, object]:
        """By path, as module.state_dict() names them; what a submodule said for itself stands at its path."""
        start = len(part.name) + 1
        inner = {name: nested for name, nested in self._stored.parts.items() if name.startswith(part.name + ".")}
        theirs = {found for nested in inner.values() for found in refs.names_in(nested.tree)}
        found: dict[str, object] = {
            name[start:]: self._tensor(name)
            for name in self._stored.below(part.name)
            if name not in theirs and not name.endswith(DISTINCT)
        }
        return found | {name[start:]: self._part(nested) for name, nested in inner.items()}

    def _optimizer(self, part: StoredPart) -> dict[str, object]:
        record = OptimizerRecord.read(part)
        state: dict[str, object] = {}
        for label, slots in record.slots(self._stored, part).items():
            found = slots.state(self._resolver, record.keys)
            if found:
                state[label] = found
        groups = [
            {"params": row.labels, **cast("dict[str, object]", refs.resolve(row.options, self._resolver))}
            for row in record.groups
        ]
        return {"state": state, "param_groups": groups}
