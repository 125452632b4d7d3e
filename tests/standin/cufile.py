"""cuFile without a device: the stand-in library of native/tests/fake."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from standin.cuda import ROOT

SOURCE = ROOT / "native" / "tests" / "fake" / "fake_cufile.cpp"
NOT_SUPPORTED, IO_DISABLED, PINNING_FAILED = 5008, 5034, 5036


def cufile_include() -> str | None:
    """The folder of cufile.h: a toolkit's, else a wheel's; None where there is none."""
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and Path(home, "include", "cufile.h").is_file():
            return str(Path(home, "include"))
    script = ROOT / "cmake" / "cuda_include.py"
    found = subprocess.run([sys.executable, script, "cufile.h"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else None


def compile_library(folder: Path, *includes: str) -> Path:
    """Compiles the stand-in into `folder`."""
    library = folder / "libfake_cufile.so"
    flags = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared"]
    for include in includes:
        flags += ["-isystem", include]
    subprocess.run(["c++", *flags, str(SOURCE), "-o", str(library)], check=True)
    return library


class FakeCuFile:
    """What tests ask of the stand-in."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def reset(self) -> None:
        self._library.fake_cufile_reset()

    def fail(self, function: str, nth: int, code: int) -> None:
        self._library.fake_cufile_fail(function.encode(), nth, code)

    def short(self, nbytes: int) -> None:
        """No read or write moves more than that."""
        self._library.fake_cufile_short(ctypes.c_size_t(nbytes))

    def without_driver(self) -> None:
        self._library.fake_cufile_without_driver()

    def count(self, function: str) -> int:
        return self._library.fake_cufile_count(function.encode())

    def registered(self) -> int:
        return self._library.fake_cufile_registered()
