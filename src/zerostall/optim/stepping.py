"""A step that lets a snapshot finish while it goes on: what all optimizers of this package do in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zerostall.errors import CapabilityError
from zerostall.optim.batches import Batch, split
from zerostall.optim.flips import Flips
from zerostall.optim.lists import Lists, locals_of
from zerostall.optim.rosters import Group, Roster, Rosters

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from zerostall.core.reading import Reader
    from zerostall.optim.flips import Turn


class Stepping(torch.optim.Optimizer):
    """To inherit from before an optimizer of torch, which makes state and updates what no kernel can.

    What is to be defined: `_gather`, `_launch`, `_update_by_torch`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._flips = Flips()
        self._rosters = Rosters()
        super().__init__(*arguments, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_flips" in self.__dict__:
            self._flips.forget()
        else:  # a copy, of which no checkpointer knows
            self._flips = Flips()
            self._rosters = Rosters()
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
                if state and "step" in state:
                    state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)

    def flip_for(self, reader: Reader | None, nbytes: int) -> str | None:
        """See `zerostall.core.reading.Flipping`."""
        if reader is not None and self._flips.reader is not None:
            return "it flips for another checkpointer already"
        self._flips.ask(reader, nbytes)
        return None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; `closure` computes the loss anew, and is called first."""
        return self._step(closure)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]

    @torch.compiler.disable  # what is still to be read, and where, is no part of a graph
    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        _check_capture(self)
        self._keep_implementation()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rosters = self._rosters.of(self, self._gather)
        try:
            with self._flips.turn(roster.lists for roster in rosters if not roster.group.get("capturable")) as turn:
                for roster in rosters:
                    self._update(roster, turn)
        finally:
            for roster in rosters:
                roster.let_go()
        return loss

    def _update(self, roster: Roster, turn: Turn) -> None:
        group, lists = roster.group, roster.lists
        for batch in roster.batches:
            self._update_batch(batch, roster, turn)
        if not roster.rest:
            return
        if group["fused"]:
            lists, odd = split(lists.pick(roster.rest) if roster.batches else lists, self._fused_is_right)
            self._update_one_by_one(group, odd, turn)
        self._settle_and_update(group, lists, turn, foreach=group["foreach"], fused=group["fused"])

    def _update_batch(self, batch: Batch, roster: Roster, turn: Turn) -> None:
        device = batch.kind.device
        scale, infinite = self._scaling(device)
        copies = batch.point(roster.gradients, turn)
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._launch(batch, roster.group, scale, infinite)
        else:
            self._launch(batch, roster.group, scale, infinite)
        if scale is not None and copies:
            torch._foreach_copy_([one for one, _ in copies], [copy for _, copy in copies])  # pyright: ignore[reportPrivateImportUsage]
        batch.written(turn)

    def _update_one_by_one(self, group: Group, lists: Lists, turn: Turn) -> None:
        """What torch's fused kernels would walk in the wrong order, and gradients scaled by a GradScaler for them."""
        scale, infinite = self._scaling(None)
        if lists.parameters and infinite is not None and infinite.item() == 1:
            return
        if lists.parameters and scale is not None:
            for gradient in lists.gradients:
                gradient.div_(scale.to(gradient.device))
        self._settle_and_update(group, lists, turn, foreach=False, fused=False)

    def _settle_and_update(self, group: Group, lists: Lists, turn: Turn, *, foreach: bool | None, fused: bool) -> None:
        if not lists.parameters:
            return
        turn.settle(locals_of([*lists.all_moments(), *lists.parameters]))
        self._update_by_torch(group, lists, foreach=foreach, fused=fused)
        if fused:  # torch counts no change of its own fused operations
            torch.autograd.graph.increment_version([*lists.parameters, *lists.all_moments()])

    def _scaling(self, device: torch.device | None) -> tuple[Tensor | None, Tensor | None]:
        """What a GradScaler left here, on a device: what to divide gradients by, and whether some overflowed."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        infinite: Tensor | None = getattr(self, "found_inf", None)
        if device is None:
            return scale, infinite
        return (
            None if scale is None else scale.to(device, non_blocking=True),
            None if infinite is None else infinite.to(device, non_blocking=True),
        )

    @staticmethod
    def _fused_is_right(parameter: Tensor) -> bool:
        """Whether torch's own fused operation updates such a parameter right."""
        return True

    def _gather(self, group: Group) -> Lists:
        """The group's tensors; state that is not there yet is made."""
        raise NotImplementedError

    def _launch(self, batch: Batch, group: Group, scale: Tensor | None, infinite: Tensor | None) -> None:
        """Update a batch, whose table says where what is."""
        raise NotImplementedError

    def _update_by_torch(self, group: Group, lists: Lists, *, foreach: bool | None, fused: bool) -> None:
        raise NotImplementedError


def rate_of(group: Group, device: torch.device) -> tuple[float, Tensor | None]:
    """The learning rate, or where on the device it is."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.is_cuda:  # nobody waits for it to arrive here
        return 0.0, lr.to(device=device, dtype=torch.float32, non_blocking=True)
    return float(lr), None


def refuse_differentiable(optimizer: str) -> None:
    raise CapabilityError(
        f"zerostall.optim.{optimizer} cannot be differentiated",
        hint=f"use torch.optim.{optimizer}(differentiable=True)",
    )


def _check_capture(optimizer: torch.optim.Optimizer) -> None:
    """torch's own check that a graph captures steps only where `capturable` says so."""
    renamed = "_accelerator_graph_capture_health_check"  # in torch 2.13
    getattr(optimizer, renamed if hasattr(optimizer, renamed) else "_cuda_graph_capture_health_check")()
