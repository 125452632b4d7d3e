"""What goes on at a node, for people who look, and the end of its agent.

client → agent   Status  Doubted  Tidy  Stop       agent → client   Report  (Done, of `attaching`)
"""

from __future__ import annotations

import msgspec

from zerostall import telemetry
from zerostall.wire.message import Message
from zerostall.wire.refusals import plain


class Fallback(msgspec.Struct, frozen=True):
    """What goes a slower or poorer way in some process, and how often."""

    text: str
    count: int

    @classmethod
    def all(cls) -> tuple[Fallback, ...]:
        """Those of this process."""
        return tuple(cls(plain(found.text), found.count) for found in telemetry.fallbacks())


class Status(Message, frozen=True):
    """What is going on at this node?"""

    id: int


class TierReport(msgspec.Struct, frozen=True):
    """What a run has in one tier.

    Attributes:
        newest, created: the newest step there and when it was saved; None and 0.0 for none.
        steps: how many there are.
        every: seconds from one step that goes there to the next.
        keep: what retention keeps there, in words.
        moving: the step that is on its way.
        waits: why it waits just now.
    """

    tier: str
    where: str
    newest: int | None
    created: float
    steps: int
    every: float
    keep: str
    moving: int | None = None
    waits: str = ""
    last_error: str = ""


class RankReport(msgspec.Struct, frozen=True):
    """One rank's memory on this node; `damaged` says of each image that is of no use just now what is wrong with it."""

    where: str
    rank: int
    world: int
    trainer_pid: int | None
    segment_bytes: int
    host_steps: tuple[int, ...]
    disk_steps: tuple[int, ...]
    trickling: int | None
    last_error: str = ""
    fallbacks: tuple[Fallback, ...] = ()
    tiers: tuple[TierReport, ...] = ()
    peer_bytes: int = 0
    peer_steps: tuple[int, ...] = ()
    damaged: tuple[str, ...] = ()


class UpkeepReport(msgspec.Struct, frozen=True):
    """How the images in memory are kept sound; bytes and counts since the agent started.

    Attributes:
        words: what goes on just now.
        rate: most bytes a second that are checked although nobody asks.
        checked: bytes that were.
        damaged, mended: images that failed their checksums, and those of them that were made again.
        pace: how fast images go to other nodes, and why, in words; "" where they go to none.
    """

    words: str = ""
    rate: int = 0
    checked: int = 0
    damaged: int = 0
    mended: int = 0
    pace: str = ""


class Report(Message, frozen=True):
    id: int
    pid: int
    version: str
    uptime: float
    host_bytes: int
    host_budget: int
    ranks: tuple[RankReport, ...]
    fallbacks: tuple[Fallback, ...] = ()
    upkeep: UpkeepReport = UpkeepReport()


class Tidy(Message, frozen=True):
    """Answer when what is under way is on disk and retention has done its work."""

    id: int


class Doubted(Message, frozen=True):
    """Somebody has read steps in that run's folder and found them damaged: see for yourself, and make them again.

    Answered at once; nothing happens where this agent does not hold the folder.

    Attributes:
        where: the folder's whole path.
        steps: each with what is wrong with it.
    """

    id: int
    where: bytes
    steps: tuple[tuple[int, str], ...]


class Stop(Message, frozen=True):
    """Leave. Refused while trainers are attached, unless forced."""

    id: int
    force: bool = False
