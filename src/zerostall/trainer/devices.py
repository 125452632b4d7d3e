"""The CUDA devices that hold state: opened when first seen, told at each call which streams training uses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from zerostall import native
from zerostall.core.layout import CHUNK
from zerostall.errors import CapacityError, DeviceError
from zerostall.telemetry import log, say_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zerostall.trainer.state.tensors import Holder


def _public_current_stream(ordinal: int) -> int:
    return torch.cuda.current_stream(ordinal).cuda_stream


# What code that torch has compiled asks: a number, where the public function makes an object of Python's first.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_current_stream)


class Devices:
    """Empty until `see` is told of a tensor on a device; then every call costs about a microsecond a device."""

    def __init__(self) -> None:
        self._open: dict[int, native.Device] = {}
        self._asked_to_reserve: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._open)

    def see(self, ordinals: Iterable[int], *, reserve: int = 0) -> None:
        """Open those that are new; have `reserve` bytes of each for chunks that a guard moves aside.

        Raises:
            CapabilityError: there is no driver.
            DeviceError: the driver refuses.
        """
        for ordinal in ordinals:
            if ordinal not in self._open:
                self._open[ordinal] = native.Device(ordinal)
            if reserve and ordinal not in self._asked_to_reserve:
                self._asked_to_reserve.add(ordinal)
                self._reserve(ordinal, reserve)

    def load_probes(self) -> bool:
        """Have each device ready to look at sources itself; whether one is. Said once where one cannot."""
        able = False
        for ordinal, device in self._open.items():
            try:
                device.load_probes()
            except (CapacityError, DeviceError) as error:
                say_once(
                    f"no-probes {ordinal}",
                    "cuda:%d cannot look at what is saved (%s): what arrives is not compared with it",
                    ordinal,
                    error,
                )
            else:
                able = True
        return able

    def now(self) -> list[tuple[native.Device, int]]:
        """Each device with the stream that is current in this thread."""
        return [(device, _current_stream(ordinal)) for ordinal, device in self._open.items()]

    def get(self, ordinal: int) -> native.Device | None:
        """That one, or None where it is not open."""
        return self._open.get(ordinal)

    def settle(self) -> None:
        """Wait until what is queued on the streams of now is done."""
        for ordinal in self._open:
            torch.cuda.current_stream(ordinal).synchronize()

    def only(self) -> native.Device | None:
        """The device that holds all of the state that is on one, or None where there are several."""
        return next(iter(self._open.values())) if len(self._open) == 1 else None

    def pin(
        self, segment: native.Segment, *, stretch: int, threads: int, offset: int = 0, nbytes: int | None = None
    ) -> bool:
        """Touch memory of a segment and register it; False, said once, where it stays pageable: copies are slower."""
        start = time.perf_counter()
        device = next(iter(self._open.values()))
        try:
            segment.pin(device, stretch=stretch, threads=threads, offset=offset, nbytes=nbytes)
        except (DeviceError, CapacityError) as error:
            say_once(
                "pageable",
                "shared memory could not be registered with CUDA (%s): copies are several times slower, and a guard "
                "may hold training up while they are made",
                error,
            )
            return False
        size, seconds = nbytes if nbytes is not None else segment.nbytes, time.perf_counter() - start
        log.info("%d bytes of shared memory touched and registered with CUDA in %.3f s", size, seconds)
        return True

    def close(self) -> None:
        """End their threads. What is being captured fails."""
        for device in self._open.values():
            device.close()
        self._open = {}

    def _reserve(self, ordinal: int, nbytes: int) -> None:
        try:
            self._open[ordinal].reserve(nbytes, CHUNK)
        except CapacityError as error:
            say_once(
                "no-freeze",
                "cuda:%d has no %d bytes to spare for policy 'freeze' (%s): its guard waits as with 'overlap'",
                ordinal,
                nbytes,
                error,
            )
        else:
            log.info("%d bytes of cuda:%d are kept for chunks that the guard moves aside", nbytes, ordinal)


class Straightened:
    """Contiguous stand-ins for the strided tensors that lie on devices, which copy engines move whole.

    Attributes:
        tensors: the given ones, with stand-ins in the place of strided ones on a device.
        indexes: where those are.
    """

    def __init__(self, tensors: Sequence[Holder]) -> None:
        self.tensors = list(tensors)
        self.indexes: list[int] = []
        self._strided: list[torch.Tensor] = []
        self._straight: list[torch.Tensor] = []
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and not tensor.is_contiguous():
                straight = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self.indexes.append(index)
                self._strided.append(tensor)
                self._straight.append(straight)
                self.tensors[index] = straight
        self._watch = native.Tensors(self._strided, [False] * len(self._strided)) if self._strided else None

    @property
    def nbytes(self) -> int:
        """Memory of the devices that the stand-ins take."""
        return sum(straight.nbytes for straight in self._straight)

    def fits(self) -> bool:
        """Return whether the strided tensors have the shapes, strides and devices that they had."""
        return self._watch is None or not self._watch.refresh()

    @torch.no_grad()
    def fill(self) -> None:
        """Strided to straight, as work of the current stream."""
        for straight, strided in zip(self._straight, self._strided, strict=True):
            straight.copy_(strided)

    @torch.no_grad()
    def pour(self) -> None:
        """Straight to strided, as work of the current stream."""
        for straight, strided in zip(self._straight, self._strided, strict=True):
            strided.copy_(straight)
