"""How one part of an agent tells another that it no longer trusts an image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zerostall.core.placement import ImageId


class Doubt(Protocol):
    """Told that an image of a step may be damaged in memory, or on `disk`, and why one thinks so. Any thread."""

    def __call__(self, image: ImageId, step: int, why: str, *, disk: bool = False) -> None: ...
