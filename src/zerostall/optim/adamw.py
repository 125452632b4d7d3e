"""AdamW that lets a snapshot finish while it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adam import adam

from zerostall.optim.lists import Lists
from zerostall.optim.stepping import Stepping, rate_of, refuse_differentiable

if TYPE_CHECKING:
    from torch import Tensor

    from zerostall.optim.batches import Batch
    from zerostall.optim.rosters import Group


class AdamW(Stepping, torch.optim.AdamW):
    """Drop-in for `torch.optim.AdamW(fused=True)`: same arguments, same state_dict, same results.

    With `zerostall.Checkpointer(policy="flip")` a step waits for no snapshot: moments that are still to be read stay
    where they are, and the step writes the next ones to other memory. Results are the same bit for bit as without a
    checkpointer.

    On CUDA devices one Triton kernel updates all tensors of a group, with the operations of torch 2.13's fused kernel
    in their order. Elsewhere, and for tensors that do not fill their memory, torch's own implementation does it: the
    fused one, or what `foreach` and `fused` ask for.

    What swaps: `state[p]["exp_avg"]` and its like stay the same tensor objects, but their `data_ptr()` may be another
    one after a step during which a snapshot was still being read. What was made of them before (`exp_avg[0]`,
    `exp_avg.detach()`, arrays over their memory) then shows the old values. Parameters and gradients never move. Groups
    with `capturable` never flip, since a CUDA graph knows addresses.

    Raises:
        CapabilityError: `differentiable` is asked for.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if differentiable:
            refuse_differentiable("AdamW")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=not foreach if fused is None else fused,
        )

    def _gather(self, group: Group) -> Lists:
        lists = Lists(moments=([], [], []))
        first, second, most = lists.moments
        self._init_group(group, lists.parameters, lists.gradients, first, second, most, lists.steps)
        if not group["amsgrad"]:
            lists.moments = (first, second)
        return lists

    def _launch(self, batch: Batch, group: Group, scale: Tensor | None, infinite: Tensor | None) -> None:
        from zerostall.optim.kernels import adam, parts  # with Triton, which takes seconds to import

        lr, lr_at = rate_of(group, batch.kind.device)
        beta1, beta2 = group["betas"]
        parts.count(batch.table, infinite)
        if batch.table.programs:
            adam.adam(
                batch.table,
                batch.kind,
                lr=lr,
                lr_at=lr_at,
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                decay=group["weight_decay"],
                amsgrad=len(batch.moments) == 3,
                maximize=group["maximize"],
                scale=scale,
                infinite=infinite,
            )

    def _update_by_torch(self, group: Group, lists: Lists, *, foreach: bool | None, fused: bool) -> None:
        beta1, beta2 = group["betas"]
        first, second, *most = lists.moments
        adam(
            lists.parameters,
            lists.gradients,
            first,
            second,
            most[0] if most else [],
            lists.steps,
            amsgrad=group["amsgrad"],
            has_complex=any(map(torch.is_complex, lists.parameters)),
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            foreach=foreach,
            capturable=group["capturable"] and not lists.parameters[0].is_cpu,
            fused=fused,
            grad_scale=getattr(self, "grad_scale", None) if fused else None,
            found_inf=getattr(self, "found_inf", None) if fused else None,
            decoupled_weight_decay=True,
        )
