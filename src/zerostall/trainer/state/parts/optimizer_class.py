"""What an optimizer's class is called, and which fields it has."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

import torch

from zerostall.core.optimizers import Fields

if TYPE_CHECKING:
    from collections.abc import Iterable


def fields_of(optimizer: torch.optim.Optimizer, keys: Iterable[str] = ()) -> Fields:
    """Return what tells an optimizer from one of another kind. `keys`: those of its parameters' state."""
    own = frozenset(key for key in _defaults(optimizer) if type(key) is str)
    return Fields(_lineage(type(optimizer)), own, frozenset(keys))


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
