"""How fast images may go to other nodes, so that training's own traffic finds the link free: pure decisions.

What training needs of a link comes in bursts, a reduction of gradients in every step. So its rate is taken to be the
highest of the last seconds, twice that is left to it, and what then remains of the link is for images. They get a
twentieth of the link in any case: a copy that never arrives is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW_SECONDS = 0.5
"""The counters are read that often, at most."""

REMEMBERED_SECONDS = 3.0
"""Windows count for so long after their end."""

IDLE_SECONDS = 1.0
GLANCE_SECONDS = 0.1
"""After so long without an image on its way the link is looked at for a moment, before the first byte of the next: what
went on meanwhile says little of what goes on now."""

HEADROOM = 2.0
LEAST = 0.05

_OVERHEAD = 1.1
"""Bytes on the link for each byte of an image, with headers and what is sent again."""

_NOISE = 256 << 10
"""Bytes of a window that nobody's step waits for: heartbeats, names, a terminal."""

_UNSURE = 8 << 20
"""Bytes of a window that may be the count's own error: what is counted as sent and still lies in the kernel, say."""


class Window(msgspec.Struct, frozen=True):
    """What has left a device in so many seconds: bytes in all, and those of images."""

    seconds: float
    total: int
    images: int

    @property
    def others(self) -> float:
        """Bytes a second that were not ours; what may be an error of the count is none."""
        rest = self.total - _OVERHEAD * self.images
        return rest / self.seconds if rest > (_UNSURE if self.images else _NOISE) else 0.0


class Allowance(msgspec.Struct, frozen=True):
    """Bytes a second that may go to other nodes, None for any; and why."""

    rate: float | None
    reason: str


def allow(windows: Sequence[Window], capacity: float, bound: float | None) -> Allowance:
    """How fast images may go now.

    Args:
        windows: the last ones.
        capacity: bytes a second of the link; 0.0 while nobody knows.
        bound: what is set; None for nothing.
    """
    others = max((window.others for window in windows), default=0.0)
    if not others:
        return Allowance(bound, "nobody else uses the link" if windows else "nothing has been sent yet")
    if not capacity:
        return Allowance(bound, "how much the link carries is being found out")
    left = max(LEAST * capacity, capacity - HEADROOM * others)
    reason = f"others send up to {_words(others)} of {_words(capacity)}"
    return Allowance(left if bound is None else min(bound, left), reason)


def capacity(nominal: float, windows: Sequence[Window], before: float) -> float:
    """Bytes a second of the link: what its device says; where that is not to be had, the most that was seen.

    Without images on their way nobody knows how much more it would have carried; so the first go out unbounded.
    """
    return nominal or max([before, *(window.total / window.seconds for window in windows if window.images)])


def _words(rate: float) -> str:
    return f"{rate / 1e6:.0f} MB/s"
