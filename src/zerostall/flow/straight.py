"""Files straight to and from a CUDA device's memory, where cuFile and the file system let us; see `core.gds`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from zerostall import config, native
from zerostall.core import gds
from zerostall.errors import CapabilityError, DeviceError, StorageError
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.core.gds import Choice


def choice(device: native.Device) -> Choice:
    """Whether files go straight to that device, and why; a fallback is said. The first call opens cuFile."""
    chosen = look(device)
    if chosen.fallback:
        outcome = "used all the same" if chosen.use else "files reach the device through host memory"
        say_once("gds", "ZEROSTALL_GDS=on, but %s: %s", chosen.reason, outcome)
    return chosen


def look(device: native.Device) -> Choice:
    """As `choice`, and says nothing: whoever wanted it is to be told elsewhere."""
    setting = config.gds()
    return gds.choose(setting, gds.Found() if setting == "off" else _found(device))


def device_file(device: native.Device, fd: int, path: Path) -> native.DeviceFile | None:
    """The open file for cuFile to move; None, said once for its folder, where cuFile refuses it or is not used."""
    if not choice(device).use:
        return None
    try:
        return native.DeviceFile(device, fd)
    except (CapabilityError, DeviceError, StorageError) as error:
        say_once(f"gds:{path.parent}", "%s: not straight to the device: %s", path.parent, error)
        return None


def refusal(device: native.Device, path: Path) -> str:
    """In words, why cuFile does not take a file there; empty where it does."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        native.DeviceFile(device, fd)
    except (CapabilityError, DeviceError, StorageError) as error:
        return str(error)
    finally:
        os.close(fd)
    return ""


def _found(device: native.Device) -> gds.Found:
    try:
        facts = native.cufile_open(device, gds.libraries(sys.path))
    except CapabilityError as error:
        return gds.Found(problem=str(error.args[0]))
    return gds.Found(nvfs=facts.nvfs, p2p=facts.p2p)
