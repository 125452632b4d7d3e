"""Which kind of part an object of the user's is."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, cast

import torch

from zerostall.trainer.state import tensors
from zerostall.trainer.state.parts.container import ContainerPart
from zerostall.trainer.state.parts.module import ModulePart
from zerostall.trainer.state.parts.optimizer import OptimizerPart
from zerostall.trainer.state.parts.rng import generator_access
from zerostall.trainer.state.parts.stateful import StatefulPart
from zerostall.trainer.state.parts.zero import ZeroPart, is_zero
from zerostall.trainer.state.tree import MUTABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.trainer.state.walk import Part


def part_of(name: str, value: object) -> Part | None:
    """Return the part for an object with a state of its own, None for anything else."""
    if inspect.isclass(value):
        return None
    if isinstance(value, torch.nn.Module):
        return ModulePart(name, value)
    if isinstance(value, torch.optim.Optimizer) and is_zero(value):
        return ZeroPart(name, value)
    if isinstance(value, torch.optim.Optimizer) and is_ordinary(value):
        return OptimizerPart(name, value)
    access = generator_access(value)
    if access is not None:
        return StatefulPart(name, *access, kind="generator")
    get = getattr(value, "state_dict", None)
    put = getattr(value, "load_state_dict", None)
    if callable(get) and callable(put):
        return StatefulPart(
            name,
            cast("Callable[[], object]", get),
            cast("Callable[[object], object]", put),
            optimizer=value if isinstance(value, torch.optim.Optimizer) and has_step_hooks(value) else None,
            optimizer_like=is_optimizer_like(value),
            stepper=value if isinstance(value, torch.optim.Optimizer) or is_optimizer_like(value) else None,
        )
    return None


def root_part(name: str, value: object) -> Part | None:
    """Return the part for what the user names at the outermost level; None for what cannot be restored there."""
    if type(value) in MUTABLE or isinstance(value, torch.Tensor) or tensors.is_array(value):
        return ContainerPart(name, value)
    return part_of(name, value)


def is_ordinary(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's `state` and `param_groups` are all there is to it."""
    kind = type(optimizer)
    return (
        kind.state_dict is torch.optim.Optimizer.state_dict
        and kind.load_state_dict is torch.optim.Optimizer.load_state_dict
        and has_step_hooks(optimizer)
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
        and not optimizer._optimizer_load_state_dict_pre_hooks
        and not optimizer._optimizer_load_state_dict_post_hooks
    )


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer was set up by torch's own constructor, so that its step calls hooks."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def is_optimizer_like(value: object) -> bool:
    """Return whether an object looks like an optimizer that is none of torch's."""
    return all(hasattr(value, attribute) for attribute in ("step", "zero_grad", "param_groups"))
