"""Segment and Plan: shared memory between processes, and where pieces lie."""

from __future__ import annotations

import gc
import os

import pytest

from zerostall.errors import CapacityError, FormatError
from zerostall.native import Plan, Segment


def test_two_mappings_show_the_same_bytes() -> None:
    first = Segment("test", 10_000)
    second = Segment.attach(first.fileno(), 10_000)
    assert first.address != second.address
    first.view(0, 10_000)[9_999] = 7
    assert second.view(9_990, 10)[9] == 7
    second.touch(2)
    first.close()
    assert bytes(second.view(9_999, 1)) == b"\x07"


def test_it_can_neither_shrink_nor_grow() -> None:
    segment = Segment("test", 8192)
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fileno(), size)


def test_a_view_keeps_the_memory() -> None:
    segment = Segment("test", 4096)
    view = segment.view(10, 5)
    assert (view.format, view.readonly, view.nbytes, view.ndim) == ("B", False, 5, 1)
    view[:] = b"12345"
    segment.close()
    segment.close()
    gc.collect()
    assert bytes(view) == b"12345"
    with pytest.raises(ValueError, match="closed"):
        segment.view(0, 1)
    with pytest.raises(ValueError, match="closed"):
        segment.fileno()
    with pytest.raises(ValueError, match="closed"):
        _ = segment.address


def test_a_view_ends_within_the_segment() -> None:
    segment = Segment("test", 100)
    assert segment.view(100, 0).nbytes == 0
    for offset, nbytes in ((0, 101), (101, 0), (99, 2), (1 << 63, 1 << 63)):
        with pytest.raises(ValueError, match="beyond"):
            segment.view(offset, nbytes)


def test_only_sealed_memory_of_the_right_size_is_attached(tmp_path) -> None:
    segment = Segment("test", 4096)
    with pytest.raises(FormatError, match="4096 bytes, not 8192"):
        Segment.attach(segment.fileno(), 8192)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(FormatError, match="not sealed"):
        Segment.attach(unsealed, 4096)
    os.close(unsealed)
    with (tmp_path / "file").open("w+b") as file, pytest.raises(FormatError):
        Segment.attach(file.fileno(), 0)
    with pytest.raises(FormatError):
        Segment.attach(-1, 4096)


def test_memory_that_cannot_be_had() -> None:
    with pytest.raises(CapacityError, match="are available"):
        Segment("test", 1 << 50)
    with pytest.raises(ValueError, match="no bytes"):
        Segment("test", 0)


def test_pieces_of_a_chunk() -> None:
    plan = Plan(nbytes=100, header=b"h" * 10, chunk_bytes=30, offsets=[10, 20, 20, 65], sizes=[10, 0, 45, 20])
    assert plan.chunks == 4
    assert [plan.pieces_in(chunk) for chunk in range(4)] == [range(3), range(2, 3), range(2, 4), range(4, 4)]
    with pytest.raises(ValueError, match="no chunk 4"):
        plan.pieces_in(4)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"offsets": [5, 20]}, "before the end"),
        ({"offsets": [10, 15]}, "before the end"),
        ({"sizes": [10, 81]}, "beyond"),
        ({"offsets": [10, 101]}, "beyond"),
        ({"sizes": [10]}, "2 offsets for 1"),
        ({"chunk_bytes": 0}, "no bytes"),
        ({"header": b"h" * 101, "offsets": [], "sizes": []}, "longer"),
        ({"offsets": [10, 20], "sizes": [10, (1 << 64) - 10]}, "beyond"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changed: dict, why: str) -> None:
    facts = {"nbytes": 100, "header": b"h" * 10, "chunk_bytes": 30, "offsets": [10, 20], "sizes": [10, 80]}
    with pytest.raises(ValueError, match=why):
        Plan(**(facts | changed))
