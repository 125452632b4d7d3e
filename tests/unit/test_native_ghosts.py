"""What arrived beside what a device held at save, on the stand-in driver, which interprets the kernel's own text."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator

import pytest

from standin.cuda import LAUNCH_FAILED, OUT_OF_MEMORY, FakeCuda, StandIn
from zerostall import telemetry
from zerostall.core import sampling
from zerostall.native import Capture, Device, Plan, Pool, Probe, Segment, Tensors, crc32c, crc32c_memory
from zerostall.telemetry import Stats
from zerostall.trainer.devices import Devices
from zerostall.trainer.source_checks import SourceChecks

SIZES = [5000, 3, 70_000, 1, 4096, 50_000, 12]  # of float32
CHUNK = 64 << 10
CHUNKS = 8


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool("test", 2)
    yield pool
    pool.close()


class Training:
    """A stream, what it writes, and room for the image."""

    def __init__(self, fake: FakeCuda, pool: Pool, device: Device) -> None:
        self.fake, self.pool, self.device = fake, pool, device
        self.stream = fake.stream()
        self.tensors = [StandIn(fake, size) for size in SIZES]
        sizes = [tensor.nbytes for tensor in self.tensors]
        offsets = [100 + sum(sizes[:k]) + 3 * k for k in range(len(sizes))]
        self.plan = Plan(
            nbytes=offsets[-1] + sizes[-1], header=b"h" * 100, chunk_bytes=CHUNK, offsets=offsets, sizes=sizes
        )
        self.sources = Tensors(self.tensors, [True] * len(self.tensors))
        self.segment = Segment("test", self.plan.nbytes)
        self.segment.pin(device, stretch=2 << 20, threads=2)

    def write(self, value: int, microseconds: int = 0) -> None:
        for k, tensor in enumerate(self.tensors):
            self.fake.work(self.stream, microseconds if k == 0 else 0, tensor, value)

    def save(self, turn: int = 0, every: int = 1, at_once: tuple[int, ...] = ()) -> Capture:
        assert self.sources.refresh() == []
        return Capture(
            self.pool, self.plan, self.sources, self.segment.address, at_once=at_once, ahead=2,
            streams=[(self.device, self.stream)], sampling=(turn, every),
        )  # fmt: skip

    def arrived(self, value: int) -> bool:
        expected = b"h" * 100 + b"\0\0\0".join(bytes([value]) * (4 * size) for size in SIZES)
        return bytes(self.segment.view(0, self.plan.nbytes)) == expected


@pytest.fixture
def training(fake: FakeCuda, pool: Pool, device: Device) -> Training:
    device.load_probes()
    return Training(fake, pool, device)


def test_a_device_finds_the_checksums_of_the_cpu(fake: FakeCuda, device: Device) -> None:
    tensor = StandIn(fake, 30_000)
    stream = fake.stream()
    generator = random.Random(1)
    data = generator.randbytes(tensor.nbytes)
    fake.write(tensor, data)
    runs = [(generator.randrange(100_000), generator.randrange(20_000)) for _ in range(20)]
    probe = Probe(device, [(tensor.data_ptr() + at, nbytes) for at, nbytes in runs])
    probe.launch(stream)
    probe.fetch(stream)
    assert probe.checksums() == [crc32c(data[at : at + nbytes]) for at, nbytes in runs]
    assert probe.checksums()[0] == crc32c_memory(tensor.data_ptr() + runs[0][0], runs[0][1])


@pytest.mark.parametrize("freeze", [0, 1 << 24])
def test_whatever_training_does_next_all_is_as_it_was(fake: FakeCuda, training: Training, freeze: int) -> None:
    if freeze:
        training.device.reserve(2 << 20, CHUNK)
    fake.delay(100)
    for step in range(1, 5):
        training.write(step, 5000)  # still queued at save
        capture = training.save(at_once=(1, 3))
        capture.protect(freeze_bytes=freeze, streams=[(training.device, training.stream)])
        training.write(0xCC)
        assert capture.wait(60)
        found = capture.compare_sources()
        assert (found.chunks, found.pieces, found.unchecked) == (CHUNKS, [], [])
        assert found.nbytes == 4 * sum(SIZES)
        assert training.arrived(step)


def test_what_flips_is_as_it_was(fake: FakeCuda, training: Training) -> None:
    fake.delay(200)
    for step in range(1, 4):
        training.write(step, 5000)
        capture = training.save()
        aside = StandIn(fake, SIZES[2])
        capture.protect(left=[4, 5, 6], kept=[(2, aside.data_ptr())], streams=[(training.device, training.stream)])
        fake.work(training.stream, 0, aside, step)
        for k in (0, 1, 2, 3):
            fake.work(training.stream, 0, training.tensors[k], 0xCC)
        capture.release(streams=[(training.device, training.stream)])
        assert capture.wait(60)
        assert capture.compare_sources().pieces == []
        assert training.arrived(step)


def test_memory_left_right_after_save_is_as_it_was(fake: FakeCuda, training: Training) -> None:
    training.write(1, 20_000)
    capture = training.save()
    training.tensors.clear()  # what nobody holds is poisoned and freed
    gc.collect()
    assert capture.wait(60)
    assert capture.compare_sources().pieces == []
    assert training.arrived(1)


@pytest.fixture
def unordered(fake: FakeCuda, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """Copies that do not wait for training's work."""
    monkeypatch.setenv("ZEROSTALL_WITHOUT", "order")
    device = Device(0)
    device.load_probes()
    yield Training(fake, pool, device)
    device.close()


def stale(training: Training, turn: int, every: int) -> list[int]:
    """Pieces that are told different where all of them are."""
    training.write(1)
    training.fake.settle(training.stream)
    training.fake.hold(training.stream)  # long kernels
    training.write(2)
    capture = training.save(turn, every)
    assert capture.wait(60)
    assert training.arrived(1)
    training.fake.release()
    return capture.compare_sources().pieces


def test_without_the_order_all_is_stale_and_told(unordered: Training) -> None:
    assert stale(unordered, 0, 1) == list(range(len(SIZES)))


def test_the_sample_goes_round(unordered: Training) -> None:
    told = [stale(unordered, turn, 4) for turn in range(5)]
    assert all(told)
    assert set().union(*told[:4]) == set(range(len(SIZES)))
    assert told[4] == told[0]
    few = [stale(unordered, turn, 100) for turn in range(CHUNKS)]  # more than there are chunks: one each time
    assert all(few)
    assert set().union(*few) == set(range(len(SIZES)))


@pytest.mark.parametrize(
    ("function", "code"),
    [("cuLaunchKernel", LAUNCH_FAILED), ("cuMemHostAlloc", OUT_OF_MEMORY), ("cuMemAlloc", OUT_OF_MEMORY)],
)
def test_a_look_that_fails_is_told_and_spoils_nothing(
    fake: FakeCuda, training: Training, function: str, code: int
) -> None:
    tensor = training.tensors[2]
    others = [Probe(training.device, [(tensor.data_ptr(), tensor.nbytes)]) for _ in range(2)]  # have what was lent
    training.write(1, 5000)
    fake.fail(function, 1, code)
    capture = training.save()
    assert capture.wait(60)
    found = capture.compare_sources()
    assert found.chunks == 0 and len(found.unchecked) == 1
    assert training.arrived(1)
    del others
    again = training.save()
    assert again.wait(60)
    assert again.compare_sources().chunks == CHUNKS


def test_captures_end_at_any_time(fake: FakeCuda, training: Training) -> None:
    fake.delay(300)
    for _ in range(10):
        training.write(1, 500)
        capture = training.save()
        capture.cancel()
        assert capture.wait(60)


def test_what_cannot_look_says_so_once(
    fake: FakeCuda, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_said", {})
    caplog.set_level(logging.INFO, logger="zerostall")
    devices, checks = Devices(), SourceChecks(0.01, Stats())
    checks.see(devices)
    assert "no state is on a CUDA device" in caplog.text
    assert checks.next() == (0, 0)
    devices.see([0])
    fake.fail("cuModuleLoadData", 1, 218)
    checks.see(devices)
    assert "cuda:0 cannot look at what is saved (cuModuleLoadData: CUDA_ERROR_218)" in caplog.text
    assert checks.next() == (0, 0)
    checks.see(devices)
    assert [checks.next(), checks.next()] == [(0, 100), (1, 100)]
    devices.close()


def test_shares() -> None:
    assert [sampling.every(share) for share in (0, 1, 0.5, 0.3, 0.01, 0.07, 1e-9)] == [0, 1, 2, 3, 100, 14, 10**9]
