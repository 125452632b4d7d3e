"""Ports that nobody has, for servers that must be told one before they start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

_ALONE = range(20_000, 30_000)
"""Below those that the kernel gives out by itself (32768 and above), so that no connection takes one meanwhile."""


def free_ports(count: int) -> list[int]:
    """So many different ports of the loopback interface, none of them in use."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            one = held.enter_context(socket.socket())
            try:
                one.bind(("127.0.0.1", random.SystemRandom().choice(_ALONE)))
            except OSError:
                continue
            found.append(one.getsockname()[1])
    return found
