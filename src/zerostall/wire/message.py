"""What every message of the node's socket is."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One message; its tag is its class name."""
