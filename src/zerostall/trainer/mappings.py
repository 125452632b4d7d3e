"""Shared memory that this process has mapped: each segment once, whoever asks.

Entering a segment's pages into the page table takes longer than reading it (0.07 s a GB). So the memory that the agent
still holds from the trainer before is mapped and touched in the background while the model is being built, and serves
both the restore and the captures that follow.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.errors import ZerostallError
from zerostall.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Iterator


class Mappings:
    """Segments by the key that the agent gave them."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._segments: dict[int, native.Segment] = {}
        self._touching: threading.Thread | None = None

    def get(self, key: int, fd: int, nbytes: int) -> native.Segment:
        """The segment, mapped. Takes the descriptor over. FormatError: it is no segment of that size."""
        try:
            segment = self._segments.get(key)
            if segment is None or segment.nbytes != nbytes:
                segment = self._segments[key] = native.Segment.attach(fd, nbytes)
            return segment
        finally:
            os.close(fd)

    def offer(self, key: int, fd: int, nbytes: int) -> None:
        """Map a segment that will be wanted soon, and touch it in the background."""
        segment = self.get(key, fd, nbytes)

        def touch() -> None:
            try:
                segment.touch(self._threads)
            except ZerostallError as error:
                log.warning("memory could not be touched ahead: %s", error)

        self._touching = threading.Thread(target=touch, name="zerostall touch", daemon=True)
        self._touching.start()

    @contextlib.contextmanager
    def passing(self, fd: int, nbytes: int) -> Iterator[native.Segment]:
        """A segment for the length of the block only. Takes the descriptor over."""
        try:
            segment = native.Segment.attach(fd, nbytes)
        finally:
            os.close(fd)
        try:
            yield segment
        finally:
            # Taking gigabytes out of the page table takes a while that training need not wait for.
            threading.Thread(target=segment.close, name="zerostall unmap", daemon=True).start()

    def keep_only(self, key: int | None) -> None:
        """Let go of all other segments. Nothing may be reading or writing them."""
        touching, self._touching = self._touching, None
        try:
            if touching is not None:
                touching.join()
        except RuntimeError:  # Ctrl-C came when it began: if it is there, it lets go of the memory itself
            self._segments.clear()
            return
        for other in [other for other in self._segments if other != key]:
            self._segments.pop(other).close()
