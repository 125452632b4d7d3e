"""In a vault: files that are written straight from its memory, past the host's.

The device checks each chunk against the record before the chunk goes, so that what is written is what was checked.
What of it only host memory has (headers, small tensors, gaps) is brought to the vault's memory first.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.errors import CorruptError, ZerostallError
from zerostall.flow import straight
from zerostall.flow.worker import Worker
from zerostall.telemetry import log
from zerostall.wire import lockers as w
from zerostall.wire.channel import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_THREADS = 4
"""As many blocks are under way at once."""
_PATIENCE_SECONDS = 10.0
"""A disk that answers to nothing must not keep the vault from everything else for longer."""


@dataclass(frozen=True, slots=True)
class Locker:
    """Places of `stride` bytes in the memory of this GPU."""

    memory: native.Vault
    stride: int


class Shelf:
    """Has a thread of its own: drains must not wait for a disk.

    Args:
        lockers, segments: the vault's.
        send: tells the agent; any thread.

    Attributes:
        filling: held while host memory is read from; the vault lets none go meanwhile.
    """

    def __init__(
        self,
        device: native.Device,
        lockers: Mapping[int, Locker],
        segments: Mapping[int, native.Segment],
        send: Callable[[w.FromVault], None],
    ) -> None:
        self.filling = threading.Lock()
        self._device = device
        self._lockers = lockers
        self._segments = segments
        self._send = send
        self._worker = Worker("shelf", bound=1 << 16)
        self._pool: native.Pool | None = None
        self._files: dict[int, native.DeviceFile | str] = {}
        self._registered: dict[int, native.RegisteredMemory] = {}

    def show(self, key: int, fd: int) -> None:
        """A file to write."""
        own = os.dup(fd)
        self._worker.submit(lambda: self._open(key, own))

    def hide(self, key: int) -> None:
        self._worker.submit(lambda: self._close(key))

    def write(self, order: w.Write) -> None:
        """Answered when it is written, or cannot be."""
        self._worker.submit(lambda: self._answer(order))

    def forget(self, key: int) -> None:
        """That locker's memory goes: return when nothing is written from it any more."""
        gone = threading.Event()

        def let_go() -> None:
            self._registered.pop(key, None)
            gone.set()

        self._worker.submit(let_go)
        gone.wait(_PATIENCE_SECONDS)

    # --------------------------------------------------------------------------------------- on the thread of its own

    def _open(self, key: int, fd: int) -> None:
        try:
            if straight.look(self._device).use:
                self._files[key] = native.DeviceFile(self._device, fd)
        except (ZerostallError, ValueError) as error:
            self._files[key] = str(error.args[0])
        finally:
            os.close(fd)

    def _close(self, key: int) -> None:
        self._files.pop(key, None)

    def _answer(self, order: w.Write) -> None:
        try:
            answer = self._written(order)
        except (ZerostallError, ValueError) as error:
            answer = w.Stuck(id=order.id, reason=str(error.args[0]))
        with contextlib.suppress(ClosedError):
            self._send(answer)

    def _written(self, order: w.Write) -> w.Written | w.NotStraight | w.Stuck:
        chosen = straight.look(self._device)
        if not chosen.use:
            return w.NotStraight(id=order.id, reason=chosen.reason, fallback=chosen.fallback)
        file, locker = self._files.get(order.file, "the vault does not have the file"), self._lockers.get(order.locker)
        if isinstance(file, str) or locker is None:
            return w.Stuck(id=order.id, reason=file if isinstance(file, str) else "the vault does not have it")
        self._check(order, locker)
        self._move(order, locker, file)
        return w.Written(id=order.id)

    def _check(self, order: w.Write, locker: Locker) -> None:
        """Have these chunks whole in the device's memory, and see that they are what the record says."""
        extents = [
            ((order.first + number) * order.chunk_bytes, order.chunk_bytes) for number in range(len(order.checksums))
        ]
        with self.filling:
            segment = self._segments.get(order.memory)
            if segment is None:
                raise CorruptError("the vault does not have the rest of it")
            found = native.complete(
                self._device,
                locker.memory,
                order.place * locker.stride,
                segment.address + order.offset,
                missing=order.missing,
                looked=extents,
            )
        for chunk, (is_there, recorded) in enumerate(zip(found, order.checksums, strict=True), start=order.first):
            if is_there != recorded:
                raise CorruptError(f"chunk {chunk} fails its checksum in the GPU's memory")

    def _move(self, order: w.Write, locker: Locker, file: native.DeviceFile) -> None:
        memory, begin = locker.memory, order.first * order.chunk_bytes
        taken = self._registered.get(order.locker)
        if taken is None:
            taken = self._registered[order.locker] = native.RegisteredMemory(
                self._device, memory.address, memory.nbytes
            )
            if taken.problem:
                log.info("vault: cuFile writes through memory of its own: %s", taken.problem)
        if self._pool is None:
            self._pool = native.Pool("shelf", _THREADS)
        nbytes = len(order.checksums) * order.chunk_bytes
        at = memory.address + order.place * locker.stride + begin
        registered = None if taken.problem else taken
        transfer = native.DeviceTransfer(self._pool, file, at, nbytes, offset=begin, write=True, memory=registered)
        transfer.wait(None)
