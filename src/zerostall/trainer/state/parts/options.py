"""Options of parameter groups: put back by which parameters a group has, not by its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from zerostall.trainer.state.writes import copy_into

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zerostall.trainer.state.aim import Landing
    from zerostall.trainer.state.parts.optimizer_record import GroupRecord

ATOMS = frozenset({int, float, bool, str, type(None)})
Key = TypeVar("Key")
# A group's own: which parameters it has is the program's business.
_NOT_OPTIONS = frozenset({"params", "param_names"})
_ABSENT = object()


def options_of(group: Mapping[Key, object]) -> dict[Key, object]:
    """Return what a parameter group says but its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def is_lasting(value: object) -> bool:
    """Return whether a value cannot change while it is there: a plain one, or a tuple of such."""
    return type(value) in ATOMS or (type(value) is tuple and all(type(item) in ATOMS for item in value))


def contributors(
    params: Sequence[torch.Tensor], groups: Sequence[GroupRecord], labels: Mapping[int, str]
) -> list[GroupRecord]:
    """Return the stored groups that this group's parameters come from, in stored order."""
    mine = {labels[id(param)] for param in params if id(param) in labels}
    return [group for group in groups if not mine.isdisjoint(group.labels)]


def stored_option(key: str, groups: Sequence[GroupRecord]) -> object:
    """Return what all these stored groups say of an option; a sentinel where they differ or do not say."""
    found = [group.options.get(key, _ABSENT) for group in groups]
    return found[0] if found and all(equal(found[0], other) for other in found[1:]) else _ABSENT


def equal(one: object, other: object) -> bool:
    """Return whether two stored options are the same; refs to two tensors are not."""
    return type(one) is type(other) and bool(one == other)


def restore_options(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[GroupRecord],
    labels: Mapping[int, str],
    landing: Landing,
    name: str,
    members: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> None:
    """Give each group the options its parameters had. What is not stored, or is ambiguous, stays, with a warning.

    `labels`: id of a parameter -> its label in the checkpoint. `members`: the parameters in what a group holds.
    """
    for number, group in enumerate(optimizer.param_groups):
        sources = contributors(members(group["params"]), groups, labels)
        if not sources:
            if group["params"] or number >= len(groups):
                continue
            sources = [groups[number]]  # an empty group has only its place
        stored = dict.fromkeys(key for source in sources for key in source.options)
        for key in [*group, *(key for key in stored if key not in group)]:
            if key in _NOT_OPTIONS:
                continue
            value = stored_option(key, sources)
            if value is not _ABSENT:
                group[key] = _renewed(group.get(key), landing.resolve(value))
            elif key in group:
                why = "differs between the groups stored" if key in stored else "is not stored"
                landing.warnings.append(f"option {key} of {name}[{number}] {why}; it stays {group[key]!r}")


def _renewed(live: object, stored: object) -> object:
    """Return what an option becomes: a tensor stays the same tensor, for a captured graph reads it."""
    if isinstance(live, torch.Tensor) and isinstance(stored, (torch.Tensor, int, float)):
        source = torch.as_tensor(stored).to(live.dtype)
        if source.shape == live.shape:
            copy_into(live, source)
            return live
    return stored
