"""Files straight to a device's memory and back, on stand-ins of the driver and of cuFile."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from standin.cuda import FakeCuda
from standin.cufile import IO_DISABLED, NOT_SUPPORTED, PINNING_FAILED, FakeCuFile
from zerostall import native
from zerostall.errors import CapabilityError, CorruptError, StorageError
from zerostall.native import Device, DeviceFile, DeviceTransfer, Pool, RegisteredMemory

MIB = 1 << 20
PAGE = 4096
SIZES = [1, PAGE, PAGE + 1, 16 * MIB, 33 * MIB + 77]


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool("test", 3)
    yield pool
    pool.close()


@pytest.fixture
def storage(cufile: FakeCuFile, device: Device) -> Device:
    facts = native.cufile_open(device, ["libcufile.so.0"])
    assert facts.direct and facts.compat and facts.nvfs == (2, 17) and facts.version == 1140
    return device


def noise(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def read(pool: Pool, device: Device, path: Path, at: int, nbytes: int, offset: int = 0) -> None:
    with path.open("rb") as file:
        assert DeviceTransfer(pool, DeviceFile(device, file.fileno()), at, nbytes, offset=offset, write=False).wait(60)


def write(pool: Pool, device: Device, path: Path, at: int, nbytes: int) -> None:
    with path.open("w+b") as file:
        assert DeviceTransfer(pool, DeviceFile(device, file.fileno()), at, nbytes, offset=0, write=True).wait(60)
        file.truncate(nbytes)


@pytest.mark.parametrize("nbytes", SIZES)
def test_there_and_back(
    fake: FakeCuda, cufile: FakeCuFile, storage: Device, pool: Pool, tmp_path: Path, nbytes: int
) -> None:
    data, path = noise(nbytes), tmp_path / "image"
    at, back = fake.allocate(whole_pages(nbytes)), fake.allocate(whole_pages(nbytes))
    ctypes.memmove(at, data, nbytes)
    write(pool, storage, path, at, nbytes)
    assert path.read_bytes() == data
    read(pool, storage, path, back, nbytes)
    assert ctypes.string_at(back, nbytes) == data
    assert cufile.count("cuFileWrite") == cufile.count("cuFileRead") == -(-nbytes // (16 * MIB))


def test_a_part_of_a_file(fake: FakeCuda, storage: Device, pool: Pool, tmp_path: Path) -> None:
    data, path = noise(MIB + 5), tmp_path / "image"
    path.write_bytes(data)
    at = fake.allocate(MIB)
    read(pool, storage, path, at, 3 * PAGE, offset=PAGE)
    assert ctypes.string_at(at, 3 * PAGE) == data[PAGE : 4 * PAGE]
    with pytest.raises(ValueError, match="whole page"):
        read(pool, storage, path, at, PAGE, offset=7)


@pytest.mark.parametrize("most", [PAGE, 5 * PAGE + 100, 3 * MIB])
def test_transfers_that_stop_short_go_on(
    fake: FakeCuda, cufile: FakeCuFile, storage: Device, pool: Pool, tmp_path: Path, most: int
) -> None:
    nbytes = 10 * most + 11
    data, path = noise(nbytes), tmp_path / "image"
    at, back = fake.allocate(whole_pages(nbytes)), fake.allocate(whole_pages(nbytes))
    ctypes.memmove(at, data, nbytes)
    cufile.short(most)
    write(pool, storage, path, at, nbytes)
    read(pool, storage, path, back, nbytes)
    assert path.read_bytes() == ctypes.string_at(back, nbytes) == data


def test_errors_in_the_middle_are_told(
    fake: FakeCuda, cufile: FakeCuFile, storage: Device, pool: Pool, tmp_path: Path
) -> None:
    nbytes, path = 48 * MIB, tmp_path / "image"
    at = fake.allocate(nbytes)
    cufile.fail("cuFileWrite", 2, errno.ENOSPC)
    with pytest.raises(StorageError, match="cuFileWrite failed at byte") as told:
        write(pool, storage, path, at, nbytes)
    assert told.value.errno == errno.ENOSPC
    write(pool, storage, path, at, nbytes)
    cufile.fail("cuFileRead", 3, IO_DISABLED)
    with pytest.raises(StorageError, match=r"disabled by config on current file \(5034\)"):
        read(pool, storage, path, at, nbytes)
    read(pool, storage, path, at, nbytes)


def test_a_file_that_is_too_short_is_damaged(fake: FakeCuda, storage: Device, pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(noise(MIB))
    with pytest.raises(CorruptError, match="ends before"):
        read(pool, storage, path, fake.allocate(2 * MIB), MIB + 1)


def test_files_that_are_refused(cufile: FakeCuFile, storage: Device, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"x" * PAGE)
    with path.open("rb") as file:
        cufile.fail("cuFileHandleRegister", 1, NOT_SUPPORTED)
        with pytest.raises(CapabilityError, match="not supported on current file"):
            DeviceFile(storage, file.fileno())
        assert file.read() == b"x" * PAGE  # the flags of the open file are as they were
        DeviceFile(storage, file.fileno())
    with pytest.raises(CapabilityError, match=r"unsupported file type|O_DIRECT"):
        DeviceFile(storage, os.open(tmp_path, os.O_RDONLY))


def test_memory_that_is_refused_works_all_the_same(
    fake: FakeCuda, cufile: FakeCuFile, storage: Device, pool: Pool, tmp_path: Path
) -> None:
    data, path = noise(MIB), tmp_path / "image"
    path.write_bytes(data)
    at = fake.allocate(MIB)
    cufile.fail("cuFileBufRegister", 1, PINNING_FAILED)
    refused = RegisteredMemory(storage, at, MIB)
    assert "5036" in refused.problem and cufile.registered() == 0
    read(pool, storage, path, at, MIB)
    del refused
    taken = RegisteredMemory(storage, at, MIB)
    assert taken.problem == "" and cufile.registered() == 1
    del taken
    assert cufile.registered() == 0


OPENING = """
from standin.cufile import FakeCuFile
from zerostall import native
import os, sys
device = native.Device(0)
fake = FakeCuFile(os.environ["ZEROSTALL_LIBCUFILE"])
{}
"""


def opening(code: str, library: Path | None, driver: Path) -> str:
    environment = {**os.environ, "ZEROSTALL_LIBCUDA": str(driver), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["ZEROSTALL_LIBCUFILE"] = str(library or "libnothing.so.0")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_cannot_be_opened_says_why(cufile_library: Path, driver: Path) -> None:
    code = OPENING.format("""
fake.fail("cuFileDriverOpen", 1, 5001)
try:
    native.cufile_open(device, ["libcufile.so.0"])
except Exception as error:
    print(type(error).__name__, error)
fake.without_driver()
facts = native.cufile_open(device, ["libcufile.so.0"])  # the next call tries again
print(facts.direct, facts.nvfs)
""")
    told = opening(code, cufile_library, driver)
    assert "CapabilityError cuFile does not start: nvidia-fs driver is not loaded" in told
    assert "False (0, 0)" in told


def test_a_library_that_is_not_there(driver: Path) -> None:
    code = """
from zerostall import native
try:
    native.cufile_open(native.Device(0), ["libcufile.so.0"])
except Exception as error:
    print(type(error).__name__, error)
"""
    assert "CapabilityError cuFile cannot be opened: libnothing.so.0" in opening(code, None, driver)
