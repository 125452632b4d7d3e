"""The disk by threads in pread and pwrite, and by io_uring with registered buffers: the same blocks, checked."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.report import Report, median
from benchmarks.workload import scratch

BLOCK = 4 << 20
SOURCES = ["benchmarks/uring.cpp", *(f"native/{name}.cpp" for name in ("crc32c", "crc32c_x86", "crc32c_arm"))]
# Threads and requests in flight for each of them.
WAYS = {
    "pool of 2": ("pool", 2, 1),
    "pool of 8": ("pool", 8, 1),
    "a ring of 8": ("ring", 1, 8),
    "2 rings of 4": ("ring", 2, 4),
}


def build(folder: Path) -> Path:
    program = folder / "uring"
    flags = ["-std=c++20", "-O3", "-pthread"]
    subprocess.run(["c++", *flags, *(str(ROOT / source) for source in SOURCES), "-o", str(program)], check=True)
    return program


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--megabytes", type=int, default=1024)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    options.add_argument("--out", type=Path, help="folder for the report (default: benchmarks/results)")
    arguments = options.parse_args()
    nbytes = arguments.megabytes << 20
    walls: dict[str, list[float]] = {}
    cpus: dict[str, list[float]] = {}
    registered = "0"
    with scratch(arguments.folder) as folder, tempfile.TemporaryDirectory() as built:
        program = build(Path(built))
        for _ in range(arguments.rounds):
            for what in ("write", "read"):
                for name, (way, threads, depth) in WAYS.items():
                    words = [way, what, str(folder / "file"), nbytes, BLOCK, threads, depth]
                    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=True)
                    wall, cpu, fixed = done.stdout.split()
                    registered = max(registered, fixed)
                    walls.setdefault(f"{what}, {name}", []).append(float(wall))
                    cpus.setdefault(f"{what}, {name}", []).append(float(cpu))
    page = Report(
        "uring",
        f"{arguments.megabytes} MiB to and from disk in blocks of 4 MiB with a CRC-32C of each: threads and io_uring",
        Path(arguments.folder or "/tmp"),
        columns=("", "GB/s, median", "GB/s, best", "processor seconds a GB"),
    )
    for name, taken in walls.items():
        best, middle = nbytes / min(taken) / 1e9, nbytes / median(taken) / 1e9
        page.rows.append((name, f"{middle:.2f}", f"{best:.2f}", f"{median(cpus[name]) / nbytes * 1e9:.2f}"))
    page.notes = [
        f"{arguments.rounds} rounds taking turns; O_DIRECT; writes end with fsync; setting the rings up counts",
        f"buffers and file registered with the rings: {'yes' if registered == '1' else 'the file alone'}",
    ]
    page.samples = {f"{name} s": taken for name, taken in walls.items()}
    page.samples |= {f"{name}, processor s": taken for name, taken in cpus.items()}
    path = page.write(arguments.out) if arguments.out else page.write()
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
