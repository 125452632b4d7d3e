"""What a trainer says without a message: that a snapshot is being captured just now.

A message would cost the training thread a call of the system in `save`, and its agent a wake-up, at the very moment at
which nobody should be in training's way. A byte in memory that both have mapped costs neither. It is not relied upon:
where it is late, or stays behind, uploads wait a little too long or not at all.
"""

from __future__ import annotations

import mmap

BYTES = 4096
"""Of a page behind the last slot. A segment without it is of an agent that does not look."""


class Notice:
    """The page of one segment. Any thread; it stays mapped for as long as this object lives."""

    def __init__(self, fd: int, offset: int) -> None:
        self._page = mmap.mmap(fd, BYTES, offset=offset)

    @classmethod
    def of(cls, fd: int, nbytes: int, offset: int) -> Notice | None:
        """The page at `offset` of a segment of so many bytes, if it has it."""
        return cls(fd, offset) if nbytes >= offset + BYTES else None

    @property
    def busy(self) -> bool:
        return self._page[0] != 0

    def say(self, *, busy: bool) -> None:
        self._page[0] = busy
