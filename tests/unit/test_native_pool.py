"""The threads of a pool: they begin soon or now, whoever rests, and end with it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
import torch

from unit.native_images import plan_of, sources
from zerostall.native import Capture, CaptureOrder, Pieces, Pool, Segment, Tensors


@pytest.fixture
def pool():
    pool = Pool("test", 2)
    yield pool
    pool.close()


def test_a_closed_pool_fails_its_jobs() -> None:
    tensors = [torch.randn(20_000_000)]
    plan, _ = plan_of(tensors, chunk_bytes=64 << 10)
    segment = Segment("test", plan.nbytes)

    def closed_meanwhile() -> bool:
        pool = Pool("test", 1)
        capture = Capture(pool, plan, sources(tensors), segment.address, at_once=[])
        pool.close()
        pool.close()
        with pytest.raises(ValueError, match="closed"):
            Capture(pool, plan, sources(tensors), segment.address, at_once=[])
        try:
            return not capture.wait(60)
        except ValueError as error:
            return "closed before" in str(error)

    assert any(closed_meanwhile() for _ in range(50))  # a copy that was quicker than this thread is no failure


def test_threads_are_named_and_end() -> None:
    def names() -> list[str]:
        return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]

    pool = Pool("zs-test-threads-long", 3)
    deadline = time.monotonic() + 60
    while names().count("zs-test-threads") != 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert names().count("zs-test-threads") == 3
    pool.close()
    assert names().count("zs-test-threads") == 0


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_jobs_that_begin_soon_and_those_that_begin_now_all_end(threads: int) -> None:
    """Whoever rests, listening for the bell or not, is found by the next job, however soon it comes."""
    tensors = [torch.arange(5000), torch.arange(7)]
    plan, expected = plan_of(tensors, chunk_bytes=4096)
    seen = sources(tensors)
    segments = [Segment("test", plan.nbytes) for _ in range(4)]
    pool = Pool("test", threads)
    for turn in range(150):
        captures = []
        for k, segment in enumerate(segments[: 1 + turn % 4]):
            soon = (turn >> k) % 2 == 0
            captures.append(Capture(pool, plan, seen, segment.address, at_once=[1], held=soon))
            if soon:
                captures[-1].start()
        for capture, segment in zip(captures, segments, strict=False):
            assert capture.wait(60.0)
            assert bytes(segment.view(0, plan.nbytes)) == expected
    pool.close()


def test_a_guard_need_not_wait_for_the_bell(pool: Pool) -> None:
    tensors = [torch.arange(5000)]
    plan, expected = plan_of(tensors, chunk_bytes=4096)
    segment = Segment("test", plan.nbytes)
    seen = sources(tensors)
    capture = Capture(pool, plan, seen, segment.address, at_once=[], held=True)
    capture.start()
    capture.protect()
    tensors[0].zero_()
    assert capture.wait(60.0)
    assert bytes(segment.view(0, plan.nbytes)) == expected


def test_a_pool_may_be_closed_before_its_bell_has_rung() -> None:
    tensors = [torch.arange(5000)]
    plan, _ = plan_of(tensors, chunk_bytes=4096)
    segment = Segment("test", plan.nbytes)
    for _ in range(20):
        pool = Pool("test", 2)
        capture = Capture(pool, plan, sources(tensors), segment.address, at_once=[], held=True)
        capture.start()
        pool.close()
        with contextlib.suppress(ValueError):  # it says so where it had not begun
            capture.wait(60.0)
        assert capture.done()


@pytest.mark.parametrize("asked", [False, True])
def test_threads_begin_by_themselves_or_when_somebody_waits(asked: bool) -> None:
    """The first ones ring soon; those after them late, as long as no guard has found something unread."""
    pool = Pool("test", 2)
    tensors = [torch.randn(1000) for _ in range(4)]
    plan, expected = plan_of(tensors, chunk_bytes=4096)
    segment = Segment("test", plan.nbytes)
    order = CaptureOrder(pool, plan, Tensors(tensors, [True] * 4), at_once=Pieces([]))
    for turn in range(12):
        segment.view(0, plan.nbytes)[:] = bytes(plan.nbytes)
        capture = order.begin(segment.address, 0, (), False, (0, 0))
        assert capture is not None
        capture.start()
        if asked:
            capture.hurry()
        if turn == 9:
            capture.protect()
        assert capture.wait(60)
        capture.hurry()  # nobody is in the way of what has ended
        assert bytes(segment.view(0, plan.nbytes)) == expected
    pool.close()
