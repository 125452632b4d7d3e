"""Memory that a system takes: on the host, page-locked, and on the device."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch


class Registered:
    """Counts what goes through `cudaHostRegister`, which no statistics of torch know."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}
        if not torch.cuda.is_available():
            return
        runtime = torch.cuda.cudart()
        register = cast("Callable[..., object]", runtime.cudaHostRegister)
        unregister = cast("Callable[..., object]", runtime.cudaHostUnregister)

        def counted(address: int, nbytes: int, flags: int) -> object:
            self._sizes[address] = nbytes
            self.now += nbytes
            self.most = max(self.most, self.now)
            return register(address, nbytes, flags)

        def given_up(address: int) -> object:
            self.now -= self._sizes.pop(address, 0)
            return unregister(address)

        runtime.cudaHostRegister = counted
        runtime.cudaHostUnregister = given_up


def host_used() -> int:
    """Bytes of memory in use on this machine, files' cached pages not counted, shared memory counted."""
    found = dict(re.findall(r"^(\w+):\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
    cached = int(found["Cached"]) - int(found["Shmem"])
    return 1024 * (int(found["MemTotal"]) - int(found["MemFree"]) - int(found["Buffers"]) - max(0, cached))


def pinned_used(registered: Registered) -> int:
    """Page-locked bytes of this process: torch's, what was registered through it, and zerostall's slots."""
    if not torch.cuda.is_available():
        return 0
    own = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return int(own) + registered.most + mapped_slots()


def mapped_slots() -> int:
    """Bytes of the agent's memory that this process has mapped; on a machine with a GPU it is all registered."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line and "rw-s" in line:
            first, last = line.split(maxsplit=1)[0].split("-")
            total += int(last, 16) - int(first, 16)
    return total


def device_used() -> int:
    """Bytes in use on the device, by whomever."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
