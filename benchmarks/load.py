"""Loading a file of weights, beside everybody's loaders and a bare reader: the same bytes, from the disk each time.

All read the same safetensors file (an image of zerostall's, which is one); torch.load and DCP read the same tensors in
their own formats. Before each try the files are dropped from the page cache. A loader is done when every byte is in its
tensors: of lazy ones all pages are touched, a device is waited for. The bare reader reads twice: into memory that is
there, and into new memory, which is what a loader to the CPU must make.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import zerostall
from benchmarks import bare
from benchmarks.report import Report, median
from benchmarks.workload import scratch
from zerostall import config

TENSOR = 32 << 20
SMALL = 24  # small tensors to each large one, as in a model


def state_of(nbytes: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    state: dict[str, torch.Tensor] = {}
    for k in range(nbytes // TENSOR):
        noise = torch.randint(-(2**31), 2**31 - 1, (TENSOR // 4,), dtype=torch.int32, generator=made)
        state[f"layers.{k}.weight"] = noise.view(torch.bfloat16).view(-1, 4096)
        state |= {f"layers.{k}.small.{n}": torch.randn(1024, generator=made).bfloat16() for n in range(SMALL)}
    return state


def drop(paths: list[Path]) -> None:
    """Out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Loaders:
    """Each makes tensors on the device and returns them, or raises ImportError."""

    def __init__(self, run: Path, device: str, state: dict[str, torch.Tensor]) -> None:
        self.run, self.device = run, device
        self.image = next(run.glob("step-*/*.safetensors"))
        self.pickle, self.dcp = run.parent / "state.pt", run.parent / "dcp"
        torch.save(state, self.pickle)
        dcp.save(state, checkpoint_id=str(self.dcp), no_dist=True)
        self._shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}

    def files(self) -> list[Path]:
        return [self.image, self.pickle, *(path for path in self.dcp.iterdir() if path.is_file())]

    def zerostall_step(self) -> object:
        return zerostall.load(self.run, device=self.device)

    def zerostall_file(self) -> object:
        return zerostall.load(self.image, device=self.device)

    def safetensors(self) -> object:
        return load_file(self.image, device=self.device)

    def torch_load_mmap(self) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(self.pickle, mmap=True, map_location=self.device, weights_only=True)

    def dcp_load(self) -> object:
        made = {
            name: torch.empty(shape, dtype=dtype, device=self.device) for name, (shape, dtype) in self._shapes.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(made, checkpoint_id=str(self.dcp), no_dist=True)
        return made

    def fastsafetensors(self) -> object:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        loader = SafeTensorsFileLoader(SingleGroup(), self.device, nogds=True)
        loader.add_filenames({0: [str(self.image)]})
        buffers = loader.copy_files_to_device()
        return [buffers.get_tensor(name) for name in buffers.key_to_rank_lidx], buffers, loader

    def runai(self) -> object:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(self.image))
            return {name: tensor.to(self.device, copy=True) for name, tensor in streamer.get_tensors()}


NAMES = {
    "zerostall_step": "zerostall.load(run): checksums checked",
    "zerostall_file": "zerostall.load(file.safetensors)",
    "safetensors": "safetensors.torch.load_file",
    "torch_load_mmap": "torch.load(mmap=True)",
    "dcp_load": "torch.distributed.checkpoint.load",
    "fastsafetensors": "fastsafetensors (without GDS)",
    "runai": "Run:ai model streamer",
}


LAZY = ("safetensors", "torch_load_mmap")


def settle(name: str, device: str, found: object) -> None:
    """Every byte is there."""
    if device != "cpu":
        torch.cuda.synchronize()
        return
    if name not in LAZY:
        return
    for tensor in found.values() if isinstance(found, dict) else ():
        if isinstance(tensor, torch.Tensor):
            tensor.view(-1).view(torch.uint8)[::4096].sum()  # lazy ones read now


def to_device_rate(device: str, nbytes: int) -> list[float]:
    """Seconds to copy that much from registered memory to the device."""
    host = torch.empty(min(nbytes, 1 << 30), dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    taken: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) * nbytes / host.numel())
    return taken


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--megabytes", type=int, default=1024, help="size of the file in MiB")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--device", default="cpu")
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    options.add_argument("--only", nargs="*", choices=NAMES, help="these loaders alone")
    options.add_argument("--out", type=Path, help="folder for the report (default: benchmarks/results)")
    arguments = options.parse_args()
    nbytes = arguments.megabytes << 20
    threads = config.read_threads()
    samples: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    with scratch(arguments.folder) as folder:
        state = state_of(nbytes)
        with zerostall.Checkpointer(folder / "run", weights=state) as ckpt:
            ckpt.save(1).wait("disk", timeout=600)
        loaders = Loaders(folder / "run", arguments.device, state)
        del state
        size = loaders.image.stat().st_size
        buffer = bare.buffer(size // 4096 * 4096)
        names = arguments.only or list(NAMES)
        floors: dict[str, Callable[[], object]] = {
            "bare": lambda: bare.read(loaders.image, buffer, threads),
            "bare, new memory": lambda: bare.read(loaders.image, bare.new_memory(len(buffer)), threads),
        }
        for turn in range(arguments.rounds + 1):
            order = [*floors, *names]  # another first each round: whoever follows a given one may gain or lose by it
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                if name in absent:
                    continue
                drop(loaders.files())
                call: Callable[[], object] = floors[name] if name in floors else getattr(loaders, name)
                start = time.perf_counter()
                try:
                    found = call()
                except Exception as error:  # noqa: BLE001 - a rival that cannot run is told
                    absent[name] = f"{type(error).__name__}: {error}"[:160]
                    continue
                if name not in floors:
                    settle(name, arguments.device, found)
                if turn:  # the first round warms up
                    samples.setdefault(name, []).append(time.perf_counter() - start)
                del found
        copied = to_device_rate(arguments.device, size) if arguments.device != "cpu" else []
        shutil.rmtree(folder / "run", ignore_errors=True)
    floor = median(samples["bare"])
    if copied:
        samples["host to device"] = copied
        floor = max(floor, median(copied))
    page = Report(
        "load",
        f"Loading {size >> 20} MiB of weights from disk to {arguments.device}",
        Path(arguments.folder or "/tmp"),
        columns=("", "seconds", "GB/s", "share of the floor"),
    )
    page.rows.append(
        (
            f"bare O_DIRECT reader, {threads} threads, to memory that is there",
            *_cells(median(samples["bare"]), size, floor),
        )
    )
    page.rows.append(
        ("the same, to new memory", *_cells(median(samples["bare, new memory"]), size, floor)),
    )
    if copied:
        page.rows.append(("registered host memory to the device", *_cells(median(copied), size, floor)))
    for name, label in NAMES.items():
        if name in samples:
            page.rows.append((label, *_cells(median(samples[name]), size, floor)))
        elif name in absent:
            page.rows.append((label, "–", "–", absent[name]))
    page.notes = [
        f"{arguments.rounds} rounds, another loader first in each, medians, after one that warms up",
        "files dropped from the page cache each time",
        "the floor: the slower of the bare reader to memory that is there and, to a device, the copy from registered "
        "host memory",
        "new memory is cleared page by page as it is touched: no loader to the CPU can do without",
        "zerostall and fastsafetensors read past the page cache; the others through it",
    ]
    page.goals = _goals({name: times for name, times in samples.items() if name != "host to device"}, floor, copied)
    page.samples = {f"{name} s": times for name, times in samples.items()}
    path = page.write(arguments.out) if arguments.out else page.write()
    with contextlib.suppress(OSError):
        print(path.with_suffix(".md").read_text())


def _goals(samples: dict[str, list[float]], floor: float, copied: list[float]) -> dict[str, str]:
    """What was wanted of a step's load, and what was reached; shares of the same round but for a device."""
    ours = samples.get("zerostall_step")
    if ours is None:
        return {}
    if copied:
        return {"into the GPU at ≥ 90 % of the smaller of disk and PCIe": f"{100 * floor / median(ours):.0f} %"}
    share = median([bare / own for bare, own in zip(samples["bare, new memory"], ours, strict=True)])
    goals = {"≥ 95 % of a bare O_DIRECT reader to new memory": f"{100 * share:.0f} %"}
    others = {name: median(times) for name, times in samples.items() if name in NAMES and "zerostall" not in name}
    if others:
        best = min(others, key=others.__getitem__)
        goals["as fast as the fastest of the others"] = f"{100 * others[best] / median(ours):.0f} % of {NAMES[best]}"
    return goals


def _cells(seconds: float, size: int, floor: float) -> tuple[str, str, str]:
    return f"{seconds:.3f}", f"{size / seconds / 1e9:.2f}", f"{100 * floor / seconds:.0f} %"


if __name__ == "__main__":
    main()
