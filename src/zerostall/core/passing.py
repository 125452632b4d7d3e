"""Several ranks want the same bytes of one disk: does each read all of them, or a part that it gives to the others?"""

from __future__ import annotations

import msgspec


class Way(msgspec.Struct, frozen=True):
    """Whether ranks pass on what they read; and why."""

    together: bool
    reason: str


def choose(ranks: int, nbytes: int, read_seconds: float, pass_seconds: float) -> Way:
    """What to do with the rest, after a first round.

    Reading and passing on go on at the same time, so together the slower of both counts; alone all bytes come from the
    disk once for each rank.

    Args:
        ranks: how many there are.
        nbytes: that all of them read in the first round, each a part.
        read_seconds: what that took the slowest.
        pass_seconds: what it took the slowest to have them passed on.
    """
    if ranks < 2 or nbytes <= 0 or read_seconds <= 0 or pass_seconds <= 0:
        return Way(True, "nothing was measured")
    together, alone = max(read_seconds, pass_seconds), ranks * read_seconds
    read, passed = (f"{nbytes / seconds / 1e9:.2f} GB/s" for seconds in (read_seconds, pass_seconds))
    seen = f"the disk gives {read}, the group passes on {passed}"
    if alone < together:
        return Way(False, f"each of {ranks} ranks reads all by itself: {seen}")
    return Way(True, f"each byte is read once for {ranks} ranks: {seen}")
