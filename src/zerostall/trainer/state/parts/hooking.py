"""What makes a module's `state_dict()` another one although its tensors are the same: hooks, functions of its class.

There are two dicts of hooks for each module, and hardly any has a hook. So they are looked at only after one of the
*doors* was written to: torch numbers every hook in a class attribute, and a class keeps its functions in its own dict.
"""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerostall import native
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerostall.trainer.state.walk import Watched

_OF_PYTHON = 1 << 9
"""Of a class that is not C's own, which nobody can change."""
_FUNCTIONS = ("state_dict", "_save_to_state_dict", "get_extra_state")


def hooks_of(module: nn.Module) -> list[Watched]:
    """The containers in which a module has hooks that change what its `state_dict()` gives."""
    return [cast("Watched", module._state_dict_hooks), cast("Watched", module._state_dict_pre_hooks)]


def watch(watched: list[Watched], hooks: list[Watched], kinds: Iterable[type[nn.Module]]) -> native.Watch:
    """Watch containers of tensors and, behind what tells that there may be others, hooks and functions of classes."""
    kinds = set(kinds)
    if not kinds:
        return native.Watch(watched)
    bases = {base for kind in kinds for base in kind.__mro__ if base.__flags__ & _OF_PYTHON}
    behind = hooks + [(kind, name) for kind in kinds for name in _FUNCTIONS]
    return native.Watch(watched, behind, [_dict_of(base) for base in (RemovableHandle, *bases)] if _tells() else [])


def _dict_of(kind: type) -> dict[object, object]:
    (found,) = gc.get_referents(vars(kind))  # what the proxy is one of
    return found


@functools.cache
def _tells() -> bool:
    """Whether the doors are written to when a hook is registered or a class gets a function, found out by trying."""

    class Tried(nn.Module):
        pass

    try:
        doors = native.Watch([_dict_of(RemovableHandle), _dict_of(Tried)])
    except (ValueError, TypeError) as error:
        return _told_not(str(error))
    module = Tried()
    tries = [
        lambda: module.register_state_dict_post_hook(lambda *_: None),
        lambda: module.register_state_dict_pre_hook(lambda *_: None),
        lambda: setattr(Tried, "get_extra_state", lambda _: None),
    ]
    for number, attempt in enumerate(tries):
        quiet = doors.untouched()
        attempt()
        if not quiet or doors.untouched():
            return _told_not(f"change {number} left no trace in {torch.__version__}")
        doors.renew()
    return True


def _told_not(why: str) -> bool:
    say_once("module hooks", f"hooks of modules are looked at one by one at each save: {why}")
    return False
