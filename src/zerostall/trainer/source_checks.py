"""Whether what arrived is what a CUDA device held at `save`: a sample of chunks, looked at by the device itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.core import sampling
from zerostall.telemetry import log, say_once

if TYPE_CHECKING:
    from zerostall import native
    from zerostall.core.layout import Layout
    from zerostall.telemetry import Stats
    from zerostall.trainer.devices import Devices


class SourceChecks:
    """The sample goes round: after `1 / share` saves every chunk has been in it.

    State in host memory needs no such look: threads read it, which see what was written before they were told to, and
    what changes later is told by version counters.
    """

    def __init__(self, share: float, stats: Stats) -> None:
        self._every = sampling.every(share)
        self._stats = stats
        self._turn = 0
        self._able = False

    def see(self, devices: Devices) -> None:
        """Have the devices ready, as soon as there are any. Training thread."""
        if self._every == 0:
            return
        self._able = devices.load_probes()
        if not devices:
            log.info("no state is on a CUDA device: there are no sources to compare with what arrives")

    def next(self) -> tuple[int, int]:
        """What the capture that begins now is to look at. Training thread."""
        if not self._able:
            return (0, 0)
        turn = self._turn
        self._turn += 1
        return (turn, self._every)

    def offenders(self, capture: native.Capture, layout: Layout) -> list[str]:
        """Names of tensors of which other bytes arrived than their device held. Only once the capture is done."""
        found = capture.compare_sources()
        self._stats.chunks_compared += found.chunks
        for why in found.unchecked:
            say_once("unlooked", "sources were not compared with what arrived, on some device and save: %s", why)
        return [layout.entries[index].name for index in found.pieces]
