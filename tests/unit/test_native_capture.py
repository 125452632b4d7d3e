"""Capture and Scatter: every dtype and stride arrives bit for bit; what is protected is not read again."""

from __future__ import annotations

import gc
import select

import numpy as np
import pytest
import torch

from unit.native_images import checksums_of, plan_of, raw, sources
from zerostall.native import Capture, CaptureOrder, Pieces, Pool, Scatter, Segment, Still, Tensors, Watch

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.fixture
def pool():
    pool = Pool("test", 2)
    yield pool
    pool.close()


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exchange", [True, False])
def test_every_dtype_and_stride_goes_there_and_back(pool: Pool, dtype: torch.dtype, exchange: bool) -> None:
    base = tensor_of(dtype, (6, 5, 8))
    views = [
        base,
        base.transpose(0, 2),
        base[:, 1:4, ::2],
        base[2],
        base[1:2, :, 3],
        base[0, 0, 0],
        base[:0],
        tensor_of(dtype, (1, 7)).expand(3, 7),
        tensor_of(dtype, (300, 200)).t(),
        base.permute(1, 2, 0)[:, 3:],
    ]
    plan, expected = plan_of(views, chunk_bytes=1009, header=b"header " * 3, gap=5)
    segment = Segment("test", plan.nbytes)
    segment.view(0, plan.nbytes)[:] = b"\xaa" * plan.nbytes
    capture = Capture(pool, plan, sources(views, exchange=exchange), segment.address, at_once=[2, 5])
    assert capture.wait()
    assert bytes(segment.view(0, plan.nbytes)) == expected
    assert capture.checksums == checksums_of(expected, 1009)
    assert capture.nbytes_done == plan.nbytes

    wanted = [1, 2, 3, 4, 5, 6, 8, 9]
    stored = torch.zeros_like(base)
    targets = [
        stored.transpose(0, 2),
        torch.zeros_like(views[2]),
        torch.zeros(views[3].shape[::-1], dtype=dtype).t(),
        torch.zeros_like(views[4]),
        torch.zeros_like(views[5]),
        torch.zeros_like(views[6]),
        torch.zeros((300, 200), dtype=dtype).t(),
        torch.zeros_like(views[9]),
    ]
    scatter = Scatter(pool, plan, sources(targets, exchange=exchange), segment.address, wanted)
    assert scatter.wait()
    assert [raw(target) for target in targets] == [raw(views[k]) for k in wanted]
    assert raw(stored) == raw(base)


def test_numpy_arrays_of_any_stride(pool: Pool) -> None:
    base = np.arange(600, dtype="<i4").reshape(20, 30)
    arrays = [
        base,
        base[::-1, ::3],
        base.T,
        np.array(3.5),
        np.zeros((0, 4)),
        np.array(["2020-01-01"], "M8[D]"),
    ]
    plan, expected = plan_of(arrays, chunk_bytes=100)
    segment = Segment("test", plan.nbytes)
    capture = Capture(pool, plan, sources(arrays), segment.address, at_once=[])
    capture.wait()
    assert bytes(segment.view(0, plan.nbytes)) == expected
    targets = [np.zeros_like(base)[::-1], np.zeros((20, 10), "<i4"), np.zeros((30, 20), "<i4", order="F")]
    Scatter(pool, plan, sources(targets), segment.address, [0, 1, 2]).wait()
    for target, array in zip(targets, arrays, strict=False):
        np.testing.assert_array_equal(target, array)
    frozen = base.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="tensor 0 is read-only"):
        Scatter(pool, plan, sources([frozen]), segment.address, [0])


@pytest.mark.parametrize("freeze_bytes", [0, 64 << 10, 1 << 40])
@pytest.mark.parametrize("parameters", [True, False])
def test_what_is_protected_may_be_changed(freeze_bytes: int, parameters: bool) -> None:
    pool = Pool("test", 1)
    tensors = [torch.randn(50_000 + k) for k in range(30)]
    if parameters:
        tensors = [torch.nn.Parameter(tensor) for tensor in tensors]
    plan, expected = plan_of(tensors, chunk_bytes=16 << 10)
    segment = Segment("test", plan.nbytes)
    keep = sources(tensors)
    sums = checksums_of(expected, 16 << 10)
    for _ in range(20):
        before = [tensor.detach().clone() for tensor in tensors]
        capture = Capture(pool, plan, keep, segment.address, at_once=range(0, 30, 7))
        seen = capture.protect(freeze_bytes=freeze_bytes)
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(-1)
        assert capture.wait(60)
        assert bytes(segment.view(0, plan.nbytes)) == expected
        assert capture.checksums == sums
        assert seen.frozen_bytes <= freeze_bytes
        assert seen.frozen_bytes + seen.helped_bytes <= plan.nbytes
        if freeze_bytes == 0:
            assert seen.frozen_bytes == 0
        assert capture.protect().pending == 0
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)


def test_what_is_spared_is_read_after_the_guard() -> None:
    """Pieces that stay as they are need not be waited for; those that are kept come from where they were put."""
    pool = Pool("test", 1)
    tensors = [torch.randn(100_000 + k) for k in range(12)]
    at_once, left, kept, other = [0, 5], [6, 7, 8, 9, 10, 11], [3, 4], [1, 2]
    plan, expected = plan_of(tensors, chunk_bytes=64 << 10)
    segment = Segment("test", plan.nbytes)
    keep = sources(tensors)
    before = [tensor.clone() for tensor in tensors]
    # The pool's one thread is busy with an older job of a single chunk, mostly until the guard has come and gone.
    big = [torch.zeros(32_000_000)]
    big_plan = plan_of(big, chunk_bytes=256 << 20)[0]
    elsewhere = Segment("busy", big_plan.nbytes)
    spared = 0
    for _ in range(200):
        busy = Capture(pool, big_plan, sources(big), elsewhere.address, at_once=[])
        capture = Capture(pool, plan, keep, segment.address, at_once=at_once)
        pending = capture.pending
        assert pending == sorted(pending) and not set(pending) & set(at_once)
        aside = [torch.zeros_like(tensors[piece]) for piece in kept]
        places = [(piece, copy.data_ptr()) for piece, copy in zip(kept, aside, strict=True)]
        seen = capture.protect(left=left, kept=places)
        for piece in at_once + other:
            tensors[piece].fill_(-1)
        for piece, copy in zip(kept, aside, strict=True):
            copy.copy_(tensors[piece])
            tensors[piece].fill_(-1)
        capture.release()
        assert capture.wait(60) and busy.wait(60)
        assert bytes(segment.view(0, plan.nbytes)) == expected
        assert capture.checksums == checksums_of(expected, 64 << 10)
        assert capture.pending == []
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        spared += seen.spared_bytes > 0
        if spared == 3:
            break
    assert spared == 3
    pool.close()


def test_a_chunk_of_others_too_is_read_at_the_guard() -> None:
    pool = Pool("test", 1)
    tensors = [torch.randn(1000) for _ in range(4)]
    plan, expected = plan_of(tensors, chunk_bytes=64 << 10)
    segment = Segment("test", plan.nbytes)
    capture = Capture(pool, plan, sources(tensors), segment.address, at_once=[])
    assert capture.protect(left=[0, 1, 2]).spared_bytes == 0
    tensors[3].zero_()
    capture.release()
    assert capture.wait(60)
    assert bytes(segment.view(0, plan.nbytes)) == expected
    pool.close()


def test_at_once_pieces_are_copied_before_the_constructor_returns() -> None:
    pool = Pool("test", 2)
    tensors = [torch.randn(700_000), torch.randn(10), torch.randn(100, 100).t(), torch.randn(2_000_000)]
    plan, expected = plan_of(tensors, chunk_bytes=1 << 20)
    segment = Segment("test", plan.nbytes)
    capture = Capture(pool, plan, sources(tensors), segment.address, at_once=[0, 1, 2, 3])
    for tensor in tensors:
        tensor.zero_()
    capture.wait()
    assert bytes(segment.view(0, plan.nbytes)) == expected
    assert capture.checksums == checksums_of(expected, 1 << 20)


def test_one_order_takes_what_the_tensors_hold_at_each_turn_until_they_are_others(pool: Pool) -> None:
    tensors = [torch.zeros(700_000), torch.zeros(10)]
    plan, _ = plan_of(tensors, chunk_bytes=1 << 20)
    segment = Segment("test", plan.nbytes)
    order = CaptureOrder(pool, plan, Tensors(tensors, [True, False]), at_once=Pieces([1]))
    busy = np.zeros(1, np.uint8)
    for value in (1.0, 2.0):
        tensors[0].data = torch.full_like(tensors[0], value)  # other memory each time
        tensors[1].fill_(value)
        busy[0] = 0
        capture = order.begin(segment.address, busy.ctypes.data, (), False, (0, 0))
        assert capture is not None and busy[0] == 1
        tensors[1].zero_()
        capture.start()
        capture.wait()
        expected = plan_of([torch.full_like(tensor, value) for tensor in tensors])[1]
        assert bytes(segment.view(0, plan.nbytes)) == expected
        assert capture.checksums == checksums_of(expected, 1 << 20)
    tensors[0].resize_(5)
    busy[0] = 0
    assert order.begin(segment.address, busy.ctypes.data, (), False, (0, 0)) is None and busy[0] == 0


def test_an_order_at_rest_takes_nothing_once_something_has_changed(pool: Pool) -> None:
    tensors = [torch.zeros(10)]
    plan, _ = plan_of(tensors)
    segment = Segment("test", plan.nbytes)
    order = CaptureOrder(pool, plan, Tensors(tensors, [False]), at_once=Pieces([0]))
    same, untouched = {"a": 1}, {"a": 1}
    still = Still([Watch([same])], [Watch([untouched])])

    def begun() -> bool:
        capture = order.begin_at_rest(still, segment.address, 0, (), False, (0, 0))
        if capture is not None:
            capture.start()
            capture.wait()
        return capture is not None

    assert begun()
    same["a"] = 2  # another number of its type
    assert begun()
    untouched["a"] = 2
    assert not begun()


def test_a_job_tells_when_it_is_done(pool: Pool) -> None:
    tensors = [torch.randn(100_000)]
    plan, _ = plan_of(tensors)
    segment = Segment("test", plan.nbytes)
    capture = Capture(pool, plan, sources(tensors), segment.address, at_once=[])
    assert select.select([capture], [], [], 60)[0] == [capture]
    assert capture.done()
    assert capture.wait(0)
    assert not capture.cancelled


def test_cancel_leaves_nothing_behind() -> None:
    pool = Pool("test", 1)
    tensors = [torch.randn(8_000_000)]
    plan, _ = plan_of(tensors, chunk_bytes=1 << 20)
    segment = Segment("test", plan.nbytes)
    keep = sources(tensors)
    # The pool's one thread is busy with an older job, so that nothing has begun when the second is cancelled.
    elsewhere = Segment("busy", plan.nbytes)
    for _ in range(50):  # unless this thread has slept meanwhile
        busy = [Capture(pool, plan, keep, elsewhere.address, at_once=[]) for _ in range(8)]
        capture = Capture(pool, plan, keep, segment.address, at_once=[])
        capture.cancel()
        for older in busy:
            older.wait(60)
        assert capture.wait(60)
        if capture.cancelled:
            break
    assert capture.cancelled
    assert capture.protect().pending == 0
    with pytest.raises(ValueError, match="when it is done"):
        _ = capture.checksums
    del capture
    # Letting go of a running job cancels it as well, and returns when no thread touches the memory any more.
    for _ in range(50):
        Capture(pool, plan, keep, segment.address, at_once=[])


def test_misuse_is_a_value_error(pool: Pool) -> None:
    tensors = [torch.zeros(4), torch.zeros(5)]
    plan, _ = plan_of(tensors)
    segment = Segment("test", plan.nbytes)
    with pytest.raises(ValueError, match="1 tensors for a plan of 2"):
        Capture(pool, plan, sources(tensors[:1]), segment.address, at_once=[])
    with pytest.raises(ValueError, match="tensor 0 has 20 bytes"):
        Capture(pool, plan, sources(tensors[::-1]), segment.address, at_once=[])
    with pytest.raises(ValueError, match="no piece 2"):
        Capture(pool, plan, sources(tensors), segment.address, at_once=[2])
    with pytest.raises(ValueError, match="2 targets for 1"):
        Scatter(pool, plan, sources(tensors), segment.address, [0])
    with pytest.raises(ValueError, match="at least one thread"):
        Pool("none", 0)
    with pytest.raises(RuntimeError, match="neither in host memory nor on a CUDA device"):
        Capture(pool, plan, sources([torch.zeros(4, device="meta"), tensors[1]]), segment.address, at_once=[])


def test_an_image_without_bytes(pool: Pool) -> None:
    plan, _ = plan_of([])
    assert plan.chunks == 0
    capture = Capture(pool, plan, sources([]), 0, at_once=[])
    assert capture.done()
    assert capture.checksums == []
    assert capture.protect().pending == 0


def test_many_captures_at_once_and_out_of_order(pool: Pool) -> None:
    tensors = [torch.randn(300_000), torch.randn(3)]
    plan, expected = plan_of(tensors, chunk_bytes=64 << 10)
    keep = sources(tensors)
    segments = [Segment("test", plan.nbytes) for _ in range(12)]
    captures = [Capture(pool, plan, keep, s.address, at_once=[]) for s in segments]
    for capture, segment in reversed(list(zip(captures, segments, strict=True))):
        capture.protect()
        assert capture.wait(60)
        assert bytes(segment.view(0, plan.nbytes)) == expected


def test_the_sources_live_until_the_capture_is_gone(pool: Pool) -> None:
    tensor = torch.ones(4_000_000)
    plan, expected = plan_of([tensor], chunk_bytes=1 << 20)
    segment = Segment("test", plan.nbytes)
    capture = Capture(pool, plan, sources([tensor]), segment.address, at_once=[])
    del tensor
    gc.collect()
    assert capture.wait(60)
    assert bytes(segment.view(0, plan.nbytes)) == expected
