"""Files to tensors in one pass: any sizes and places, part of them, damage, faults, devices, cuFile."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from standin.cuda import FakeCuda, StandIn
from standin.cufile import IO_DISABLED, PINNING_FAILED, FakeCuFile
from unit.native_images import checksums_of
from zerostall import native
from zerostall.errors import CapabilityError, CorruptError, DeviceError, StorageError
from zerostall.native import Device, DeviceFile, Load, Plan, Pool, Staging, Tensors

MIB = 1 << 20
CHUNK = 8 * MIB
COUNTS = [1, 3, 70_001, 0, 5 * MIB // 4, 12, 3 * MIB, 1]  # of float32: pieces in blocks, over blocks, over chunks


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool("test", 3)
    yield pool
    pool.close()


def plan_of(counts: list[int], gap: int = 4) -> Plan:
    offsets, at = [], 100
    for count in counts:
        offsets.append(at)
        at += 4 * count + gap
    return Plan(nbytes=at, header=b"", chunk_bytes=CHUNK, offsets=offsets, sizes=[4 * count for count in counts])


@pytest.fixture
def plan() -> Plan:
    return plan_of(COUNTS)


@pytest.fixture
def file(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "image"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, plan.nbytes, dtype=np.uint8).tobytes())
    return path


def piece(data: bytes, index: int) -> bytes:
    begin = 100 + sum(4 * count + 4 for count in COUNTS[:index])
    return data[begin : begin + 4 * COUNTS[index]]


def load(
    pool: Pool, plan: Plan, path: Path, targets: list, pieces: list[int], *, device: Device | None = None,
    straight: bool = False, checksums: list[int] | None = None, direct: bool = True,
    only: list[int] | None = None, held: int = 0,
) -> Load:  # fmt: skip
    tensors = Tensors(targets, [False] * len(targets))
    tensors.refresh()
    with path.open("rb") as file:
        job = Load(
            pool, plan, tensors, file.fileno(), pieces, checksums=checksums, direct=direct,
            staging=Staging(pool.threads, device), device=device,
            straight=DeviceFile(device, file.fileno()) if straight and device is not None else None, only=only,
            held=held,
        )  # fmt: skip
        assert job.wait(60)
        return job


CHOICES = [list(range(len(COUNTS))), [], [0], [2, 5], [4], [1, 6, 7], [3]]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("pieces", CHOICES)
def test_to_the_host(pool: Pool, plan: Plan, file: Path, pieces: list[int], direct: bool, checked: bool) -> None:
    data = file.read_bytes()
    targets = [np.full(COUNTS[k], -1, np.float32) for k in pieces]
    sums = checksums_of(data, CHUNK) if checked else None
    load(pool, plan, file, targets, pieces, checksums=sums, direct=direct)
    for k, target in zip(pieces, targets, strict=True):
        assert target.tobytes() == piece(data, k), k


def test_no_more_is_read_than_is_wanted(pool: Pool, plan: Plan, file: Path) -> None:
    target = np.zeros(COUNTS[2], np.float32)
    assert load(pool, plan, file, [target], [2]).nbytes_done <= 4 * COUNTS[2] + 2 * 4096
    checked = load(pool, plan, file, [target], [2], checksums=checksums_of(file.read_bytes(), CHUNK))
    assert checked.nbytes_done == CHUNK


@pytest.mark.parametrize("direct", [True, False])
def test_a_target_that_lies_as_in_the_file(pool: Pool, plan: Plan, file: Path, direct: bool) -> None:
    """Its blocks are read right into it: nothing beside it is touched, and damage is found all the same."""
    data = bytearray(file.read_bytes())
    offset, size = 100 + sum(4 * count + 4 for count in COUNTS[:6]), 4 * COUNTS[6]
    room = np.full(size + 2 * 4096 + 4096, 7, np.uint8)
    begin = 4096 + (offset - room.ctypes.data - 4096) % 4096
    target = room[begin : begin + size]
    assert (target.ctypes.data - offset) % 4096 == 0
    for sums in (None, checksums_of(bytes(data), CHUNK)):
        target[:] = 1
        load(pool, plan, file, [target.view(np.float32)], [6], checksums=sums, direct=direct)
        assert target.tobytes() == data[offset : offset + size]
        assert (room[:begin] == 7).all() and (room[begin + size :] == 7).all()
    data[offset + size // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"chunk \d of \d fails its checksum"):
        load(pool, plan, file, [target.view(np.float32)], [6], checksums=sums, direct=direct)


@pytest.mark.parametrize("into", [0, MIB, 3 * MIB, 4 * MIB, 7 * MIB + 5])
def test_damage_and_short_files_on_the_way_to_the_host(pool: Pool, plan: Plan, file: Path, into: int) -> None:
    """Wherever in a block, of which a part is read and passed on at a time."""
    data = bytearray(file.read_bytes())
    sums = checksums_of(bytes(data), CHUNK)
    at = 100 + sum(4 * count + 4 for count in COUNTS[:6]) + into
    target = np.zeros(COUNTS[6] + 1, np.float32)[1:]
    load(pool, plan, file, [target], [6], checksums=sums)
    assert target.tobytes() == piece(bytes(data), 6)
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=rf"chunk {at // CHUNK} of 3 fails its checksum"):
        load(pool, plan, file, [target], [6], checksums=sums)
    os.truncate(file, at)
    for known in (sums, None):
        with pytest.raises(CorruptError, match=r"the file ends before|fails its checksum"):
            load(pool, plan, file, [target], [6], checksums=known)


def test_strided_targets_on_the_host(pool: Pool, file: Path) -> None:
    plan = Plan(nbytes=file.stat().st_size, header=b"", chunk_bytes=CHUNK, offsets=[100], sizes=[4 * MIB])
    target = np.zeros((MIB // 64, 128), np.float32)
    load(pool, plan, file, [target[:, 32:96]], [0])
    assert target[:, 32:96].tobytes() == file.read_bytes()[100 : 100 + 4 * MIB]
    assert not target[:, :32].any() and not target[:, 96:].any()


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("chunks", [[], [0], [1], [0, 1, 2]])
def test_some_chunks_come_from_memory_and_the_others_from_the_file(
    pool: Pool, plan: Plan, file: Path, chunks: list[int], checked: bool
) -> None:
    data = file.read_bytes()
    memory, left = np.zeros(len(data), np.uint8), bytearray(len(data))
    for chunk in range(plan.chunks):
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        if chunk in chunks:
            memory[part] = np.frombuffer(data, np.uint8)[part]
        else:
            left[part] = data[part]
    file.write_bytes(left)
    pieces = list(range(len(COUNTS)))
    targets = [np.full(COUNTS[k], -1, np.float32) for k in pieces]
    sums = checksums_of(data, CHUNK) if checked else None
    others = [chunk for chunk in range(plan.chunks) if chunk not in chunks]
    load(pool, plan, file, targets, pieces, checksums=sums, only=others)
    load(pool, plan, file, targets, pieces, checksums=sums, only=chunks, held=memory.ctypes.data)
    for k, target in zip(pieces, targets, strict=True):
        assert target.tobytes() == piece(data, k), k


def test_what_lies_in_memory_is_checked_all_the_same(pool: Pool, plan: Plan, file: Path) -> None:
    data = file.read_bytes()
    memory = np.frombuffer(bytearray(data), np.uint8)
    memory[CHUNK + 5] ^= 1
    target, at = np.zeros(COUNTS[6], np.float32), memory.ctypes.data
    with pytest.raises(CorruptError, match="chunk 1 of"):
        load(pool, plan, file, [target], [6], checksums=checksums_of(data, CHUNK), only=[1], held=at)
    for chunks in ([1, 0], [plan.chunks]):
        with pytest.raises(ValueError, match="chunks must rise and be in the plan"):
            load(pool, plan, file, [target], [6], only=chunks)


@pytest.mark.parametrize("straight", [False, True])
def test_from_memory_to_a_device(
    fake: FakeCuda, cufile: FakeCuFile, device: Device, pool: Pool, plan: Plan, file: Path, straight: bool
) -> None:
    native.cufile_open(device, [])
    data = file.read_bytes()
    memory = np.frombuffer(bytearray(data), np.uint8)
    file.write_bytes(bytes(CHUNK) + data[CHUNK:])
    pieces = [0, 1, 2, 4, 5, 6, 7]
    targets = [StandIn(fake, COUNTS[k]) for k in pieces]
    sums = checksums_of(data, CHUNK)
    others = list(range(1, plan.chunks))
    load(pool, plan, file, targets, pieces, device=device, straight=straight, checksums=sums, only=others)
    load(pool, plan, file, targets, pieces, device=device, checksums=sums, only=[0], held=memory.ctypes.data)
    for k, target in zip(pieces, targets, strict=True):
        assert target.bytes() == piece(data, k), k


@pytest.mark.parametrize("straight", [False, True])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("pieces", [[0, 1, 2, 4, 5, 6, 7], *CHOICES[1:-1]])
def test_to_a_device(
    fake: FakeCuda, cufile: FakeCuFile, device: Device, pool: Pool, plan: Plan, file: Path, pieces: list[int],
    checked: bool, straight: bool,
) -> None:  # fmt: skip
    native.cufile_open(device, [])
    data = file.read_bytes()
    targets = [StandIn(fake, COUNTS[k]) for k in pieces]
    sums = checksums_of(data, CHUNK) if checked else None
    fake.delay(50)
    job = load(pool, plan, file, targets, pieces, device=device, straight=straight, checksums=sums)
    for k, target in zip(pieces, targets, strict=True):
        assert target.bytes() == piece(data, k), k
    assert job.bounced == "" and (cufile.count("cuFileRead") > 0) == (straight and any(COUNTS[k] for k in pieces))
    del job
    assert cufile.registered() == 0


def test_host_and_device_at_once(fake: FakeCuda, device: Device, pool: Pool, plan: Plan, file: Path) -> None:
    data = file.read_bytes()
    targets = [
        StandIn(fake, count) if k % 2 and count else np.zeros(count, np.float32) for k, count in enumerate(COUNTS)
    ]
    load(pool, plan, file, targets, list(range(len(COUNTS))), device=device, checksums=checksums_of(data, CHUNK))
    for k, target in enumerate(targets):
        assert (target.bytes() if isinstance(target, StandIn) else target.tobytes()) == piece(data, k)


@pytest.mark.parametrize("straight", [False, True])
def test_damage_and_short_files(
    fake: FakeCuda, cufile: FakeCuFile, device: Device, pool: Pool, plan: Plan, file: Path, straight: bool
) -> None:
    native.cufile_open(device, [])
    data = file.read_bytes()
    sums = checksums_of(data, CHUNK)
    targets, pieces = [StandIn(fake, COUNTS[6]), StandIn(fake, COUNTS[7])], [6, 7]

    def again(checksums: list[int] | None) -> Load:
        return load(pool, plan, file, targets, pieces, device=device, straight=straight, checksums=checksums)

    again(sums)
    file.write_bytes(data[:-1000] + b"damage" + data[-994:])
    with pytest.raises(CorruptError, match=r"chunk 2 of 3 fails its checksum"):
        again(sums)
    again(None)
    file.write_bytes(data[: -2 * MIB])
    for known in (sums, None):
        with pytest.raises(CorruptError, match="the file ends before"):
            again(known)


@pytest.mark.parametrize("straight", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 4095, 4096, 5000, MIB, 4 * COUNTS[6] - 1])
def test_wherever_a_file_ends_early_is_said_so(
    fake: FakeCuda, cufile: FakeCuFile, device: Device, plan: Plan, file: Path, cut: int, straight: bool
) -> None:
    native.cufile_open(device, [])
    os.truncate(file, 100 + sum(4 * count + 4 for count in COUNTS[:6]) + cut)
    alone = Pool("test", 1)  # the first block that is short is the one that speaks
    with pytest.raises(CorruptError, match="the file ends before"):
        load(alone, plan, file, [StandIn(fake, COUNTS[6])], [6], device=device, straight=straight)
    alone.close()


def test_faults_of_the_device_and_of_cufile(
    fake: FakeCuda, cufile: FakeCuFile, device: Device, pool: Pool, plan: Plan, file: Path
) -> None:
    native.cufile_open(device, [])
    targets, pieces = [StandIn(fake, COUNTS[6])], [6]
    sums = checksums_of(file.read_bytes(), CHUNK)

    def again(straight: bool = True) -> Load:
        return load(pool, plan, file, targets, pieces, device=device, straight=straight, checksums=sums)

    fake.fail("cuMemcpyHtoDAsync", 2, 700)
    with pytest.raises(DeviceError, match="cuMemcpyHtoDAsync"):
        again(straight=False)
    fake.fail("cuMemcpyDtoHAsync", 2, 700)
    with pytest.raises(DeviceError, match="cuMemcpyDtoHAsync"):
        again()
    cufile.fail("cuFileRead", 2, errno.EIO)
    with pytest.raises(StorageError, match="cuFileRead failed"):
        again()
    cufile.fail("cuFileRead", 1, IO_DISABLED)
    with pytest.raises(StorageError, match="5034"):
        again()
    cufile.fail("cuFileBufRegister", 1, PINNING_FAILED)
    assert "5036" in again().bounced
    assert targets[0].bytes() == piece(file.read_bytes(), 6)
    cufile.short(100)
    with pytest.raises(StorageError, match="cuFile stopped at byte"):
        again()
    for most in (1 << 20, (64 << 10) + 5):
        cufile.short(most)
        again()
        assert targets[0].bytes() == piece(file.read_bytes(), 6)


def test_orders_that_make_no_sense(fake: FakeCuda, device: Device, pool: Pool, plan: Plan, file: Path) -> None:
    with pytest.raises(ValueError, match="rise"):
        load(pool, plan, file, [np.zeros(1, np.float32)] * 2, [7, 0])
    with pytest.raises(ValueError, match="has 8 bytes, piece 0 has 4"):
        load(pool, plan, file, [np.zeros(2, np.float32)], [0])
    with pytest.raises(ValueError, match="on another device"):
        load(pool, plan, file, [StandIn(fake, 1)], [0])
    with pytest.raises(ValueError, match="checksums"):
        load(pool, plan, file, [np.zeros(1, np.float32)], [0], checksums=[1])
    strided = StandIn(fake, 12)
    strided.shape, strided.strides = (3, 1), (4, 1)
    with pytest.raises(CapabilityError, match="strided"):
        load(pool, plan, file, [strided], [1], device=device)
