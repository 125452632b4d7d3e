"""Captures from a device and back, on the stand-in driver: order, guard, lifetimes, refusals."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from standin.cuda import LAUNCH_FAILED, OUT_OF_MEMORY, FakeCuda, StandIn, Storage
from unit.device_images import CHUNK, fill, image_of, make, room
from zerostall import telemetry
from zerostall.errors import CapabilityError, DeviceError
from zerostall.native import Capture, CaptureOrder, Device, Pieces, Plan, Pool, Scatter, Segment, Tensors, crc32c
from zerostall.trainer.devices import Devices


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool("test", 2)
    yield pool
    pool.close()


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("own_stream", [True, False])
@pytest.mark.parametrize("freeze", [0, 200_000, 1 << 24])
def test_what_is_queued_before_counts_and_what_comes_after_does_not(
    fake: FakeCuda, pool: Pool, device: Device, freeze: int, own_stream: bool, pinned: bool
) -> None:
    tensors, sources, plan = make(fake)
    stream = fake.stream() if own_stream else 0
    segment = room(plan, device if pinned else None)
    if freeze:
        device.reserve(2 << 20, CHUNK)
        assert device.reserved >= 2 << 20
    fake.delay(100)
    for step in range(1, 5):
        assert sources.refresh() == []
        if pinned:
            fake.hold(stream)  # whatever waited for the device now would wait for ever
        fill(fake, stream, tensors, step, first=5000)  # still running at save
        capture = Capture(pool, plan, sources, segment.address, at_once=[1, 3, 4], streams=[(device, stream)], ahead=2)
        for k in (1, 3, 4):  # forward does this
            fake.work(stream, 0, tensors[k], 0xBB)
        protection = capture.protect(freeze_bytes=freeze, streams=[(device, stream)])
        fake.release()
        fill(fake, stream, tensors, 0xCC)  # the optimizer
        assert (protection.frozen_bytes > 0) == (freeze > 0 and protection.pending > 0)
        capture.wait(60)
        assert bytes(segment.view(0, plan.nbytes)) == image_of(step)
        assert capture.checksums == [crc32c(image_of(step)[at : at + CHUNK]) for at in range(0, plan.nbytes, CHUNK)]
        assert capture.drain_seconds > 0


@pytest.mark.parametrize("forecast", [False, True])
def test_an_order_takes_captures_time_and_again(fake: FakeCuda, pool: Pool, device: Device, forecast: bool) -> None:
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    order = CaptureOrder(pool, plan, sources, at_once=Pieces([1, 3, 4]))
    for step in range(1, 5):
        fill(fake, stream, tensors, step, first=5000)  # still running at save
        capture = order.begin(segment.address, 0, [(device, stream)], forecast, (step, 2))
        assert capture is not None
        for k in (1, 3, 4):  # forward does this
            fake.work(stream, 0, tensors[k], 0xBB)
        capture.start()
        capture.protect(streams=[(device, stream)])
        fill(fake, stream, tensors, 0xCC)  # the optimizer
        assert capture.wait(60)
        assert bytes(segment.view(0, plan.nbytes)) == image_of(step)
    tensors[2].shape = (7,)
    assert order.begin(segment.address, 0, [(device, stream)], forecast, (0, 0)) is None


def test_beginning_a_capture_asks_the_driver_for_four_things(fake: FakeCuda, pool: Pool, device: Device) -> None:
    """Its context and an end to that, whether the stream is recorded, and an event; all else the copy thread does."""
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    order = CaptureOrder(pool, plan, sources, at_once=Pieces([]))
    counts: list[int] = []
    while len(counts) < 3 or (min(counts) > 4 and len(counts) < 50):
        step = len(counts) + 1
        fill(fake, stream, tensors, step)
        before = fake.calls()
        capture = order.begin(segment.address, 0, [(device, stream)], True, (step, 2))
        counts.append(fake.calls() - before)  # the copy thread may still be at the end of the one before
        assert capture is not None
        capture.start()
        capture.protect(streams=[(device, stream)])
        assert capture.wait(60)
        assert bytes(segment.view(0, plan.nbytes)) == image_of(step)
    assert min(counts) == 4, counts


def test_no_checksum_is_taken_before_what_is_copied_at_once_is_there(
    fake: FakeCuda, pool: Pool, device: Device
) -> None:
    """The device's thread, which lets those of the pool begin, comes while much is still being copied at once."""
    array = np.zeros(8 << 20, np.uint8)
    on_device = StandIn(fake, 5000)
    sizes = [array.nbytes, on_device.nbytes]
    plan = Plan(nbytes=sum(sizes), header=b"", chunk_bytes=CHUNK, offsets=[0, sizes[0]], sizes=sizes)
    sources = Tensors([array, on_device], [False, True])
    assert sources.refresh() == []
    segment, stream = room(plan, device), fake.stream()
    order = CaptureOrder(pool, plan, sources, at_once=Pieces([0]))
    for step in range(1, 21):
        array[:] = step
        fake.work(stream, 0, on_device, step)
        capture = order.begin(segment.address, 0, [(device, stream)], False, (step, 2))
        assert capture is not None
        array[:] = 0xBB
        capture.start()
        capture.protect(streams=[(device, stream)])
        assert capture.wait(60)
        image = bytes([step]) * plan.nbytes
        assert bytes(segment.view(0, plan.nbytes)) == image
        assert capture.checksums == [crc32c(image[at : at + CHUNK]) for at in range(0, plan.nbytes, CHUNK)]


@pytest.mark.parametrize("ahead", [2**64 - 1, None])
def test_the_call_gives_the_device_one_event_and_the_copy_thread_does_the_rest(
    fake: FakeCuda, pool: Pool, device: Device, ahead: int | None
) -> None:
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    for step in range(1, 4):
        assert sources.refresh() == []
        fill(fake, stream, tensors, step)
        counted = ("cuEventRecord", "cuMemcpyBatchAsync", "cuMemcpyDtoDAsync", "cuMemAlloc", "cuLaunchKernel")
        before = [fake.count(name) for name in (*counted, "cuStreamWaitEvent")]
        capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)], ahead=ahead)
        records = fake.count("cuEventRecord") - before[0]
        assert capture.wait(60)
        assert records == 1
        after = [fake.count(name) - was for name, was in zip((*counted, "cuStreamWaitEvent"), before, strict=True)]
        assert (after[0], after[2:5], after[5]) == (1, [0, 0, 0], 1)
        assert bytes(segment.view(0, plan.nbytes)) == image_of(step)


@pytest.mark.parametrize("safeguard", ["order", "guard"])
def test_without_a_safeguard_the_bytes_are_wrong(
    fake: FakeCuda, pool: Pool, monkeypatch: pytest.MonkeyPatch, safeguard: str
) -> None:
    monkeypatch.setenv("ZEROSTALL_WITHOUT", safeguard)
    device = Device(0)
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    if safeguard == "order":
        fake.hold(stream)  # a long kernel
    fill(fake, stream, tensors, 1)
    if safeguard == "guard":
        fake.settle(stream)
        fake.hold_copies()
    capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)])
    capture.protect(streams=[(device, stream)])
    fill(fake, stream, tensors, 2)
    if safeguard == "guard":
        fake.settle(stream)  # the optimizer is through before the first copy
        fake.release()
    assert capture.wait(60)
    fake.release()
    assert bytes(segment.view(0, plan.nbytes)) != image_of(1)
    device.close()


def test_memory_that_a_tensor_leaves_is_held_while_it_is_read(fake: FakeCuda, pool: Pool, device: Device) -> None:
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    fill(fake, stream, tensors, 1, first=20_000)
    capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)])
    left = [weakref.ref(tensor.storage) for tensor in tensors]
    for tensor in tensors:  # parameter.data = ...
        tensor.storage = Storage(fake, tensor.nbytes)
    gc.collect()
    assert all(storage() is not None for storage in left)
    capture.wait(60)
    assert bytes(segment.view(0, plan.nbytes)) == image_of(1)
    sources.let_go()
    assert all(storage() is None for storage in left)

    assert sources.refresh() == []  # the new places are read, and held, next time
    fill(fake, stream, tensors, 2)
    again = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)])
    again.wait(60)
    assert bytes(segment.view(0, plan.nbytes)) == image_of(2)


def test_letting_go_of_a_capture_waits_for_what_is_in_flight(fake: FakeCuda, pool: Pool, device: Device) -> None:
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    fake.delay(1000)
    capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)], ahead=2)
    del capture, sources
    gc.collect()
    tensors.clear()
    gc.collect()
    segment.close()  # neither memory is touched any more
    fake.settle(stream)


def test_a_restore_comes_after_what_is_queued(fake: FakeCuda, pool: Pool, device: Device) -> None:
    tensors, targets, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    segment.view(0, plan.nbytes)[:] = image_of(9)
    fake.delay(100)
    fill(fake, stream, tensors, 1, first=5000)
    Scatter(pool, plan, targets, segment.address, streams=[(device, stream)]).wait(60)
    assert all(tensor.bytes() == bytes([9]) * tensor.nbytes for tensor in tensors)


def test_changes_are_still_told(fake: FakeCuda) -> None:
    tensors, sources, _ = make(fake)
    assert sources.devices == [0]
    tensors[2]._version += 1
    assert sources.moved() == [2]
    tensors[4].shape = (2, 2048)
    tensors[4].strides = (2048, 1)
    assert sources.refresh() == [4]


def test_what_cannot_be_done_is_refused(fake: FakeCuda, pool: Pool, device: Device) -> None:
    tensors, sources, plan = make(fake)
    segment = room(plan, device)
    with pytest.raises(ValueError, match="tensor 0 is on CUDA device 0, for which no stream was given"):
        Capture(pool, plan, sources, segment.address, at_once=[])
    stream = fake.stream()
    fake.capturing(stream, True)
    with pytest.raises(CapabilityError, match="CUDA graph"):
        Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)])
    fake.capturing(stream, False)
    tensors[0].shape, tensors[0].strides = (50, 100), (1, 50)
    strided = Tensors(tensors, [False] * len(tensors))
    strided.refresh()
    with pytest.raises(CapabilityError, match="tensor 0 is strided"):
        Capture(pool, plan, strided, segment.address, at_once=[], streams=[(device, stream)])
    with pytest.raises(DeviceError):
        Device(99)


def test_a_copy_that_fails_fails_its_capture_alone(fake: FakeCuda, pool: Pool, device: Device) -> None:
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    fill(fake, stream, tensors, 1)
    fake.fail("cuStreamWriteValue64", 3, LAUNCH_FAILED)
    capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)])
    capture.protect(streams=[(device, stream)])
    with pytest.raises(DeviceError, match="CUDA_ERROR_719"):
        capture.wait(60)
    again = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)])
    again.wait(60)
    assert bytes(segment.view(0, plan.nbytes)) == image_of(1)


def test_fallbacks_are_said(fake: FakeCuda, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_said", {})
    caplog.set_level(logging.INFO, logger="zerostall")
    devices = Devices()
    fake.fail("cuMemAlloc", 1, OUT_OF_MEMORY)
    devices.see([0], reserve=1 << 20)
    assert "has no 1048576 bytes to spare for policy 'freeze'" in caplog.text
    segment = Segment("test", 1 << 20)
    fake.fail("cuMemHostRegister", 1, OUT_OF_MEMORY)
    assert not devices.pin(segment, stretch=1 << 20, threads=1)
    assert "could not be registered with CUDA (cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    assert devices.pin(segment, stretch=1 << 20, threads=1)
    assert "1048576 bytes of shared memory touched and registered" in caplog.text
    devices.close()


def test_a_forked_child_ends_in_peace(fake: FakeCuda, device: Device) -> None:
    child = os.fork()
    if child == 0:
        del device
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_without_a_driver_the_reason_is_told() -> None:
    code = (
        "from zerostall import native\ntry:\n native.Device(0)\nexcept RuntimeError as e:\n print(type(e).__name__, e)"
    )
    environment = {**os.environ, "ZEROSTALL_LIBCUDA": "/nowhere/libcuda.so.1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("CapabilityError NVIDIA's driver cannot be opened: /nowhere/libcuda.so.1"), done
