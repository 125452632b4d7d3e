"""What a trainer said beside an image that it has sealed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.core.roll import NONE, Save

if TYPE_CHECKING:
    from zerostall.core.candidates import Past


@dataclass(slots=True)
class Wish:
    """`save` is the name that all ranks know it by.

    Attributes:
        promise: somebody waits for it beyond memory.
        replace: another step of its number on disk makes room for it.
        pin: retention leaves it.
        aside: images that the run has gone back behind.
    """

    save: Save = NONE
    promise: bool = False
    replace: bool = False
    pin: bool = False
    aside: tuple[Past, ...] = ()
