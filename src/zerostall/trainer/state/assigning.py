"""Memory for tensors on the meta device, in place: every holder of a parameter goes on holding it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zerostall.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Assignment:
    """Gives tensors memory on a device, and takes it back from those that nothing will fill.

    What they are made of is exchanged, not they themselves, so that optimizers and ties see the change.
    """

    def __init__(self, device: str | torch.device) -> None:
        self._device = device
        self._given: dict[int, tuple[list[str], torch.Tensor, torch.Tensor]] = {}

    def give(self, without: Mapping[str, torch.Tensor]) -> None:
        """Give each of these memory with no values in it. MismatchError, and nothing has changed, where one cannot."""
        try:
            for name, tensor in without.items():
                self._give(name, tensor)
        except BaseException:
            self.take_back()
            raise

    def _give(self, name: str, tensor: torch.Tensor) -> None:
        if id(tensor) in self._given:  # tied
            self._given[id(tensor)][0].append(name)
            return
        made = torch.empty_like(tensor, device=self._device)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        try:
            torch.utils.swap_tensors(tensor, made)
        except RuntimeError as error:  # somebody else holds on to what it is made of
            raise MismatchError(
                f"{name} is on the meta device and cannot be given memory: {error}",
                different={name: "on the meta device"},
                hint="give the module memory first: module.to_empty(device=...)",
            ) from error
        self._given[id(tensor)] = ([name], tensor, made)

    def take_back(self, keep: Iterable[object] = ()) -> list[str]:
        """Put all back on the meta device but those to keep; names of the others."""
        kept = set(map(id, keep))
        names: list[str] = []
        for key in [key for key in self._given if key not in kept]:
            found, tensor, made = self._given.pop(key)
            torch.utils.swap_tensors(tensor, made)
            names += found
        return names
