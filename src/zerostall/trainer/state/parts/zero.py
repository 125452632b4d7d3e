"""`torch.distributed.optim.ZeroRedundancyOptimizer`: each rank keeps the state of some of the parameters.

Its own `state_dict()` gathers all of it on one rank. Here each rank stores what it keeps, under the names of its
parameters, as an optimizer does that has no others; and takes back what it keeps then, be that another share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from zerostall.trainer.state.parts.optimizer import OptimizerPart

if TYPE_CHECKING:
    import torch

    from zerostall.trainer.state.walk import Walk


def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is one, without importing where it would come from."""
    return any(
        base.__name__ == "ZeroRedundancyOptimizer" and base.__module__.startswith("torch.distributed.optim")
        for base in type(optimizer).__mro__
    )


class ZeroPart(OptimizerPart):
    """Groups and options are the outer optimizer's, which are the same on all ranks; the rest is the local one's."""

    def gather(self, walk: Walk) -> None:
        if getattr(self.optimizer, "_overlap_with_ddp", False):
            walk.refuse(
                self.name,
                "is a ZeroRedundancyOptimizer with overlap_with_ddp, which updates parameters during backward: "
                "leave that out",
            )
            return
        super().gather(walk)

    @property
    def slots(self) -> dict[torch.Tensor, object]:
        return self.acting.state

    def keeps(self, param: torch.Tensor) -> bool:
        return any(param is own for group in self.acting.param_groups for own in group["params"])

    def _holders(self) -> list[dict[str, object]]:
        return [self.optimizer.__dict__, self.acting.__dict__]

    @property
    def acting(self) -> torch.optim.Optimizer:
        return cast("torch.optim.Optimizer", getattr(self.optimizer, "optim"))  # noqa: B009 - torch has no stub of it
