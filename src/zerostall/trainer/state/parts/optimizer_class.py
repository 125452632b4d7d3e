"""What an optimizer's class is called, and which fields it has; and how that stands in a record's values.

Of an optimizer whose `state_dict()` is torch's it stands with its groups (see `optimizer_record`). What others keep is
known only to them: theirs stands beside it.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, cast

import torch

from zerostall.core.optimizers import Fields

if TYPE_CHECKING:
    from collections.abc import Iterable

_DEEP = 8  # of optimizers that hold another one
_HOLD = ("optimizer", "optim", "base_optimizer", "_optimizer")


def fields_of(optimizer: torch.optim.Optimizer, keys: Iterable[str] = ()) -> Fields:
    """Return what tells an optimizer from one of another kind. `keys`: those of its parameters' state."""
    own = frozenset(key for key in _defaults(optimizer) if type(key) is str)
    return Fields(_lineage(type(optimizer)), own, frozenset(keys))


def fields_of_any(optimizer: object) -> Fields:
    """Return the same of what may be no optimizer of torch's, or one that only passes on what another one does."""
    acting = acting_of(optimizer)
    if isinstance(acting, torch.optim.Optimizer):
        return fields_of(acting)
    return Fields(tuple(_public_name(base) for base in type(acting).__mro__[:-1]))


def acting_of(optimizer: object) -> object:
    """Return the optimizer that does the work: what an optimizer around others holds, or the one itself."""
    for _ in range(_DEEP):
        held = [vars(optimizer).get(name) for name in _HOLD] if hasattr(optimizer, "__dict__") else []
        inner = next((one for one in held if isinstance(one, torch.optim.Optimizer) and one is not optimizer), None)
        if inner is None:
            break
        optimizer = inner
    return optimizer


def said(fields: Fields) -> dict[str, object]:
    """Return what of it is stored."""
    return {"lineage": list(fields.lineage), "own": sorted(fields.own)}


def read_fields(tree: object) -> Fields | None:
    """Read what `said` returned; None for anything else."""
    if not isinstance(tree, dict):
        return None
    lineage, own = tree.get("lineage"), tree.get("own")
    if not (_are_texts(lineage) and _are_texts(own)):
        return None
    return Fields(tuple(cast("list[str]", lineage)), frozenset(cast("list[str]", own)))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is str for item in value)


def stored_options(tree: object) -> list[dict[object, object]]:
    """Return the groups' options of what a `state_dict()` returned, where it is one as torch's optimizers have."""
    groups = tree.get("param_groups") if isinstance(tree, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return []
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def fixed_options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the options that the optimizer's constructor does not take, by name."""
    try:
        parameters = inspect.signature(type(optimizer).__init__).parameters
    except (TypeError, ValueError):  # a constructor that is not Python's
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {}
    return {key: value for key, value in _defaults(optimizer).items() if key not in parameters}


def _defaults(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    found = getattr(optimizer, "defaults", None)
    return found if isinstance(found, dict) else {}


def _lineage(kind: type) -> tuple[str, ...]:
    root = torch.optim.Optimizer
    return tuple(_public_name(base) for base in kind.__mro__ if issubclass(base, root) and base is not root)


def _public_name(kind: type) -> str:
    """The class by the outermost package that has it under its name: where in there it is made may change."""
    path = kind.__module__.split(".")
    for end in range(1, len(path)):
        package = ".".join(path[:end])
        if getattr(sys.modules.get(package), kind.__name__, None) is kind:
            return f"{package}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"
