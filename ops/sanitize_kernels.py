"""NVIDIA's compute-sanitizer over every kernel of ours, with small sizes; on a machine with a GPU and a CUDA toolkit.

    python ops/sanitize_kernels.py          # memcheck, racecheck and synccheck, one beside the other; under two minutes

Every tensor is an allocation of its own (no caching), so that one byte beyond its end is an error. Ends with 1 when a
tool reports anything, when a result is wrong, or when a tool is missing.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck")
LIMIT = 240.0  # seconds


def checksums() -> None:
    """The kernel for CRC-32C: every edge, many and few rows."""
    import torch

    from zerostall import native

    device = native.Device(0)
    generator = random.Random(1)
    stream = torch.cuda.current_stream().cuda_stream
    for nbytes in (1, 3, 4, 127, 128, 129, 4095, 4096, 4097, 8191, 12_289, 1_000_003):
        memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
        on_host = memory.cpu()
        begins = [generator.randrange(nbytes) for _ in range(6)]
        runs = [(0, nbytes), *((begin, nbytes - begin) for begin in begins)]
        probe = native.Probe(device, [(memory.data_ptr() + begin, size) for begin, size in runs])
        probe.launch(stream)
        probe.fetch(stream)
        assert probe.checksums() == [native.crc32c_memory(on_host.data_ptr() + begin, size) for begin, size in runs]
    device.close()


class AllPending:
    """A snapshot of which nothing has been read, so that the optimizer flips whatever it can."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def pending(self) -> dict[tuple[int, int], int]:
        return {(tensor.data_ptr(), tensor.nbytes): place for place, tensor in enumerate(self.tensors)}

    def claim(self, left: object, kept: object) -> AllPending:
        return self

    def release(self) -> None:
        pass

    def over(self) -> bool:
        return True


def optimizers() -> None:
    """The kernels of optimizers: sizes that do and do not fill a block, types, options, with and without flips."""
    import torch
    from torch import nn

    from zerostall import optim

    kinds: list[tuple[type[optim.AdamW | optim.SGD | optim.Lion], torch.dtype, dict[str, Any]]] = [
        (optim.AdamW, torch.float32, {}),
        (optim.AdamW, torch.float32, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
        (optim.AdamW, torch.bfloat16, {"capturable": True}),
        (optim.AdamW, torch.float64, {}),
        (optim.SGD, torch.float32, {"momentum": 0.9, "weight_decay": 0.1}),
        (optim.SGD, torch.bfloat16, {"momentum": 0.9, "nesterov": True}),
        (optim.Lion, torch.float32, {"weight_decay": 0.1}),
        (optim.Lion, torch.bfloat16, {"maximize": True}),
    ]
    for kind, dtype, options in kinds:
        shapes = [(4096,), (4097,), (3,), (), (70, 77)]
        parameters = [nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes]
        optimizer = kind(parameters, **options)
        for flips in (False, True):
            if flips:
                moments = [value for state in optimizer.state.values() for value in state.values() if value.is_cuda]
                assert optimizer.flip_for(AllPending([*parameters, *moments]), 1 << 30) is None
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        torch.cuda.synchronize()
        assert all(bool(parameter.isfinite().all()) for parameter in parameters)


def sanitizer() -> str:
    for folder in (None, f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin", "/usr/local/cuda/compute-sanitizer"):
        if found := shutil.which("compute-sanitizer", path=folder):
            return found
    sys.exit("compute-sanitizer is nowhere: it comes with NVIDIA's CUDA toolkit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--here", action="store_true", help="run the kernels in this process, under no tool")
    arguments = parser.parse_args()
    if arguments.here:
        checksums()
        optimizers()
        print("every result is right")
        return 0
    command = sanitizer()
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    start = time.monotonic()
    running = {
        tool: subprocess.Popen(
            [command, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--here"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for tool in arguments.tools
    }  # fmt: skip
    failed = []
    for tool, process in running.items():
        try:
            told, _ = process.communicate(timeout=max(1.0, LIMIT - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            told, _ = process.communicate()
        clean = process.returncode == 0 and "every result is right" in told
        print(f"== {tool}: {'clean' if clean else 'FAILED'} ({time.monotonic() - start:.0f} s)")
        print("\n".join(told.splitlines()[-4 if clean else -60 :]), flush=True)
        if not clean:
            failed.append(tool)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
