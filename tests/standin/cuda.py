"""CUDA without a device: the stand-in driver of native/tests/fake, and tensors in its memory.

driver = compile_driver(folder)          # the `fake_cuda` fixture does this
fake = FakeCuda(driver)
tensor = StandIn(fake, [1.0, 2.0])       # what zerostall.native asks of a torch tensor, on "cuda:0"
fake.work(stream, 2000, tensor, 7)       # a kernel: 2 ms, then every byte is 7
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "native" / "tests" / "fake"
SOURCES = [FAKE / f"{subject}.cpp" for subject in "copies devices fake_cuda kernels memory ptx streams".split()]
OUT_OF_MEMORY, LAUNCH_FAILED = 2, 719


def cuda_include() -> str | None:
    """The folder of cuda.h: a toolkit's, else a wheel's; None where there is none."""
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and Path(home, "include", "cuda.h").is_file():
            return str(Path(home, "include"))
    found = subprocess.run([sys.executable, ROOT / "cmake" / "cuda_include.py"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else None


def compile_driver(folder: Path, include: str) -> Path:
    """Compiles the stand-in driver into `folder`."""
    library = folder / "libfake_cuda.so"
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", "-isystem", include]
    whole = folder / "fake_cuda.cpp"  # what they include is read once
    whole.write_text("".join(f'#include "{source}"\n' for source in SOURCES))
    subprocess.run(["c++", *flags, str(whole), "-o", str(library)], check=True)
    return library


class FakeCuda:
    """The driver's functions for tests; the context is current in this thread from now on."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.fake_cuda_work.argtypes = [
            ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int,
        ]  # fmt: skip
        self._library.fake_cuda_hold.argtypes = [ctypes.c_void_p]
        self._library.fake_cuda_capturing.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._library.fake_cuda_allocated.restype = ctypes.c_uint64
        self._library.cuMemFree_v2.argtypes = [ctypes.c_uint64]
        self._library.cuCtxPushCurrent_v2(ctypes.c_void_p(1))

    def stream(self) -> int:
        made = ctypes.c_void_p()
        assert self._library.cuStreamCreateWithPriority(ctypes.byref(made), 1, 0) == 0
        assert made.value is not None
        return made.value

    def allocate(self, nbytes: int) -> int:
        at = ctypes.c_uint64()
        assert self._library.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(nbytes)) == 0
        return at.value

    def free(self, at: int) -> None:
        """By whatever thread: tensors that refer to each other are freed where Python collects them."""
        self._library.cuCtxPushCurrent_v2(ctypes.c_void_p(1))
        try:
            assert self._library.cuMemFree_v2(at) == 0
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def work(self, stream: int, microseconds: int, tensor: StandIn, value: int) -> None:
        self._library.fake_cuda_work(stream or None, microseconds, tensor.data_ptr(), tensor.nbytes, value)

    def write(self, tensor: StandIn, data: bytes) -> None:
        """At once."""
        ctypes.memmove(tensor.data_ptr(), data, len(data))

    def hold(self, stream: int) -> None:
        """What is queued there from now on waits for `release`."""
        self._library.fake_cuda_hold(stream or None)

    def hold_copies(self) -> None:
        """Every copy, of whatever stream, waits for `release`."""
        self._library.fake_cuda_hold_copies()

    def release(self) -> None:
        self._library.fake_cuda_release()

    def settle(self, stream: int) -> None:
        assert self._library.cuStreamSynchronize(ctypes.c_void_p(stream)) == 0

    def reset(self) -> None:
        self._library.fake_cuda_reset()

    def delay(self, microseconds: int) -> None:
        self._library.fake_cuda_delay(microseconds)

    def fail(self, function: str, nth: int, code: int) -> None:
        self._library.fake_cuda_fail(function.encode(), nth, code)

    def capturing(self, stream: int, yes: bool) -> None:
        self._library.fake_cuda_capturing(stream, yes)

    def count(self, function: str) -> int:
        return self._library.fake_cuda_count(function.encode())

    def calls(self) -> int:
        """Of the driver by this thread, since it began."""
        return self._library.fake_cuda_calls()

    def allocated(self) -> int:
        return self._library.fake_cuda_allocated()


class Storage:
    """Memory of the device, poisoned and freed with its last reference, as a caching allocator would lend it anew."""

    def __init__(self, fake: FakeCuda, nbytes: int) -> None:
        self._fake = fake
        self.at = fake.allocate(nbytes)
        self.nbytes = nbytes

    def data_ptr(self) -> int:
        return self.at

    def __del__(self) -> None:
        ctypes.memset(self.at, 0xDD, self.nbytes)
        self._fake.free(self.at)


@dataclass(frozen=True)
class Place:
    type: str = "cuda"
    index: int | None = 0


class StandIn:
    """Has the methods of a torch.Tensor of float32 that are asked for, and memory on the stand-in device."""

    dtype = "float32"
    is_cuda = True

    def __init__(self, fake: FakeCuda, count: int, *, index: int = 0) -> None:
        self._fake = fake
        self.device = Place("cuda", index)
        self.storage = Storage(fake, 4 * count)
        self.shape: tuple[int, ...] = (count,)
        self.strides: tuple[int, ...] = (1,)
        self._version = 0

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    def data_ptr(self) -> int:
        return self.storage.at

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return 4

    def numel(self) -> int:
        return self.shape[0]

    def is_contiguous(self) -> bool:
        return True

    def get_device(self) -> int:
        return self.device.index

    def is_conj(self) -> bool:
        return False

    def is_neg(self) -> bool:
        return False

    def untyped_storage(self) -> Storage:
        return self.storage

    def bytes(self) -> bytes:
        return ctypes.string_at(self.storage.at, self.nbytes)
