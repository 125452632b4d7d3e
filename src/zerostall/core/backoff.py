"""How long to wait before the next try: a pure decision."""

from __future__ import annotations

FIRST_SECONDS = 0.5
MOST_SECONDS = 60.0


def pause(failures: int, luck: float) -> float:
    """Seconds to wait after that many failures in a row: doubling from half a second to a minute.

    `luck` in [0, 1) spreads the pause over its upper half, so that many nodes do not retry in step.
    """
    if failures < 1:
        return 0.0
    whole = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(failures - 1, 30))
    return whole * (0.5 + 0.5 * luck)
