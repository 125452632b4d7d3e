"""Tensors on the stand-in device whose every byte is one value, and the image of them."""

from __future__ import annotations

from standin.cuda import FakeCuda, StandIn
from zerostall.native import Device, Plan, Segment, Tensors

SIZES = [5000, 3, 70_000, 1, 4096, 250_000, 12]
CHUNK = 64 << 10


def make(fake: FakeCuda) -> tuple[list[StandIn], Tensors, Plan]:
    tensors = [StandIn(fake, size) for size in SIZES]
    sizes = [tensor.nbytes for tensor in tensors]
    offsets = [100 + sum(sizes[:k]) + 3 * k for k in range(len(sizes))]
    plan = Plan(nbytes=offsets[-1] + sizes[-1], header=b"h" * 100, chunk_bytes=CHUNK, offsets=offsets, sizes=sizes)
    sources = Tensors(tensors, [True] * len(tensors))
    assert sources.refresh() == []
    return tensors, sources, plan


def image_of(value: int) -> bytes:
    return b"h" * 100 + b"\0\0\0".join(bytes([value]) * (4 * size) for size in SIZES)


def room(plan: Plan, device: Device | None) -> Segment:
    segment = Segment("test", plan.nbytes)
    if device is not None:
        segment.pin(device, stretch=2 << 20, threads=2)
        assert segment.pinned(0)
    return segment


def fill(fake: FakeCuda, stream: int, tensors: list[StandIn], value: int, first: int = 0) -> None:
    for k, tensor in enumerate(tensors):
        fake.work(stream, first if k == 0 else 0, tensor, value)
