"""What of NVIDIA's is on this machine: the driver and its devices. Nothing is linked or imported."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_MOST_LINES = 18
_DRIVER = Path("/proc/driver/nvidia/version")


def driver() -> str:
    """The loaded driver's version; empty where none is."""
    try:
        text = _DRIVER.read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else "of unknown version"


def devices() -> tuple[list[str], str]:
    """The names of the devices this process can use, and in words why there are none or not all."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return [], f"libcuda.so.1 cannot be loaded: {error}"
    if problem := _problem(cuda, cuda.cuInit(0)):
        return [], f"the driver refuses: {problem}"
    count = ctypes.c_int()
    if problem := _problem(cuda, cuda.cuDeviceGetCount(ctypes.byref(count))):
        return [], f"the driver refuses to count its devices: {problem}"
    names: list[str] = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(256)
        if problem := _problem(cuda, cuda.cuDeviceGetName(name, len(name), index)):
            return names, f"device {index}: {problem}"
        names.append(name.value.decode(errors="replace"))
    return names, "" if names else "the driver sees no device (CUDA_VISIBLE_DEVICES?)"


def _problem(cuda: ctypes.CDLL, status: int) -> str:
    if status == 0:
        return ""
    text = ctypes.c_char_p()
    if cuda.cuGetErrorString(status, ctypes.byref(text)) == 0 and text.value:
        return f"{text.value.decode(errors='replace')} ({status})"
    return f"error {status}"


def nvlinks(uuid: str) -> int:
    """How many NVLink lines of a GPU are up; 0 also where the management library does not say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    device, active = ctypes.c_void_p(), ctypes.c_uint()
    count = 0
    if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) == 0:
        for line in range(_MOST_LINES):
            if nvml.nvmlDeviceGetNvLinkState(device, line, ctypes.byref(active)) == 0:
                count += active.value
    nvml.nvmlShutdown()
    return count
