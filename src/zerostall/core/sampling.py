"""Which chunks of an image are compared with their sources at which save."""

from __future__ import annotations

import math


def every(share: float) -> int:
    """Return n such that one chunk of n is looked at in each save, and all have been after n of them; 0 for none.

    One of n is at least `share`, rounded up to the next fraction 1/n; a device with fewer chunks looks at one.

    >>> every(0.01), every(0.3), every(1), every(0)
    (100, 3, 1, 0)
    """
    return math.floor(1 / share * (1 + 1e-12)) if share else 0
