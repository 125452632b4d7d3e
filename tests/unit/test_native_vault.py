"""Captures into another device's memory and from there to host memory, in one process on the stand-in driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from standin.cuda import LAUNCH_FAILED, OUT_OF_MEMORY, FakeCuda, StandIn
from zerostall.errors import CapacityError, DeviceError
from zerostall.native import (
    Capture,
    Device,
    Peer,
    Plan,
    Pool,
    Recall,
    Relay,
    Segment,
    Tensors,
    Unload,
    Vault,
    crc32c,
    link_between,
    visible_devices,
)

SIZES = [5000, 3, 70_000, 1, 4096, 250_000, 12]
HOST = {1, 4}
CHUNK = 64 << 10
Made = tuple[list[object], Tensors, Plan]


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool("test", 2)
    yield pool
    pool.close()


@pytest.fixture
def devices(fake: FakeCuda) -> Iterator[tuple[Device, Device]]:
    one, other = Device(0), Device(1)
    yield one, other
    one.close()
    other.close()


def make(fake: FakeCuda) -> Made:
    import numpy as np

    tensors = [np.zeros(size, np.float32) if k in HOST else StandIn(fake, size) for k, size in enumerate(SIZES)]
    sizes = [4 * size for size in SIZES]
    offsets = [100 + sum(sizes[:k]) + 4 * k for k in range(len(sizes))]
    plan = Plan(nbytes=offsets[-1] + sizes[-1], header=b"h" * 100, chunk_bytes=CHUNK, offsets=offsets, sizes=sizes)
    sources = Tensors(tensors, [k not in HOST for k in range(len(tensors))])
    assert sources.refresh() == []
    return tensors, sources, plan


def fill(fake: FakeCuda, stream: int, tensors: list[object], value: int) -> None:
    for k, tensor in enumerate(tensors):
        if k in HOST:
            tensor.view("uint8")[:] = value  # type: ignore[attr-defined]
        else:
            fake.work(stream, 2000 if k == 0 else 0, tensor, value)  # type: ignore[arg-type]


def image_of(value: int) -> bytes:
    return b"h" * 100 + b"\0\0\0\0".join(bytes([value]) * (4 * size) for size in SIZES)


@pytest.mark.parametrize("coarse", [1, 4])
def test_an_image_goes_to_the_vault_and_from_there_to_the_rest_of_it(
    fake: FakeCuda, pool: Pool, devices: tuple[Device, Device], coarse: int
) -> None:
    tensors, sources, plan = make(fake)
    if coarse > 1:
        plan = Plan(
            nbytes=plan.nbytes,
            header=b"h" * 100,
            chunk_bytes=coarse * CHUNK,
            offsets=[100 + 4 * sum(SIZES[:k]) + 4 * k for k in range(len(SIZES))],
            sizes=[4 * size for size in SIZES],
        )
    vault = Vault(devices[1], 2 << 20)
    segment = Segment("test", 2 << 20)
    segment.pin(devices[1], stretch=2 << 20, threads=1)
    stream = fake.stream()
    for step in range(1, 4):
        place = 4096 * step
        assert sources.refresh() == []
        fill(fake, stream, tensors, step)
        capture = Capture(
            pool, plan, sources, segment.address, at_once=[1, 3], streams=[(devices[0], stream)],
            peer=vault.address + place,
        )  # fmt: skip
        runs = capture.on_devices
        capture.protect(streams=[(devices[0], stream)])
        fill(fake, stream, tensors, 0xCC)
        capture.wait(60)
        with pytest.raises(ValueError, match="no checksums yet"):
            _ = capture.checksums
        job = Unload(pool, devices[1], vault, place, segment.address, plan.nbytes, chunk_bytes=CHUNK, runs=runs)
        job.wait(60)
        assert bytes(segment.view(0, plan.nbytes)) == image_of(step)
        assert job.checksums == [crc32c(image_of(step)[at : at + CHUNK]) for at in range(0, plan.nbytes, CHUNK)]


def test_a_copy_that_fails_is_told_and_the_next_works(fake: FakeCuda, pool: Pool, devices) -> None:
    vault = Vault(devices[1], 1 << 20)
    segment = Segment("test", 1 << 20)
    fake.fail("cuMemcpyDtoHAsync", 2, LAUNCH_FAILED)
    whole = [(0, 1 << 20)]
    job = Unload(pool, devices[1], vault, 0, segment.address, 1 << 20, chunk_bytes=CHUNK, runs=whole)
    with pytest.raises(DeviceError):
        job.wait(60)
    again = Unload(pool, devices[1], vault, 0, segment.address, 1 << 20, chunk_bytes=CHUNK, runs=whole)
    again.wait(60)
    assert len(again.checksums) == 16


class Drained:
    """An image in a vault and in host memory; and tensors of another process to be filled from it."""

    def __init__(self, fake: FakeCuda, pool: Pool, devices: tuple[Device, Device]) -> None:
        self.fake, self.pool, self.device = fake, pool, devices[0]
        tensors, sources, self.plan = make(fake)
        self.vault = Vault(devices[1], 2 << 20)
        self.segment = Segment("test", 2 << 20)
        self.stream = fake.stream()
        fill(fake, self.stream, tensors, 7)
        capture = Capture(
            pool, self.plan, sources, self.segment.address, at_once=[1, 3], streams=[(self.device, self.stream)],
            peer=self.vault.address + 4096,
        )  # fmt: skip
        self.runs = capture.on_devices
        capture.wait(60)
        job = Unload(
            pool, devices[1], self.vault, 4096, self.segment.address, self.plan.nbytes, chunk_bytes=CHUNK,
            runs=self.runs,
        )  # fmt: skip
        job.wait(60)
        self.checksums = job.checksums
        self.tensors, self.targets, _ = make(fake)

    def recall(self, pieces: list[int], targets: Tensors) -> Recall:
        stream = (self.device, self.stream)
        at = self.vault.address + 4096
        return Recall(self.pool, self.plan, targets, pieces, peer=at, runs=self.runs, stream=stream)


@pytest.fixture
def drained(fake: FakeCuda, pool: Pool, devices: tuple[Device, Device]) -> Drained:
    return Drained(fake, pool, devices)


def test_tensors_are_filled_from_the_vault_and_what_has_arrived_is_checked(fake: FakeCuda, drained: Drained) -> None:
    image = drained.segment.address
    job = drained.recall(list(range(len(SIZES))), drained.targets)
    assert job.taken == [k for k in range(len(SIZES)) if k not in HOST]
    assert job.wait(60)
    for k in job.taken:
        assert drained.tensors[k].bytes() == bytes([7]) * (4 * SIZES[k])  # type: ignore[attr-defined]
    assert job.bad(image, drained.checksums) == []
    wrong = [sum(4 * (size + 1) for size in SIZES[:k]) + 100 for k in (2, 5)]  # where these begin in the image
    for k in (2, 5):
        fake.write(drained.tensors[k], b"x")  # type: ignore[arg-type]
    assert job.bad(image, drained.checksums) == [at // CHUNK for at in wrong]


def test_some_of_the_tensors_are_filled_and_the_rest_of_their_chunks_is_host_memory(drained: Drained) -> None:
    pieces = [2, 6]
    targets = Tensors([drained.tensors[k] for k in pieces], [False] * 2)
    assert targets.refresh() == []
    job = drained.recall(pieces, targets)
    assert job.taken == [0, 1]
    assert job.wait(60)
    assert job.bad(drained.segment.address, drained.checksums) == []
    drained.segment.view(0, 2 << 20)[100] ^= 1  # of a chunk that piece 2 begins in
    assert job.bad(drained.segment.address, drained.checksums) == [0]
    drained.runs = drained.runs[2:]  # without piece 2
    assert drained.recall(pieces, targets).taken == [1]


def test_a_recall_that_fails_or_is_given_up_says_so_and_the_next_works(fake: FakeCuda, drained: Drained) -> None:
    everything = list(range(len(SIZES)))
    for function in ("cuMemcpyDtoDAsync", "cuMemcpyBatchAsync"):
        fake.fail(function, 1, LAUNCH_FAILED)
    with pytest.raises(DeviceError):
        drained.recall(everything, drained.targets).wait(60)
    fake.reset()
    fake.hold(drained.stream)  # what the copies come after
    job = drained.recall(everything, drained.targets)
    assert not job.wait(0.05)
    with pytest.raises(ValueError, match="not arrived"):
        job.bad(drained.segment.address, drained.checksums)
    fake.release()
    del job
    last = drained.recall(everything, drained.targets)
    assert last.wait(60) and last.bad(drained.segment.address, drained.checksums) == []


def test_one_vault_fetches_what_lies_in_another(fake: FakeCuda, pool: Pool, devices) -> None:
    nbytes = 150 << 20  # several parts
    first, second = Vault(devices[0], 2 * nbytes), Vault(devices[1], nbytes + 4096)
    runs = [(0, 100), (5000, 70 << 20), (100 << 20, 50 << 20)]
    for number, (offset, size) in enumerate(runs, start=1):
        ctypes.memset(first.address + nbytes + offset, number, size)
    fake.fail("cuMemcpyDtoDAsync", 2, LAUNCH_FAILED)
    fake.fail("cuMemcpyBatchAsync", 1, LAUNCH_FAILED)
    for attempt in range(2):
        job = Relay(pool, devices[1], second, 4096, peer=first.address + nbytes, runs=runs)
        if attempt == 0:
            with pytest.raises(DeviceError):
                job.wait(60)
        else:
            job.wait(60)
            assert job.nbytes_done == sum(size for _, size in runs)
    for number, (offset, size) in enumerate(runs, start=1):
        here = ctypes.string_at(second.address + 4096 + offset, size)
        assert here == bytes([number]) * size
    assert ctypes.string_at(second.address + 4096 + 100, 100) != b"\x01" * 100  # what is not in a run stays
    for at, wrong in ((nbytes + 4097, [(0, 1)]), (4097, [(0, nbytes)]), (0, [(50, 10), (40, 5)])):
        with pytest.raises(ValueError, match="rise and end within"):
            Relay(pool, devices[1], second, at, peer=first.address, runs=wrong)


def test_what_makes_no_sense_is_refused(fake: FakeCuda, pool: Pool, devices) -> None:
    vault = Vault(devices[1], 1 << 16)
    segment = Segment("test", 1 << 16)
    for at, nbytes, runs in ((1, 1 << 16, []), (0, 100, [(0, 101)]), (0, 100, [(50, 10), (40, 5)])):
        with pytest.raises(ValueError, match=r"lie in|rise"):
            Unload(pool, devices[1], vault, at, segment.address, nbytes, chunk_bytes=CHUNK, runs=runs)
    with pytest.raises(ValueError, match="no handle"):
        Peer(devices[0], b"short")
    with pytest.raises(DeviceError):  # it is this process's own
        Peer(devices[0], vault.handle())
    fake.fail("cuMemAlloc_v2", 1, OUT_OF_MEMORY)
    fake.fail("cuMemAlloc", 1, OUT_OF_MEMORY)
    with pytest.raises(CapacityError):
        Vault(devices[1], 1 << 20)


def test_devices_and_links(fake: FakeCuda) -> None:
    seen = visible_devices()
    assert [facts.ordinal for facts in seen] == [0, 1]
    assert len({facts.uuid for facts in seen}) == 2 and seen[0].uuid.count("-") == 5
    link = link_between(0, 1)
    assert (link.access, link.rank, link.atomics) == (True, 0, True)
