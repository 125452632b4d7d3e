"""The least that a snapshot can do: the same bytes, copied to host memory, and nothing else."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.peers.contract import Training, state_of, tensors_in


class PlainCopies:
    """No checkpoint, but what the machine itself takes for one: every tensor is copied to page-locked memory, all
    copies queued by `save` on a stream of their own, and the update waits on that stream. No thread, no checksum,
    nothing that outlives the process. What a system adds beyond this it adds by itself.
    """

    fsyncs = False
    outlives = "nothing"
    skipped = 0

    def __init__(self, training: Training, folder: Path) -> None:
        del folder
        self._from = {path: _local(tensor) for path, tensor in tensors_in(state_of(training)).items()}
        on_device = next((one for one in self._from.values() if one.is_cuda), None)
        self._to = {path: _beside(one) for path, one in self._from.items()}
        self._stream = None if on_device is None else torch.cuda.Stream(on_device.device)

    def save(self, step: int) -> None:
        del step
        if self._stream is None:
            self._copy()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._copy()

    def _copy(self) -> None:
        for path, one in self._from.items():
            self._to[path].copy_(one, non_blocking=True)

    def persist(self, step: int) -> None:
        self.save(step)

    def before_update(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def staged(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def drain(self) -> None:
        self.staged()

    def make_room(self) -> None: ...

    def load(self) -> dict[str, torch.Tensor]:
        return self._to

    def close(self) -> None:
        self.drain()
        self._to = {}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor  # half a second, of each process that measures anything

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _beside(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for it, page-locked and used once."""
    return torch.zeros_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
