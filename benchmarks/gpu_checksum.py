"""How fast a GPU finds the CRC-32C of its memory, and whether it is the CPU's.

    python -m benchmarks.gpu_checksum [--out results.json]

Three amounts: what a save samples of 8.5 GB, ten times that, and all of 8 GB; as one run and as many, aligned and not;
with spans (what a warp reads) of several lengths, 0 being what the product chooses. Times are of the device, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from zerostall import native

CHUNK = 16 << 20
AMOUNTS = {"85 MB": 5 * CHUNK, "850 MB": 50 * CHUNK, "8 GB": 480 * CHUNK}
SPANS = (0, 16 << 10, 64 << 10, 256 << 10)
REPEATS = 20


def seconds(probe: native.Probe, what: str, stream: torch.cuda.Stream) -> float:
    """Of the device, for one launch or fetch."""
    found = []
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # so that the device does not wait for this thread
        first.record(stream)
        getattr(probe, what)(stream.cuda_stream)
        last.record(stream)
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return statistics.median(found)


def runs_of(memory: torch.Tensor, nbytes: int, shape: str) -> list[tuple[int, int]]:
    base = memory.data_ptr()
    if shape == "one run":
        return [(base, nbytes)]
    if shape == "1 MB runs":
        return [(base + at, min(1 << 20, nbytes - at)) for at in range(0, nbytes, 1 << 20)]
    return [(base + at + 3, min(777_777, nbytes - at) - 3) for at in range(0, nbytes - 4, 777_777)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.zeros(1, device="cuda")  # the context is not what is timed
    start = time.perf_counter()
    device = native.Device(0)
    device.load_probes()
    print(f"{torch.cuda.get_device_name()}: kernel loaded and proved in {time.perf_counter() - start:.3f} s")
    memory = torch.randint(-(2**62), 2**62, (max(AMOUNTS.values()) // 8 + 2,), dtype=torch.int64, device="cuda")
    on_host = memory.cpu()
    stream = torch.cuda.current_stream()
    rows, wrong = [], 0
    for amount, nbytes in AMOUNTS.items():
        for shape in ("one run", "1 MB runs", "odd runs"):
            runs = runs_of(memory, nbytes, shape)
            shift = on_host.data_ptr() - memory.data_ptr()
            expected = [native.crc32c_memory(at + shift, size) for at, size in runs]
            for span_bytes in SPANS:
                probe = native.Probe(device, runs, span_bytes=span_bytes)
                launch, fetch = seconds(probe, "launch", stream), seconds(probe, "fetch", stream)
                began = time.perf_counter()
                same = probe.checksums() == expected
                row = {
                    "amount": amount, "shape": shape, "span_bytes": span_bytes, "launch_seconds": launch,
                    "bytes_per_second": nbytes / launch, "fetch_seconds": fetch,
                    "cpu_seconds": time.perf_counter() - began, "equal": same,
                }  # fmt: skip
                rows.append(row)
                wrong += not same
                print(
                    f"{amount:>7} {shape:>10} span {span_bytes >> 10:>4} KiB: {nbytes / launch / 1e9:7.0f} GB/s, "
                    f"{launch * 1e6:8.1f} us; fetch {fetch * 1e6:7.1f} us; "
                    f"then CPU {row['cpu_seconds'] * 1e3:6.2f} ms; {'equal' if same else 'WRONG'}"
                )
    copy = torch.empty(AMOUNTS["850 MB"] // 8, dtype=torch.int64, device="cuda")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    copy.copy_(memory[: copy.numel()])
    first.record()
    copy.copy_(memory[: copy.numel()])
    last.record()
    torch.cuda.synchronize()
    rate = AMOUNTS["850 MB"] / first.elapsed_time(last) * 1e3
    print(f"for comparison, a device-to-device copy of 850 MB reads at {rate / 1e9:.0f} GB/s")
    device.close()
    if arguments.out:
        document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        arguments.out.write_text(json.dumps(document, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
