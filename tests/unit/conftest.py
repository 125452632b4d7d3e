"""Stand-ins for NVIDIA's libraries: compiled once a session, clean for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from standin.cuda import FakeCuda, cuda_include
from standin.cufile import FakeCuFile, compile_library, cufile_include
from zerostall.native import Device


@pytest.fixture(scope="session")
def driver(stand_in_driver: Path) -> Path:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("the real driver serves this process")
    os.environ["ZEROSTALL_LIBCUDA"] = str(stand_in_driver)
    return stand_in_driver


@pytest.fixture
def fake(driver: Path) -> Iterator[FakeCuda]:
    fake = FakeCuda(driver)
    fake.reset()
    yield fake
    fake.reset()


@pytest.fixture
def device(fake: FakeCuda) -> Iterator[Device]:
    device = Device(0)
    yield device
    device.close()


@pytest.fixture(scope="session")
def cufile_library(driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    includes = cufile_include(), cuda_include()
    if None in includes:
        pytest.skip("no cufile.h")
    library = compile_library(tmp_path_factory.mktemp("fake-cufile"), *filter(None, includes))
    os.environ["ZEROSTALL_LIBCUFILE"] = str(library)
    return library


@pytest.fixture
def cufile(cufile_library: Path) -> Iterator[FakeCuFile]:
    cufile = FakeCuFile(cufile_library)
    cufile.reset()
    yield cufile
    cufile.reset()
