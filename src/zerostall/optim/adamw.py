"""AdamW that lets a snapshot finish while it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adam import adam

from zerostall.errors import CapabilityError
from zerostall.optim.batches import Batch, Batches, split
from zerostall.optim.flips import Flips
from zerostall.optim.lists import Lists, local

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from zerostall.core.reading import Reader
    from zerostall.optim.flips import Turn

Group = dict[str, Any]


class AdamW(torch.optim.AdamW):
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
            raise CapabilityError(
                "zerostall.optim.AdamW cannot be differentiated", hint="use torch.optim.AdamW(differentiable=True)"
            )
        self._flips = Flips()
        self._batches = Batches()
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_flips" in self.__dict__:
            self._flips.forget()
        else:  # a copy, of which no checkpointer knows
            self._flips = Flips()
        self._batches = Batches()
        self._keep_implementation()

    def _keep_implementation(self) -> None:
        """How steps are computed is no state: loading one that says otherwise would silently change it."""
        foreach, fused = self.defaults["foreach"], self.defaults["fused"]
        for group in self.param_groups:
            if group["fused"] == fused and group["foreach"] == foreach:
                continue
            group["fused"], group["foreach"] = fused, foreach
            for parameter in group["params"] if fused else ():
                state = self.state.get(parameter)
                if state:
                    state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)

    def flip_for(self, reader: Reader | None, nbytes: int) -> str | None:
        """See `zerostall.core.reading.Flipping`."""
        if reader is not None and self._flips.reader is not None:
            return "it flips for another checkpointer already"
        self._flips.ask(reader, nbytes)
        return None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; `closure` computes the loss anew, and is called first."""
        self._keep_implementation()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gathered = [(group, self._gather(group)) for group in self.param_groups]
        flipping = [lists for group, lists in gathered if not group["capturable"]]
        with self._flips.turn(
            [local(moment) for lists in flipping for moment in lists.all_moments()],
            [local(parameter) for lists in flipping for parameter in lists.parameters],
        ) as turn:
            for number, (group, lists) in enumerate(gathered):
                self._update(number, group, lists, turn)
        return loss

    def _gather(self, group: Group) -> Lists:
        """The group's tensors; state that is not there yet is made."""
        lists = Lists(moments=([], [], []))
        first, second, most = lists.moments
        self._init_group(group, lists.parameters, lists.gradients, first, second, most, lists.steps)
        if not group["amsgrad"]:
            lists.moments = (first, second)
        return lists

    def _update(self, number: int, group: Group, lists: Lists, turn: Turn) -> None:
        if group["fused"]:
            batches, rest = self._batches.of(number, lists)
            for batch in batches:
                scale, infinite = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
                _launch(batch, group, lists, turn, scale, infinite)
            lists, odd = split(rest)
            self._update_one_by_one(group, odd, turn)
        self._update_by_torch(group, lists, turn, foreach=group["foreach"], fused=group["fused"])

    def _update_one_by_one(self, group: Group, lists: Lists, turn: Turn) -> None:
        """What torch's fused kernels would walk in the wrong order, and gradients scaled by a GradScaler for them."""
        scale, infinite = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if lists.parameters and infinite is not None and infinite.item() == 1:
            return
        if lists.parameters and scale is not None:
            for gradient in lists.gradients:
                gradient.div_(scale.to(gradient.device))
        self._update_by_torch(group, lists, turn, foreach=False, fused=False)

    def _update_by_torch(self, group: Group, lists: Lists, turn: Turn, *, foreach: bool | None, fused: bool) -> None:
        if not lists.parameters:
            return
        turn.settle(map(local, [*lists.all_moments(), *lists.parameters]))
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
        if fused:  # torch counts no change of its own fused operations
            torch.autograd.graph.increment_version([*lists.parameters, *lists.all_moments()])


def _launch(
    batch: Batch, group: Group, lists: Lists, turn: Turn, scale: Tensor | None, infinite: Tensor | None
) -> None:
    from zerostall.optim import kernels  # with Triton, which takes seconds to import

    kind, table = batch.kind, batch.table
    scale = scale.to(kind.device, non_blocking=True) if scale is not None else None
    infinite = infinite.to(kind.device, non_blocking=True) if infinite is not None else None
    lr, lr_at = group["lr"], None
    if isinstance(lr, torch.Tensor):
        if lr.is_cuda:  # nobody waits for it to arrive here
            lr, lr_at = 0.0, lr.to(device=kind.device, dtype=torch.float32, non_blocking=True)
        else:
            lr = lr.item()
    beta1, beta2 = group["betas"]
    torch._foreach_add_(batch.steps, 1)  # pyright: ignore[reportPrivateImportUsage]
    copies = batch.point(lists, turn)
    kernels.adam(
        table,
        kind,
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
    if scale is not None and copies:
        torch._foreach_copy_([one for one, _ in copies], [copy for _, copy in copies])  # pyright: ignore[reportPrivateImportUsage]
    if infinite is not None:
        torch._foreach_sub_(batch.steps, [infinite] * len(batch.steps))  # pyright: ignore[reportPrivateImportUsage]
    batch.written(turn)
