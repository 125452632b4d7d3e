"""One rank's tensors as an image in memory of this process, made by the same engine that captures training states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall import config, native
from zerostall.core import layout as layouts
from zerostall.core.copiers import choose
from zerostall.tiers.host import stride_of
from zerostall.trainer.captures import plan_of
from zerostall.trainer.devices import Devices, Straightened

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from zerostall.core.layout import Layout, Shard


class RankImage:
    """An image of `tensors`, each the box that its shard says. Memory: all of it. To be closed.

    Attributes:
        layout: of the image.
        checksums: CRC-32C of each chunk.
        address: where the image lies.
    """

    def __init__(self, shards: list[Shard], tensors: Mapping[str, torch.Tensor], pool: native.Pool) -> None:
        self.layout: Layout = layouts.build(shards)
        self._segment = native.Segment("zerostall-dcp", stride_of(self.layout), populate=False)
        self.address = self._segment.address
        devices = Devices()
        try:
            straightened = Straightened([tensors[entry.name] for entry in self.layout.entries])
            sources = native.Tensors(straightened.tensors, [False] * len(straightened.tensors))
            sources.refresh()
            devices.see(sources.devices)
            straightened.fill()
            capture = native.Capture(
                pool, plan_of(self.layout), sources, self.address, at_once=[], streams=devices.now()
            )
            capture.wait(None)
            self.checksums = capture.checksums
        except BaseException:
            self._segment.close()
            raise
        finally:
            devices.close()

    def close(self) -> None:
        self._segment.close()


def copy_pool() -> native.Pool:
    """Threads to copy with."""
    return native.Pool("dcp", choose(config.cores(), chosen=config.copy_threads()).threads)
