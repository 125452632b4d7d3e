"""What the manager shows of the cluster: the one document behind the page, the commands and the metrics.

GET /v1/state      State
GET /v1/events     events, `?after=ID`
"""

from __future__ import annotations

import msgspec


class View(msgspec.Struct, frozen=True):
    """A part of the document."""


class Event(View, frozen=True):
    """Something that happened, in words, with the reason. `at` is in seconds since 1970, on the manager's clock."""

    id: int
    at: float
    kind: str
    subject: str
    text: str


class NodeView(View, frozen=True, kw_only=True):
    """A node; `silent` in seconds, rates in bytes a second; `stands` says whether `labels` are a
    topology file's or its own, where there is such a file.

    Attributes:
        damaged: images in its memory that fail their checksums just now, each with the reason.
        damaged_ever, mended_ever: how many did since its agent started, and how many of them were made again.
        scrub_rate: bytes that are checked although nobody asks.
        upkeep: what looks after copies does just now, in words.
        pace: how fast images go to other nodes, and why, in words.
    """

    name: str
    health: str
    reason: str
    silent: float
    epoch: int
    labels: str
    version: str
    ranks: int
    training: int
    replicas: int
    host_bytes: int
    host_budget: int
    deaf: float
    writing: tuple[int, ...]
    error: str
    sealed_rate: float
    stored_rate: float
    sent_rate: float
    received_rate: float
    stands: str = ""
    damaged: tuple[str, ...] = ()
    damaged_ever: int = 0
    mended_ever: int = 0
    scrub_rate: float = 0.0
    upkeep: str = ""
    pace: str = ""


class SnapshotView(View, frozen=True):
    """A snapshot; `tiers` maps a tier to how many ranks' images it has, `age` is in seconds since it was first seen."""

    step: int
    attempt: str
    standing: str
    reason: str
    have: int
    tiers: dict[str, int]
    age: float


class RunView(View, frozen=True, kw_only=True):
    """A run.

    Attributes:
        target, target_reason: the step that training would go back to now, and why.
        rpo: seconds of training that would be lost with it; None while there is none.
        waiting: ranks that nothing can be brought for, and why.
        fetching: what is brought into whose memory before anybody asks, from where, and why.
        copies: where replicas go and why there, what is wanting in front.
    """

    run: str
    where: str
    world: int
    training: int
    nodes: int
    target: int | None
    target_reason: str
    rpo: float | None
    replicated: int
    snapshots: tuple[SnapshotView, ...]
    waiting: tuple[str, ...] = ()
    fetching: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()


class State(View, frozen=True, kw_only=True):
    """The cluster now; `now` in seconds since 1970, `stalls` by the buckets whose upper bounds are `stall_bounds`.

    `topology` says what the topology file has, "" where there is none.
    """

    now: float
    uptime: float
    version: str
    interval: float
    nodes: tuple[NodeView, ...]
    runs: tuple[RunView, ...]
    events: tuple[Event, ...]
    stall_bounds: tuple[float, ...]
    stalls: tuple[int, ...]
    decision_ms: float
    topology: str = ""
