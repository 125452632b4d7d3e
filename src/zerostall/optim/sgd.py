"""SGD with momentum that lets a snapshot finish while it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.sgd import sgd

from zerostall.optim.lists import Lists
from zerostall.optim.stepping import Stepping, rate_of, refuse_differentiable

if TYPE_CHECKING:
    from torch import Tensor

    from zerostall.optim.batches import Batch
    from zerostall.optim.rosters import Group


class SGD(Stepping, torch.optim.SGD):
    """Drop-in for `torch.optim.SGD(fused=True)`: same arguments, same state_dict, same results but for the last bits.

    What `zerostall.optim.AdamW` says of snapshots, kernels and of what swaps goes for `momentum_buffer` too. Without
    momentum there is nothing to flip, and torch's own implementation does it all.

    Raises:
        CapabilityError: `differentiable` is asked for.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if differentiable:
            refuse_differentiable("SGD")
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=not foreach if fused is None else fused,
        )

    @staticmethod
    def _fused_is_right(parameter: Tensor) -> bool:
        # On the CPU torch 2.13 gives half of the elements of such types the momentum of others.
        return not (parameter.is_cpu and parameter.dtype in (torch.float16, torch.bfloat16))

    def _gather(self, group: Group) -> Lists:
        lists = Lists()
        moments: list[Tensor | None] = []
        self._init_group(group, lists.parameters, lists.gradients, moments)
        if not group["dampening"]:
            # The first momentum is the gradient, as it is after zeros. (torch leaves memory as it finds it where a
            # GradScaler skips the first step.)
            for place, (parameter, moment) in enumerate(zip(lists.parameters, moments, strict=False)):
                if moment is None:
                    moments[place] = self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        there = [moment for moment in moments if moment is not None]
        if there and len(there) == len(lists.parameters):
            lists.moments = (there,)
        return lists

    def _launch(self, batch: Batch, group: Group, scale: Tensor | None, infinite: Tensor | None) -> None:
        from zerostall.optim.kernels import one_moment  # with Triton, which takes seconds to import

        lr, lr_at = rate_of(group, batch.kind.device)
        if batch.table.programs:
            one_moment.sgd(
                batch.table,
                batch.kind,
                lr=lr,
                lr_at=lr_at,
                momentum=group["momentum"],
                dampening=group["dampening"],
                decay=group["weight_decay"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                scale=scale,
                infinite=infinite,
            )

    def _update_by_torch(self, group: Group, lists: Lists, *, foreach: bool | None, fused: bool) -> None:
        states = [self.state[parameter] for parameter in lists.parameters] if group["momentum"] else []
        moments: list[Tensor | None] = [state.get("momentum_buffer") for state in states]
        sgd(
            lists.parameters,
            lists.gradients,
            moments,
            has_sparse_grad=any(gradient.is_sparse for gradient in lists.gradients),
            foreach=foreach,
            fused=fused,
            grad_scale=getattr(self, "grad_scale", None) if fused else None,
            found_inf=getattr(self, "found_inf", None) if fused else None,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        for state, moment in zip(states, moments, strict=True):
            state["momentum_buffer"] = moment
