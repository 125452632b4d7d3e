"""What the kernels are told of tensors: where they are, and which program updates which part of which."""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 4096
"""Elements that a program updates."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, on tensors in host memory."""


class Table:
    """Of the tensors of one launch: a column of numbers for each thing that a kernel wants to know of them.

    Attributes:
        rows: how many tensors.
        programs: how many programs to launch.
        owner: of each program, whose block it updates.
        first: which of its blocks.
        columns: one after another, int64 on the device; the numbers of elements come first.
        aligned: whether all addresses are multiples of 16.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int]) -> None:
        counts = torch.tensor([(size + BLOCK - 1) // BLOCK for size in sizes])
        starts = counts.cumsum(0) - counts
        owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        self.rows = len(sizes)
        self.programs = len(owner)
        self.owner = owner.to(device=device, dtype=torch.int32)
        self.first = (torch.arange(self.programs) - starts[owner]).to(device=device, dtype=torch.int32)
        self.columns = torch.empty(0, dtype=torch.int64, device=device)
        self.aligned = False
        self._sizes = list(sizes)
        self._addresses: list[list[int]] = []
        self._recorded: list[torch.Tensor] = []

    def point(self, addresses: list[list[int]]) -> None:
        """Tell where the tensors are: a list for each column; 0 is nowhere.

        Uploaded only when an address is another one than before.
        """
        if addresses == self._addresses:
            return
        self._addresses = addresses
        self.aligned = not any(address % 16 for column in addresses for address in column)
        numbers = array("q")
        for column in (self._sizes, *addresses):
            numbers.extend(column)
        flat = torch.frombuffer(numbers, dtype=torch.int64)
        if self.columns.is_cuda:
            flat = flat.pin_memory()
            if torch.cuda.is_current_stream_capturing():
                self._recorded.append(flat)  # every replay of the graph reads it
        if self.columns.numel() != flat.numel():
            self.columns = torch.empty(flat.numel(), dtype=torch.int64, device=self.owner.device)
        self.columns.copy_(flat, non_blocking=True)
