"""Pieces beyond 4 GiB, and a hundred thousand of them."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch

from zerostall.native import Capture, Plan, Pool, Scatter, Segment, Tensors, Verify, crc32c

CHUNK = 16 << 20


def test_a_hundred_thousand_pieces() -> None:
    count = 100_000
    whole = torch.randn(count * 7)
    tensors = list(whole.split(7))
    plan = Plan(
        nbytes=whole.nbytes, header=b"", chunk_bytes=1 << 18, offsets=range(0, whole.nbytes, 28), sizes=[28] * count
    )
    segment = Segment("test", whole.nbytes)
    sources = Tensors(tensors, [True] * count)
    assert sources.refresh() == []
    pool = Pool("test", 2)
    for at_once in ([], range(count)):
        capture = Capture(pool, plan, sources, segment.address, at_once=at_once)
        assert capture.wait(60)
        assert segment.view(0, whole.nbytes) == memoryview(whole.numpy()).cast("B")
    targets = [torch.zeros(7) for _ in range(count // 2)]
    pieces = range(0, count, 2)
    assert Scatter(pool, plan, Tensors(targets, [False] * len(targets)), segment.address, pieces).wait(60)
    assert torch.equal(torch.stack(targets), whole.reshape(count, 7)[::2])
    assert sources.moved() == []


@pytest.mark.long
@pytest.mark.parametrize("expanded", [False, True])
def test_a_piece_beyond_four_gigabytes(expanded: bool) -> None:
    nbytes = (4 << 30) + 3 * CHUNK + 5
    if psutil.virtual_memory().available < 2 * nbytes:
        pytest.skip("not enough memory free")
    # Neither source takes memory: untouched zeros, and one row seen many times.
    if expanded:
        row = torch.arange(251, dtype=torch.uint8)
        tensor = row.expand(nbytes // 251, 251)
        head, tail = bytes(range(5)), bytes(range(246, 251))
    else:
        array = np.zeros(nbytes, dtype=np.uint8)
        head, tail = b"begin", b"final"
        array[:5] = list(head)
        array[-5:] = list(tail)
        array[(4 << 30) - 2 : (4 << 30) + 3] = list(b"4 GiB")
        tensor = torch.from_numpy(array)
    plan = Plan(nbytes=8 + tensor.nbytes, header=b"", chunk_bytes=CHUNK, offsets=[8], sizes=[tensor.nbytes])
    segment = Segment("test", plan.nbytes)
    pool = Pool("test", 2)
    capture = Capture(pool, plan, Tensors([tensor], [False]), segment.address, at_once=[])
    assert capture.wait(100)
    assert bytes(segment.view(8, 5)) == head
    assert bytes(segment.view(plan.nbytes - 5, 5)) == tail
    if expanded:
        at = 8 + 251 * ((4 << 30) // 251)
        assert bytes(segment.view(at, 251)) == bytes(range(251))
    else:
        assert bytes(segment.view(8 + (4 << 30) - 2, 5)) == b"4 GiB"
        assert capture.checksums[5] == crc32c(bytes(CHUNK))
    check = Verify(pool, segment.address, plan.nbytes, CHUNK, capture.checksums)
    assert check.wait(100)
    assert check.bad == []
