"""Elements of one floating-point type as another: to the nearest number, ties to even, as torch does it."""

from __future__ import annotations

import torch

from zerostall.trainer.state import tensors


def convert(source: memoryview, target: memoryview, source_type: str, target_type: str) -> None:
    """Fill `target` with the elements of `source`. Any thread."""
    if not len(source):
        return
    into = torch.frombuffer(target, dtype=tensors.torch_dtype(target_type))
    into.copy_(torch.frombuffer(source, dtype=tensors.torch_dtype(source_type)))
