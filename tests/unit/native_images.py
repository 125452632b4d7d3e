"""Images for the tests of the native core: a plan for some tensors, and what its image must be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from zerostall.native import Plan, Segment, Tensors, crc32c


def raw(tensor: torch.Tensor | np.ndarray) -> bytes:
    """Logical row-major bytes, found by torch and numpy alone."""
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def plan_of(
    tensors: Sequence[torch.Tensor | np.ndarray],
    *,
    chunk_bytes: int = 4096,
    header: bytes = b"",
    gap: int = 0,
) -> tuple[Plan, bytes]:
    """A plan with `gap` bytes after each piece, and the image it describes."""
    image, offsets, sizes = bytearray(header), [], []
    for tensor in tensors:
        data = raw(tensor)
        offsets.append(len(image))
        sizes.append(len(data))
        image += data + bytes(gap)
    plan = Plan(nbytes=len(image), header=header, chunk_bytes=chunk_bytes, offsets=offsets, sizes=sizes)
    return plan, bytes(image)


def sources(tensors: Sequence[torch.Tensor | np.ndarray], *, exchange: bool = True) -> Tensors:
    """These, untracked, as they are now."""
    result = Tensors(tensors, [False] * len(tensors), exchange=exchange)
    assert result.refresh() == []
    return result


def checksums_of(image: bytes, chunk_bytes: int) -> list[int]:
    return [crc32c(image[at : at + chunk_bytes]) for at in range(0, len(image), chunk_bytes)]


def segment_with(image: bytes) -> Segment:
    """A segment that holds these bytes, or room for one if there are none."""
    segment = Segment("test", max(len(image), 1))
    segment.view(0, len(image))[:] = image
    return segment
