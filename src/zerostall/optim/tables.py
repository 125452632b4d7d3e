"""What the kernels are told of tensors: where they are, and which program updates which part of which."""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

TILE = 1024
"""Elements that a program updates at a time."""

_MOST_TILES = 32
_ENOUGH_PROGRAMS = 4096

WIDTH = 16
"""Numbers of a row: what a kernel asks of one tensor lies in one line of its cache."""

SIZE, PARAMETER, GRADIENT, KEPT, STEP, MOMENTS = range(6)
"""What they are: the number of elements, addresses, and from MOMENTS on of each moment where it is read and where it is
written. 0 is nowhere."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, on tensors in host memory."""


class Table:
    """Of the tensors of one launch: a row of numbers for each.

    Attributes:
        rows: how many tensors.
        programs: how many programs to launch.
        tiles: how many tiles one updates at most.
        work: of each program its row, times 2**32, and which share of it.
        columns: all rows, int64 on the device.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int]) -> None:
        self.rows = len(sizes)
        self.tiles = min(max(sum(sizes) // (TILE * _ENOUGH_PROGRAMS), 1), _MOST_TILES)
        share = TILE * self.tiles
        counts = torch.tensor([(size + share - 1) // share for size in sizes])
        row = torch.repeat_interleave(torch.arange(self.rows), counts)
        self.programs = len(row)
        self.work = ((row << 32) | (torch.arange(self.programs) - (counts.cumsum(0) - counts)[row])).to(device)
        self.columns = torch.zeros(self.rows * WIDTH, dtype=torch.int64, device=device)
        self._numbers = array("q", bytes(8 * self.rows * WIDTH))
        self._known: list[list[int]] = [[0] * self.rows for _ in range(WIDTH)]
        self._stale = True
        self._mine = True  # no graph reads the columns
        self._promised = False  # they are there only once a graph is replayed
        self._lent: list[torch.Tensor] = []
        # Pinned memory cannot always be had while a graph is captured.
        self._pinned = torch.empty_like(self.columns, device="cpu", pin_memory=True) if self.columns.is_cuda else None
        self.put(SIZE, list(sizes))

    @property
    def recorded(self) -> bool:
        """Whether a graph reads it at every replay."""
        return bool(self._lent)

    def put(self, column: int, numbers: list[int]) -> None:
        if numbers != self._known[column]:
            self._known[column] = numbers
            self._numbers[column::WIDTH] = array("q", numbers)
            self._stale = True

    def upload(self) -> None:
        """Bring what was put to the device, if any of it is new.

        What a graph that is being captured will read is left to it, and later steps take other columns.
        """
        if self.columns.is_cuda and torch.cuda.is_current_stream_capturing():
            self._lend()
        elif self._stale or not self._mine:
            if not self._mine:
                self.columns = torch.empty_like(self.columns)
            numbers = torch.frombuffer(self._numbers, dtype=torch.int64)
            self.columns.copy_(numbers.pin_memory() if self.columns.is_cuda else numbers, non_blocking=True)
            self._stale, self._mine, self._promised = False, True, False

    def _lend(self) -> None:
        if self._stale or self._promised:
            numbers = torch.frombuffer(self._numbers, dtype=torch.int64)
            pinned, self._pinned = self._pinned, None
            pinned = numbers.pin_memory() if pinned is None else pinned.copy_(numbers)
            self.columns = torch.empty_like(self.columns)
            self.columns.copy_(pinned, non_blocking=True)
            self._lent.append(pinned)
            self._promised = True
        self._lent.append(self.columns)
        self._stale = self._mine = False
