"""A stored state as new tensors, with no objects to restore into."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from zerostall.core import names
from zerostall.core.own import first_owner, owner, shared_by
from zerostall.trainer.state import refs, stored_step, tensors, writes
from zerostall.trainer.state.aliasing import DISTINCT
from zerostall.trainer.state.parts.optimizer_record import OptimizerRecord
from zerostall.trainer.state.stored import StoredState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zerostall.core.shards import Entry, View
    from zerostall.tiers.contract import Stored
    from zerostall.trainer.state.stored import StoredPart

_log = logging.getLogger(__name__)


def tree(stored: Stored, image: memoryview, ranks: Sequence[Stored] = ()) -> dict[str, object]:
    """As `tree_of`, on the CPU from the bytes of the image."""
    state, data = _state(stored, ranks), writes.as_bytes(image)

    def copied(entry: Entry) -> torch.Tensor:
        made = torch.empty(entry.shape, dtype=tensors.torch_dtype(entry.dtype))
        if entry.nbytes:
            writes.copy_into(made, writes.read_view(state, data, writes.entry_view(entry)))
        return made

    return _Loading(state, _Tensors(state, copied).named).roots()


def tree_of(
    stored: Stored,
    ranks: Sequence[Stored],
    fetch: Callable[[Sequence[Entry]], Mapping[str, torch.Tensor]],
    need: Callable[[str, str], bool] | None = None,
) -> dict[str, object]:
    """Return what was saved, by root: containers as they were, a module or an optimizer as a dict.

    Every tensor is new memory of its own, but tensors that shared memory share it again. A module is a flat dict of
    tensors by path, an optimizer has "state" by parameter and "param_groups".

    Args:
        stored: all of the step, as one rank would have stored it.
        ranks: those that have, if they were several. Small values are rank 0's, and what only others have said; of
            what is each rank's own it is rank 0's, which is told.
        fetch: gives new tensors by name for the entries that are needed; called once.
        need: whether a tensor, by its root and its name, is needed; those that are not come without memory.
    """
    state = _state(stored, ranks)
    needed = None if need is None else _needed(state, need)
    made = fetch([entry for entry in state.layout.entries if needed is None or entry.name in needed])

    def entry_of(entry: Entry) -> torch.Tensor:
        given = made.get(entry.name)
        return _no_memory(entry) if given is None else given

    return _Loading(state, _Tensors(state, entry_of).named).roots()


def _needed(state: StoredState, need: Callable[[str, str], bool]) -> set[str]:
    """The entries that have what is needed."""
    chosen: set[str] = set()
    for name, part in state.parts.items():
        root = str(names.split(name)[0])
        below = [other for other in (name, *state.below(name)) if need(root, other)]
        chosen.update(below, refs.names_in(part.tree) if below else ())
    return {state.views[name].base if name in state.views else name for name in chosen}


def _no_memory(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=tensors.torch_dtype(entry.dtype), device="meta")


def _state(stored: Stored, ranks: Sequence[Stored]) -> StoredState:
    return StoredState.read(stored) if len(ranks) <= 1 else _of_ranks(stored, ranks)


def _of_ranks(stored: Stored, ranks: Sequence[Stored]) -> StoredState:
    first = first_owner(entry.name for entry in stored.layout.entries)
    owners = stored_step.Owners(every=frozenset([first] if first else []))
    said = stored_step.read(stored_step.Images.of(ranks), 0, len(ranks), owners).state
    entries: list[Entry] = []
    views: list[View] = []
    for entry in stored.layout.entries:
        bare = _first_ones(entry.name, first)
        if bare is not None:
            entries.append(msgspec.structs.replace(entry, name=bare))
    for view in stored.layout.views:
        bare, base = _first_ones(view.name, first), _first_ones(view.base, first)
        if bare is not None and base is not None:
            views.append(msgspec.structs.replace(view, name=bare, base=base))
    if others := len(stored.layout.entries) - len(entries):
        whose = f" and owners other than {first!r}" if first else ""
        _log.warning("%d tensors are those of ranks other than 0%s (RankLocal) and are not loaded", others, whose)
    layout = msgspec.structs.replace(stored.layout, entries=tuple(entries), views=tuple(views))
    state = StoredState(layout, said.parts, said.rng, said.base)
    state.index()
    return state


def _first_ones(name: str, first: str | None) -> str | None:
    """The user's name of what belongs to all, to rank 0 or to the owner named first; None for what others have."""
    bare, rank = owner(name)
    bare, who = shared_by(bare)
    return None if rank or who not in (None, first) else bare


def outline(stored: Stored, tensor: Callable[[str], torch.Tensor]) -> dict[str, object]:
    """As `tree`, with what `tensor` says in the place of the tensor of each name; no bytes are looked at."""
    return _Loading(StoredState.read(stored), tensor).roots()


class _Tensors:
    """Tensors by name: of each entry the one that `entry` makes, once, and views of them."""

    def __init__(self, stored: StoredState, entry: Callable[[Entry], torch.Tensor]) -> None:
        self._stored = stored
        self._entry = entry
        self._made: dict[str, torch.Tensor] = {}

    def named(self, name: str) -> torch.Tensor:
        made = self._made.get(name)
        if made is None:
            view = self._stored.views.get(name)
            if view is not None:
                made = writes.view_of(self.named(view.base), view)
            else:
                made = self._entry(self._stored.layout.entries[self._stored.entries[name]])
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
