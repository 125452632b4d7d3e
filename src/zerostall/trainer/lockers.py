"""Memory of another GPU that captures go to first: which GPU's, whether it is there, and its address here."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core import vaults
from zerostall.errors import ZerostallError
from zerostall.native.topology import topology
from zerostall.telemetry import log, say_once
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from zerostall.trainer.devices import Devices
    from zerostall.trainer.link import Link

_TELL_SECONDS = 1.0
_AS_WITHOUT = "state is captured to host memory, as without it"


@dataclass(frozen=True, slots=True)
class Place:
    """Room for one image. The memory must stay open while somebody captures into it."""

    memory: native.Peer
    address: int


class Lockers:
    """The locker of one checkpointer. `see`, `open` and `close` on the training thread, the rest on any.

    Nothing waits for a locker: until it is there, and when it is gone, captures go to host memory.

    Args:
        peer: what the user wants of it; None: nothing.

    Attributes:
        wanted: by the user, and nothing has been found that is against it.
    """

    def __init__(self, peer: vaults.Peer | None) -> None:
        self.wanted = peer is not None
        self._copies = peer.copies if peer is not None else 1
        self._lock = threading.Lock()
        self._rent: m.Rent | None = None
        self._locker: m.Locker | None = None
        self._opened: tuple[int, native.Peer] | None = None
        self._device: native.Device | None = None
        self._link: Link | None = None

    def see(self, link: Link, devices: Devices, nbytes: int, *, finite: bool) -> None:
        """Images of so many bytes are going to be captured from these devices: rent a locker that fits."""
        if not self.wanted or (self._rent is not None and self._rent.nbytes == nbytes):
            return
        self._link, self._device = link, devices.only()
        why = ""
        if not devices:
            why = "no state is on a GPU"
        elif self._device is None:
            why = "the state of this process is on several GPUs"
        elif finite:
            why = "require_finite looks at what is captured in host memory"
        gpu = second = None
        if self._device is not None and not why:
            try:
                first, second = choose(self._device.ordinal)
                gpu, why = first.gpu, first.reason
            except ZerostallError as error:
                why = str(error.args[0])
        if gpu is None:
            self.wanted = False
            say_once("peer", "peer=True, but %s: %s", why, _AS_WITHOUT)
            return
        log.info("captures go to the memory of %s first, %s", gpu, why)
        mirror = self._mirror(second) if second is not None and self._copies > 1 else ""
        with self._lock:
            self._rent = m.Rent(gpu=gpu, nbytes=nbytes, mirror=mirror)
        link.tell(self._rent, timeout=_TELL_SECONDS)

    @staticmethod
    def _mirror(choice: vaults.Choice) -> str:
        if choice.gpu is None:
            say_once("peer mirror", "Peer(copies=2), but %s: one copy is kept", choice.reason)
            return ""
        log.info("each image is mirrored in the memory of %s, %s", choice.gpu, choice.reason)
        return choice.gpu

    def open(self, key: int, place: int) -> Place | None:
        """The address of a place that was granted; None where its locker is gone, or cannot be reached."""
        with self._lock:
            locker = self._locker
        if locker is None or locker.key != key or self._device is None:
            return None
        if self._opened is None or self._opened[0] != key:
            self._opened = None
            try:
                self._opened = key, native.Peer(self._device, locker.handle)
            except ZerostallError as error:
                self._cannot(locker, str(error.args[0]))
                return None
        memory = self._opened[1]
        return Place(memory, memory.address + place * locker.stride)

    def _cannot(self, locker: m.Locker, reason: str) -> None:
        with self._lock:
            self._locker = self._rent = None
        self.wanted = False
        say_once("peer", "peer=True, but memory of %s cannot be opened: %s: %s", locker.gpu, reason, _AS_WITHOUT)
        if self._link is not None:
            self._link.tell(m.NoUse(locker=locker.key, reason=reason), timeout=_TELL_SECONDS)

    def heard(self, event: m.Locker | m.NoLocker) -> None:
        """The agent says what there is. On the link's thread."""
        with self._lock:
            if isinstance(event, m.Locker):
                self._locker = event
                log.info("%d images may lie in the memory of %s", event.places, event.gpu)
                return
            if self._locker is None or event.key in (0, self._locker.key):
                self._locker = None
        say_once("no locker", "no memory of another GPU (%s): %s", event.reason, _AS_WITHOUT)

    def again(self) -> list[m.Message]:
        """What another agent must be told. On the link's thread."""
        with self._lock:
            self._locker = None
            return [self._rent] if self._rent is not None else []

    def close(self) -> None:
        """Nothing is captured there any more."""
        with self._lock:
            self._locker = self._rent = None
        self.wanted = False
        self._opened = None


def choose(ordinal: int) -> tuple[vaults.Choice, vaults.Choice]:
    """In whose memory this process's images of that device are kept, and in whose their mirror.

    Raises:
        CapabilityError, DeviceError: the driver does not say.
    """
    gpus, links = topology()
    uuid = next(uuid for uuid, facts in gpus.items() if facts.ordinal == ordinal)
    first = vaults.place(list(gpus), links)
    return first[uuid], vaults.mirror(list(gpus), links, first)[uuid]
