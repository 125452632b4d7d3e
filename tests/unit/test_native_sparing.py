"""What an optimizer leaves in place or keeps aside is read after the guard; on the stand-in driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from standin.cuda import LAUNCH_FAILED, FakeCuda, StandIn
from unit.device_images import CHUNK, SIZES, fill, image_of, make, room
from zerostall.errors import DeviceError
from zerostall.native import Capture, Device, Pool, crc32c

SLOW = 200_000  # microseconds a copy: an image takes seconds


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool("test", 2)
    yield pool
    pool.close()


def spare_and_train(
    fake: FakeCuda, capture: Capture, device: Device, stream: int, tensors: list[StandIn], value: int
) -> int:
    """A step that leaves the last three tensors in place and keeps two before them aside; the bytes it spared."""
    left, kept = [4, 5, 6], {2: StandIn(fake, SIZES[2]), 3: StandIn(fake, SIZES[3])}
    pending = capture.pending
    assert pending == sorted(set(pending))
    protection = capture.protect(
        left=left, kept=[(k, aside.data_ptr()) for k, aside in kept.items()], streams=[(device, stream)]
    )
    for k, aside in kept.items():  # the optimizer's kernel: stores the old bytes aside, then writes new ones
        fake.work(stream, 0, aside, value)
        fake.work(stream, 0, tensors[k], 0xCC)
    for k in (0, 1):
        fake.work(stream, 0, tensors[k], 0xDD)
    capture.release(streams=[(device, stream)])
    assert capture.wait(60)
    return protection.spared_bytes


def test_what_is_spared_is_drained_after_the_guard(fake: FakeCuda, pool: Pool, device: Device) -> None:
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    fake.delay(200)
    spared = 0
    for step in range(1, 100):  # how much is pending at the guard is up to the machine
        assert sources.refresh() == []
        fill(fake, stream, tensors, step, first=30_000)
        capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)], ahead=2)
        spared += spare_and_train(fake, capture, device, stream, tensors, step) > 0
        assert bytes(segment.view(0, plan.nbytes)) == image_of(step)
        assert capture.checksums == [crc32c(image_of(step)[at : at + CHUNK]) for at in range(0, plan.nbytes, CHUNK)]
        assert capture.pending == []
        if spared == 3:
            return
    pytest.fail("nothing was ever pending")


def test_what_is_small_beside_it_holds_nobody_up(fake: FakeCuda, pool: Pool, device: Device) -> None:
    """Counts of steps, which lie between the moments that are left: they are moved aside, and change right away."""
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    for step in range(1, 60):  # how much is pending at the guard is up to the machine
        assert sources.refresh() == []
        fill(fake, stream, tensors, step)
        fake.settle(stream)
        fake.delay(SLOW)
        capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)], ahead=0)
        protection = capture.protect(left=[2, 4, 5], streams=[(device, stream)])
        for k in (0, 1, 3, 6):
            fake.work(stream, 0, tensors[k], 0xCC)
        fake.settle(stream)
        nobody_waited = not capture.done()
        fake.delay(0)
        assert capture.wait(60)
        assert bytes(segment.view(0, plan.nbytes)) == image_of(step)
        if nobody_waited and protection.spared_bytes > 4 * sum(SIZES[3:]):
            return
    pytest.fail("the device was never slow enough")


def test_training_does_not_wait_for_what_is_left(fake: FakeCuda, pool: Pool, device: Device) -> None:
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    for step in range(1, 60):  # copies in flight are waited for, so they take their time instead of being held
        assert sources.refresh() == []
        fill(fake, stream, tensors, step)
        fake.settle(stream)
        fake.delay(SLOW)
        capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)], ahead=0)
        spared = capture.protect(left=list(range(7)), streams=[(device, stream)]).spared_bytes
        fake.settle(stream)
        assert not spared or not capture.done()
        capture.release(streams=[(device, stream)])
        fake.delay(0)
        assert capture.wait(60)
        assert bytes(segment.view(0, plan.nbytes)) == image_of(step)
        if spared:
            return
    pytest.fail("the device was never slow enough")


def test_without_a_release_what_is_kept_is_not_read(fake: FakeCuda, pool: Pool, device: Device) -> None:
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    fill(fake, stream, tensors, 1)
    asides = [StandIn(fake, size) for size in SIZES]
    fake.hold_copies()
    capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)], ahead=0)
    places = [(k, aside.data_ptr()) for k, aside in enumerate(asides)]
    spared = capture.protect(kept=places, streams=[(device, stream)]).spared_bytes
    fake.release()
    assert not capture.wait(0.2)
    for aside in asides:
        fake.work(stream, 20_000, aside, 1)  # a slow kernel: the copies come after it
    fill(fake, stream, tensors, 2)
    capture.release(streams=[(device, stream)])
    assert capture.wait(60)
    assert spared > 0 and bytes(segment.view(0, plan.nbytes)) == image_of(1)


def test_a_release_that_fails_fails_the_capture(fake: FakeCuda, pool: Pool, device: Device) -> None:
    _, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    fake.hold_copies()
    asides = [StandIn(fake, size) for size in SIZES]
    capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)], ahead=0)
    places = [(k, aside.data_ptr()) for k, aside in enumerate(asides)]
    assert capture.protect(kept=places, streams=[(device, stream)]).spared_bytes > 0
    fake.release()
    fake.fail("cuEventRecord", 1, LAUNCH_FAILED)
    capture.release(streams=[(device, stream)])
    with pytest.raises(DeviceError, match="CUDA_ERROR_719"):
        capture.wait(60)


def test_what_is_pending_is_judged_by_the_snapshot_before(fake: FakeCuda, pool: Pool, device: Device) -> None:
    """Without a measurement all is taken to land in time; with one, what will not is told, and can be spared."""
    tensors, sources, plan = make(fake)
    stream = fake.stream()
    segment = room(plan, device)
    fake.delay(20_000)
    for step in range(1, 60):
        assert sources.refresh() == []
        fill(fake, stream, tensors, step)
        capture = Capture(pool, plan, sources, segment.address, at_once=[], streams=[(device, stream)], ahead=None)
        pending = capture.pending
        assert step > 1 or pending == []
        spare_and_train(fake, capture, device, stream, tensors, step)
        assert bytes(segment.view(0, plan.nbytes)) == image_of(step)
        if pending:
            return
    pytest.fail("nothing was ever pending")
