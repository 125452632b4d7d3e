"""The hooks that keep an optimizer from changing what is still being read."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


class Guard:
    """Calls `protect` before every step of the given optimizers, until `remove`.

    The optimizers hold only a weak reference to what they call, so a forgotten checkpointer can be collected.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], protect: Callable[[], None]) -> None:
        call = weakref.WeakMethod(protect)  # pyright: ignore[reportArgumentType]

        def before_step(*_: object) -> None:
            protect_now = call()
            if protect_now is not None:
                protect_now()

        self._handles = [optimizer.register_step_pre_hook(before_step) for optimizer in optimizers]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
