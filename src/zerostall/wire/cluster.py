"""Everything an agent and the manager say to each other, as typed JSON over HTTP.

    POST /v1/join      Join → Joined             once, and again after `fenced` or `unknown`
    POST /v1/report    Report → Answer           every `interval` seconds; what to do comes in the answer
    POST /v1/leave     Leave → Answer            the agent ends of its own will
    POST /v1/whereis   WhereIs → Located         which nodes have images of a rank: asked by a restore
    POST /v1/heir      Empty → Inherited         which run an empty folder goes on with: asked when a run begins

Anything else is answered by `Refusal` with a status of 400 or more. Every request carries `Authorization: Bearer
TOKEN`. What is unknown in a message is ignored, so a newer side may say more; a change that an older side must not miss
is a new `/v2`.

An answer states what should be so, not what to do next: it may come twice or not at all.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

PREFIX = "/v1"
MOST_BYTES = 4 << 20
"""The largest message that is read."""

HISTOGRAM = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds in seconds of the stall histogram's buckets; one more bucket is for what is longer."""

NodeName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
RunId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Token = Annotated[str, msgspec.Meta(max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Address = Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}$|^$")]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Note(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A part of a message.

    A manager holds hundreds of thousands of them; that the garbage collector passes them by (they form no cycles) keeps
    its pauses out of decisions.
    """


class CopyNote(Note, frozen=True):
    """One sealed image, or, of a whole step, all of them.

    Attributes:
        attempt: equal on all ranks whose images make one snapshot.
        created: tells this image from others of its step and rank.
        nbytes: of the image.
    """

    step: Count
    attempt: Token
    tier: Annotated[str, msgspec.Meta(max_length=16)]
    created: float = 0.0
    nbytes: Count = 0


class DamageNote(Note, frozen=True):
    """An image in memory that fails its checksum; it is no copy until it is made again."""

    step: Count
    reason: Text


class RankNote(Note, frozen=True):
    """A rank's images on this node.

    Attributes:
        home: the rank trains here, or did last; otherwise these are replicas.
        trains: its trainer is there now.
        nbytes: of one of its images.
        damaged: images that are not among the copies.
    """

    rank: Rank
    home: bool
    trains: bool
    copies: Annotated[tuple[CopyNote, ...], msgspec.Meta(max_length=4096)]
    nbytes: Count = 0
    damaged: Annotated[tuple[DamageNote, ...], msgspec.Meta(max_length=4096)] = ()


class RunNote(Note, frozen=True):
    """A run on this node.

    Attributes:
        where, name: its folder on the node that it trains on, and what its user calls it.
        whole: steps of which a tier has all ranks' images.
        writing: the step on its way to disk.
        error: why the last write failed, "" when it did not.
    """

    run: RunId
    where: Text
    world: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    ranks: Annotated[tuple[RankNote, ...], msgspec.Meta(max_length=4096)]
    whole: Annotated[tuple[CopyNote, ...], msgspec.Meta(max_length=65536)] = ()
    writing: Count | None = None
    error: Text = ""
    name: Text = ""


class Finding(Note, frozen=True):
    """What became of an image that was doubted.

    Attributes:
        number: rises with each finding of this agent; one that was told may come again.
        kind: damaged, mended (made again from a good copy), or hopeless (nobody has a good one just now).
    """

    number: Count
    kind: Annotated[str, msgspec.Meta(max_length=16)]
    run: RunId
    rank: Rank
    step: Count
    tier: Annotated[str, msgspec.Meta(max_length=16)]
    reason: Text


class Counters(Note, frozen=True):
    """What an agent has done since it started; only rising.

    Attributes:
        stalls: how often training was held, by the buckets of `HISTOGRAM`.
        scrubbed_bytes: checked once more although nobody asked.
        damaged, mended: images that failed their checksums, and those of them that were made again.
    """

    sealed_bytes: Count = 0
    stored_bytes: Count = 0
    sent_bytes: Count = 0
    received_bytes: Count = 0
    stalls: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)] = ()
    scrubbed_bytes: Count = 0
    damaged: Count = 0
    mended: Count = 0


class Join(Note, frozen=True, kw_only=True):
    """An agent asks for its node.

    Attributes:
        instance: names this agent process, no other has the name.
        last_epoch, fenced: see `core.cluster.Cluster.join`.
        labels: of the node, as `core.topology.Place` reads them.
        peer: where other agents reach this one, "" where they cannot.
        offers: bytes of memory for other nodes' images.
    """

    node: NodeName
    instance: Token
    last_epoch: Count = 0
    fenced: bool = False
    version: Token = ""
    labels: Annotated[str, msgspec.Meta(max_length=256)] = ""
    peer: Address = ""
    offers: Count = 0


class Joined(Note, frozen=True, kw_only=True):
    epoch: int
    interval: Seconds


class Report(Note, frozen=True, kw_only=True):
    """A heartbeat.

    Attributes:
        sequence: rises within the epoch.
        version: of what the node holds; rises whenever that changes.
        held: what it holds; None where the manager has heard this version.
        plan: the version of the plan it goes by, 0 for none.
        heard: the sequence of the last report whose answer it has followed.
        deaf: seconds since its loop last answered.
        host_bytes, host_budget: memory lent and what may be.
        findings: those that no answer has come for yet.
        upkeep: what looks after copies does just now, in words.
        pace: how fast images go to other nodes, and why, in words.
    """

    node: NodeName
    epoch: Count
    sequence: Count
    version: Count
    held: Annotated[tuple[RunNote, ...], msgspec.Meta(max_length=1024)] | None = None
    plan: Count = 0
    heard: int = -1
    deaf: Seconds = 0.0
    host_bytes: Count = 0
    host_budget: Count = 0
    counters: Counters = Counters()
    findings: Annotated[tuple[Finding, ...], msgspec.Meta(max_length=256)] = ()
    upkeep: Text = ""
    pace: Text = ""


class Leave(Note, frozen=True):
    node: NodeName
    epoch: Count


class Peer(Note, frozen=True, order=True):
    """Another node's agent."""

    node: NodeName
    address: Address


class Partner(Note, frozen=True):
    """Where replicas of a rank that trains here go."""

    run: RunId
    rank: Rank
    peers: tuple[Peer, ...]


class Guest(Note, frozen=True, order=True):
    """A rank of another node whose images are kept here."""

    run: RunId
    rank: Rank


class Plan(Note, frozen=True):
    """Who keeps whose images; replicas of any other rank may go."""

    version: Count
    partners: tuple[Partner, ...] = ()
    guests: tuple[Guest, ...] = ()


class Fetching(Note, frozen=True):
    """An image that should be in this node's memory, and where the nearest copy is."""

    run: RunId
    rank: Rank
    step: Count
    attempt: Token
    source: Peer
    tier: str
    reason: Text


class Dirty(Note, frozen=True):
    """A step that will never be whole: what is not committed of it may go."""

    run: RunId
    step: Count
    attempt: Token
    reason: Text


class Answer(Note, frozen=True):
    """What should be so.

    Attributes:
        tell_all: the next report should say what the node holds.
        plan: None where the node goes by it already.
    """

    sequence: int
    interval: Seconds
    tell_all: bool = False
    plan: Plan | None = None
    fetching: tuple[Fetching, ...] = ()
    dirty: tuple[Dirty, ...] = ()


class WhereIs(Note, frozen=True):
    """Which copies of this rank's images are on other nodes?

    With a `step`, of that step alone; `everybody`: of all ranks, and on the node that asks, too.
    """

    node: NodeName
    run: RunId
    rank: Rank
    step: Count | None = None
    everybody: bool = False


class LocatedCopy(Note, frozen=True):
    """An image on another node, or kept for another on the one that asks.

    Attributes:
        clean: every rank's image of the step can be had.
        created: when this image was saved, and `began` when rank 0's was; 0.0 where nobody says.
        world: how many ranks saved the step.
        rank: whose image it is.
        awaited: the step was clean, and what is lacking of it may be on disks of nodes that are not heard yet.
    """

    step: int
    attempt: str
    tier: str
    peer: Peer
    clean: bool
    world: int
    created: float = 0.0
    began: float = 0.0
    reason: str = ""
    rank: int = 0
    awaited: bool = False


class Located(Note, frozen=True):
    """The copies, newest step first, by rank, and of a rank the nearest first."""

    copies: tuple[LocatedCopy, ...]


class Empty(Note, frozen=True):
    """A trainer begins in an empty folder.

    Attributes:
        where, name: the folder, and what its user calls the run.
        asked: seconds since this was asked first.
    """

    node: NodeName
    where: Text
    name: Text = ""
    asked: Seconds = 0.0


class Inherited(Note, frozen=True):
    """See `core.heirs.Heir`."""

    run: str
    name: str
    reason: str
    wait: bool = False


class Refusal(Note, frozen=True):
    """Why a request was refused. `kind` is one of token, oversized, malformed, fenced, unknown, late, taken, failed."""

    kind: str
    reason: str
