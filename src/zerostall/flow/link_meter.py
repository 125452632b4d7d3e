"""What leaves this machine by one network device, whoever sends it, as the kernel counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_NET = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")
_DATA_UNIT = 4  # InfiniBand counts in words of four bytes


@dataclass(frozen=True, slots=True)
class LinkMeter:
    """Attributes:
    counters: files with what was sent so far, each in `unit` bytes.
    nominal: bytes a second, 0.0 where the device does not say or is no real one.
    """

    name: str
    counters: tuple[Path, ...]
    unit: int = 1
    nominal: float = 0.0

    def sent(self) -> int:
        """Bytes so far; only rising. OSError, ValueError where that cannot be read."""
        return self.unit * sum(int(counter.read_text()) for counter in self.counters)


def of_device(device: str, root: Path = _NET) -> LinkMeter | None:
    """The meter of a network device; None for loopback, which is nobody's link, and for no device."""
    folder = root / device
    counter = folder / "statistics" / "tx_bytes"
    if not device or device == "lo" or not counter.is_file():
        return None
    nominal = 0.0
    if (folder / "device").exists():  # virtual ones say a speed that nobody keeps to
        try:
            nominal = max(0.0, int((folder / "speed").read_text()) * 1e6 / 8)
        except (OSError, ValueError):
            nominal = 0.0
    return LinkMeter(device, (counter,), nominal=nominal)


def of_rdma(devices: tuple[str, ...], root: Path = _INFINIBAND) -> LinkMeter | None:
    """The meter of all RDMA devices together: an image may take any, and so may training. None where none counts."""
    found = [sorted(root.glob(f"{device}/ports/*/counters/port_xmit_data")) for device in devices]
    counters = tuple(counter for ports in found for counter in ports)
    return LinkMeter(", ".join(devices), counters, _DATA_UNIT) if counters else None
