"""Lion that lets a snapshot finish while it goes on."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zerostall.errors import CapabilityError
from zerostall.optim.lists import Lists, locals_of
from zerostall.optim.stepping import Stepping, rate_of

if TYPE_CHECKING:
    from torch import Tensor

    from zerostall.optim.batches import Batch
    from zerostall.optim.rosters import Group


class Lion(Stepping, torch.optim.Optimizer):
    """Lion (Chen et al., 2023): the sign of a blend of gradient and momentum, with decoupled weight decay.

    Arguments, results and state_dict (`exp_avg`) are those of the implementations that are around; torch has none. What
    `zerostall.optim.AdamW` says of snapshots, kernels and of what swaps goes for `exp_avg` too.

    Args:
        lr: a third to a tenth of what AdamW would have.
        betas: how much of the momentum the blend has, and how much of it each step leaves.
        weight_decay: three to ten times what AdamW would have.
        fused: one kernel for all tensors of a type, on a CUDA device; "foreach" and none of both go through torch's
            operations.

    Raises:
        ValueError: a number makes no sense.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if not (float(lr) >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"lr={lr}, weight_decay={weight_decay} and betas={betas}: from 0 on, and betas below 1")
        if foreach and fused:
            raise ValueError(f"foreach={foreach}, fused={fused}: only one of both can be true")
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "fused": not foreach if fused is None else fused,
        }
        self._step_supports_amp_scaling = bool(defaults["fused"])
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = state.get("defaults") or self.defaults
        for group in state["param_groups"]:  # another implementation's has fewer settings
            for name, value in defaults.items():
                group.setdefault(name, value)
        super().__setstate__(state)

    @staticmethod
    def _fused_is_right(parameter: Tensor) -> bool:
        return False  # torch has no fused one

    def _gather(self, group: Group) -> Lists:
        lists = Lists(moments=([],))
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse or parameter.is_complex():
                kind = "sparse gradients" if parameter.grad.is_sparse else "complex parameters"
                raise CapabilityError(f"zerostall.optim.Lion takes no {kind}")
            state = self.state[parameter]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(parameter)
            lists.parameters.append(parameter)
            lists.gradients.append(parameter.grad)
            lists.moments[0].append(state["exp_avg"])
        return lists

    def _launch(self, batch: Batch, group: Group, scale: Tensor | None, infinite: Tensor | None) -> None:
        from zerostall.optim.kernels import one_moment  # with Triton, which takes seconds to import

        lr, lr_at = rate_of(group, batch.kind.device)
        beta1, beta2 = group["betas"]
        if batch.table.programs:
            one_moment.lion(
                batch.table,
                batch.kind,
                lr=lr,
                lr_at=lr_at,
                beta1=beta1,
                beta2=beta2,
                decay=group["weight_decay"],
                maximize=group["maximize"],
                scale=scale,
                infinite=infinite,
            )

    def _update_by_torch(self, group: Group, lists: Lists, *, foreach: bool | None, fused: bool) -> None:
        del fused  # see `_fused_is_right`
        lr, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
        parameters, moments = locals_of(lists.parameters), locals_of(lists.moments[0])
        gradients = [g.to(m.dtype) for g, m in zip(locals_of(lists.gradients), moments, strict=True)]
        if group["maximize"]:
            gradients = [-gradient for gradient in gradients]
        together = [(parameters, gradients, moments)]
        if foreach is False:
            together = [([p], [g], [m]) for p, g, m in zip(parameters, gradients, moments, strict=True)]
        for some, their_gradients, their_moments in together:
            _lion(some, their_gradients, their_moments, lr, decay, beta1, beta2)
        torch.autograd.graph.increment_version([*lists.parameters, *lists.moments[0]])  # of DTensors, too


def _lion(
    parameters: list[Tensor],
    gradients: list[Tensor],
    moments: list[Tensor],
    lr: float,
    decay: float,
    beta1: float,
    beta2: float,
) -> None:
    if decay:
        torch._foreach_mul_(parameters, 1 - lr * decay)
    blends = torch._foreach_lerp(gradients, moments, beta1)
    torch._foreach_sign_(blends)
    torch._foreach_add_(parameters, [b.to(p.dtype) for b, p in zip(blends, parameters, strict=True)], alpha=-lr)
    torch._foreach_lerp_(moments, gradients, 1 - beta2)
