"""When files go straight to a GPU's memory: decided from what was found, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerostall.config import Gds

_WHEELS = ("nvidia/cu13/lib", "nvidia/cufile/lib", "nvidia/cu12/lib")
_LIBRARY = "libcufile.so.0"


def libraries(path: Iterable[str]) -> list[str]:
    """Where cuFile may be: the loader's places, the toolkit's, those of NVIDIA's wheels below each entry of `path`."""
    toolkit = f"/usr/local/cuda/lib64/{_LIBRARY}"
    return [_LIBRARY, toolkit, *(str(PurePath(entry, wheel, _LIBRARY)) for entry in path if entry for wheel in _WHEELS)]


@dataclass(frozen=True, slots=True)
class Found:
    """What cuFile says of this machine.

    Attributes:
        problem: why it cannot be opened; empty where it is open.
        nvfs: version of nvidia-fs, (0, 0) where it is not loaded.
        p2p: it reaches NVMe by the kernel's own peer-to-peer DMA.
    """

    problem: str = ""
    nvfs: tuple[int, int] = (0, 0)
    p2p: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether to ask cuFile for files; `fallback`: somebody wanted it and does not get it."""

    use: bool
    reason: str
    fallback: bool = False


def choose(setting: Gds, found: Found) -> Choice:
    """Decide for a machine. Each file is asked for besides: cuFile may refuse the file system it is on."""
    if setting == "off":
        return Choice(False, "switched off")
    if found.problem:
        return Choice(False, found.problem, fallback=setting == "on")
    if found.nvfs != (0, 0):
        return Choice(True, f"nvidia-fs {found.nvfs[0]}.{found.nvfs[1]}")
    if found.p2p:
        return Choice(True, "peer-to-peer DMA of the kernel")
    # cuFile's compatibility mode copies through host memory as we do, but unchecked and with fewer requests at once.
    reason = "nvidia-fs is not loaded: cuFile would copy through host memory"
    return Choice(setting == "on", reason, fallback=setting == "on")


def advice(refusal: str) -> str:
    """What may help against a refusal; empty where nothing is known.

    cuFile asks udev's database what is on a disk. Where it cannot, as in containers, it refuses every file with 5027.
    """
    return "give the container the host's /run/udev: cuFile asks there for the disk" if "(5027)" in refusal else ""
