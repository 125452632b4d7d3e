"""Finding out which transport there can be between agents here, and opening it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.agent.nixl import SHARED, Nixl, load
from zerostall.agent.transport import PlainTcp
from zerostall.core.transports import Choice, Found, choose, ucx_settings
from zerostall.errors import CapabilityError
from zerostall.flow import link_meter
from zerostall.telemetry import log, say_once

if TYPE_CHECKING:
    from zerostall.agent.transport import Transport
    from zerostall.config import Transport as Setting
    from zerostall.flow.link_meter import LinkMeter

_INFINIBAND = Path("/sys/class/infiniband")
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")


def chosen(setting: Setting) -> Choice:
    """What `open_transport` would take here. Loads nothing. Raises CapabilityError: what is asked for is not here."""
    return choose(setting, found())


def found() -> Found:
    """What this machine has, as far as can be told without loading it."""
    installed = any(importlib.util.find_spec(name) is not None for name in _PACKAGES)
    return Found("" if installed else "NIXL is not installed (pip install 'zerostall[nixl]')", _rdma_devices())


def open_transport(setting: Setting, node: str, peer: str) -> Transport:
    """The way that images take here, said in the log.

    Args:
        node: this node's name.
        peer: the address at which its agent listens.

    Raises:
        CapabilityError: what is asked for cannot be had.
    """
    here = found()
    choice = choose(setting, here)
    if not choice.nixl:
        log.info("images go to other nodes by plain TCP: %s", choice.reason)
        return PlainTcp()
    for name, value in ucx_settings(here, _device_of(peer), shared=choice.shared).items():
        os.environ.setdefault(name, value)
    try:
        opened = Nixl(load(_PACKAGES), node, shared=choice.shared)
    except CapabilityError as error:
        if setting != "auto":
            raise
        say_once("nixl", "images go to other nodes by plain TCP: there is RDMA, but %s", error.args[0])
        return PlainTcp()
    log.info("images go to other nodes through NIXL: %s", choice.reason)
    if not here.rdma and not choice.shared:
        log.warning("UCX listens over TCP and asks nobody for the token: only for networks whose nodes are all yours")
    return opened


def meter_of(transport: Transport, peer: str) -> LinkMeter | None:
    """What counts the bytes of the link that images take, and training most likely, too; None where nothing does."""
    if transport.name == SHARED:
        return None
    rdma = _rdma_devices() if transport.name == Nixl.name else ()
    return link_meter.of_rdma(rdma) if rdma else link_meter.of_device(_device_of(peer))


def _rdma_devices() -> tuple[str, ...]:
    """Those with a port that is active."""
    devices: list[str] = []
    for state in sorted(_INFINIBAND.glob("*/ports/*/state")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                devices.append(state.parts[-4])
    return tuple(dict.fromkeys(devices))


def _device_of(peer: str) -> str:
    """The network device with that address; empty where none has it alone."""
    host = peer.rpartition(":")[0] if peer.rpartition(":")[2].isdecimal() else peer
    try:
        wanted = socket.gethostbyname(host.strip("[]"))
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                asked = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, asked)[20:24]) == wanted:
                    return name
    return ""
