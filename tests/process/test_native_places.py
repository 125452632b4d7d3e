"""Files are read right into tensors where the disk takes their memory as it lies, and not where that would be slow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "shim" / "places.c"
KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])
LOAD = """
import ctypes, mmap, sys
import numpy as np
from zerostall import native

path, residue, huge = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "huge"
MIB = 1 << 20
nbytes, begin, chunk = 12 * MIB, 4096, 4 * MIB  # two blocks lie within the tensor, two are its edges
data = np.random.default_rng(1).integers(0, 256, begin + nbytes, dtype=np.uint8)
data.tofile(path)
memory = mmap.mmap(-1, nbytes + 6 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
whole = np.frombuffer(memory, np.uint8)
whole[:] = 7
at = -whole.ctypes.data % (2 * MIB) + 2 * MIB + residue
target = whole[at : at + nbytes]
with open("/proc/self/smaps") as smaps:
    got = sum(int(line.split()[1]) for line in smaps if line.startswith("AnonHugePages"))
if huge and got < 16 << 10:
    sys.exit(77)
pool = native.Pool("test", 3)
tensors = native.Tensors([target], [False])
tensors.refresh()
checksums = [native.crc32c(data[k : k + chunk]) for k in range(0, len(data), chunk)]
plan = native.Plan(nbytes=len(data), header=b"", chunk_bytes=chunk, offsets=[begin], sizes=[nbytes])
with open(path, "rb") as file:
    job = native.Load(pool, plan, tensors, file.fileno(), [0], checksums=checksums, direct=True,
                      staging=native.Staging(3, None))
    assert job.wait(60)
if job.fell_back is not None:
    sys.exit(77)
assert (target == data[begin:]).all()
assert (whole[:at] == 7).all() and (whole[at + nbytes :] == 7).all()
pool.close()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("places") / "libzerostall_places.so"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(made)], check=True)
    return made


@pytest.mark.skipif(KERNEL < (6, 7), reason="the kernel does not say what memory lies on")
@pytest.mark.parametrize(
    ("alignment", "residue", "pages", "loose"),
    [
        (64, 64, "huge", 2),  # as torch's memory lies, on a disk that asks for no more
        (512, 64, "huge", 0),
        (64, 64, "small", 0),  # it would be many small requests
        (64, 32, "huge", 0),
    ],
)
def test_a_block_goes_right_to_its_place_where_the_disk_takes_it(
    library: Path, tmp_path: Path, alignment: int, residue: int, pages: str, loose: int
) -> None:
    preload = ":".join([str(library), *filter(None, [os.environ.get("LD_PRELOAD")])])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "image"), str(residue), pages],
        env={**os.environ, "LD_PRELOAD": preload, "ZEROSTALL_PLACES": str(alignment)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("memory has no huge pages here, or files no direct reads")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"direct reads to loose places: {loose}"
