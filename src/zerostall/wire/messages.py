"""Everything a trainer and its agent say to each other, as typed messages.

A request carries an `id` and is answered by a message with the same id (or by `Refused`). The others are events and
are not answered. File descriptors travel beside a message (see `channel`).

    trainer → agent   Hello  Lease  Adopt  Find  Describe  Quote  Fetch  Tidy  Status  Stop   (requests)
                      Begin  Sealed  Discarded  Passed  Revoked  Plan  Promise  Release (events; and see `lockers`)
    agent → trainer   Welcome  Leased  Found  Described  Quoted  Fetched  Opened  Done  Report  Refused (answers)
                      Granted  Reached  Failed  Replaced  Spoiled  Awaiting  Hold  Plan (events)
"""

from __future__ import annotations

import msgspec

from zerostall import errors, telemetry
from zerostall.core.candidates import Past
from zerostall.wire.lockers import Drained, Kept, Locker, NoLocker, NoUse, Rent, Stowed
from zerostall.wire.message import Message

PROTOCOL = 3


def plain(text: str) -> str:
    """A text that may hold a path that is no text: what cannot be encoded is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


# ---------------------------------------------------------------------------------------------- trainer → agent


class Rules(msgspec.Struct, frozen=True):
    """What the trainer wants of its run: retention and whether every sealed image must reach the disk.

    Attributes:
        keep_last, keep_every, keep_best, best_mode: see `core.retention.Keep`.
        lossless: `when_busy="wait"`: no sealed image is replaced before it is on disk.
        disk_interval: seconds from one write to disk to the next, unless somebody waits for it.
        patience: seconds after which a save that some ranks have sealed, and others have said nothing of, is given up.
    """

    keep_last: int
    keep_every: int | None = None
    keep_best: int | None = None
    best_mode: str = "min"
    lossless: bool = False
    disk_interval: float = 0.0
    patience: float = 600.0


class RemoteRules(msgspec.Struct, frozen=True):
    """What the trainer wants of its run's remote tier; see `core.policy.Remote`.

    Attributes:
        environment: where credentials, region and endpoint are found. Not for logs: `repr` leaves it out.
    """

    url: str
    every: float
    keep_last: int
    keep_every: int | None
    keep_best: int | None
    best_mode: str
    rate: float | None
    environment: dict[str, str]

    def __repr__(self) -> str:
        return f"<RemoteRules {self.url}>"


class Meeting(msgspec.Struct, frozen=True):
    """Where the agents of a run on several nodes meet, and what they prove to each other that they know."""

    address: str
    secret: str

    def __repr__(self) -> str:
        return f"<Meeting {self.address}>"


class Nodes(msgspec.Struct, frozen=True):
    """That the ranks of a run are on several nodes.

    Attributes:
        here: those on this node.
        host: this node's name or address for other nodes.
        meeting: at the agent of rank 0's node. Its own trainers know it once they were welcomed.
    """

    here: tuple[int, ...]
    host: str
    meeting: Meeting | None = None

    @property
    def seat(self) -> bool:
        """Is this the node that the others come to?"""
        return 0 in self.here


class Hello(Message, frozen=True):
    """The first message of a trainer: which rank of which run it is, and its umask, for what is written for it.

    Attributes:
        where: a folder's path; or a URL, where the run has no disk: that is `remote`'s, too.
        nodes: None where all ranks are on this one.
    """

    id: int
    protocol: int
    pid: int
    where: bytes
    rank: int
    world: int
    rules: Rules
    run: str | None = None
    umask: int | None = None
    remote: RemoteRules | None = None
    nodes: Nodes | None = None


class Lease(Message, frozen=True):
    """Asks for memory: `slots` images of `layout`. The memory of the run before is given again if it fits.

    `begins`: this rank's; see `core.begins`.
    """

    id: int
    layout: bytes
    slots: int
    begins: tuple[int, ...] = ()


class Fallback(msgspec.Struct, frozen=True):
    """What goes a slower or poorer way in some process, and how often."""

    text: str
    count: int

    @classmethod
    def all(cls) -> tuple[Fallback, ...]:
        """Those of this process."""
        return tuple(cls(plain(found.text), found.count) for found in telemetry.fallbacks())


class Begin(Message, frozen=True):
    """All ranks have agreed where to go on from: what some of them sealed before, and not all, is worth nothing."""

    epoch: int


class Sealed(Message, frozen=True):
    """The granted slot holds a whole image.

    Attributes:
        epoch, turn: with the record's step the name of this save, the same on every rank; see `core.roll.Save`.
        promise: the image must not be replaced before it is on disk.
        replace: a committed step of that number may be replaced.
        pin: retention never evicts it.
        aside: what of a past that the run has left is set aside before this one is committed.
        stalls: seconds of each time that training was held since the image before.
        fallbacks: those of the trainer until now.
        stowed: where the part of the image lies that was on a device, if not in the slot; the record's checksums are
            all 0 then, for nobody has read it yet.
    """

    slot: int
    record: bytes
    epoch: int = 0
    turn: int = 0
    promise: bool = False
    replace: bool = False
    pin: bool = False
    aside: tuple[Past, ...] = ()
    stalls: tuple[float, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    stowed: Stowed | None = None


class Adopt(Message, frozen=True):
    """Hands a segment (its file descriptor beside the message) to a new agent, with what is sealed in it."""

    id: int
    layout: bytes
    slots: int
    images: tuple[Sealed, ...]
    busy_slot: int | None
    begins: tuple[int, ...] = ()


class Discarded(Message, frozen=True):
    """The granted slot holds nothing of use. `epoch` and `turn` as in `Sealed`."""

    slot: int
    step: int
    reason: str
    epoch: int = 0
    turn: int = 0


class Passed(Message, frozen=True):
    """This rank goes on without that save.

    Attributes:
        skipped: for want of a slot, or because all ranks hold off.
    """

    step: int
    epoch: int
    turn: int
    reason: str
    skipped: bool


class Revoked(Message, frozen=True):
    """A step that was sealed is dirty after all: no tier may keep it.

    `created` says which of its number, here and wherever a message names a step: a number may be saved again, and what
    was said of the first must not be taken for the second.
    """

    step: int
    created: float
    reason: str


class Promise(Message, frozen=True):
    """Somebody waits for `step` in `tier` ("disk" or "remote"): do not replace it before.

    Answered by `Reached`, `Failed` or `Replaced`.
    """

    step: int
    created: float
    tier: str = "disk"


class Plan(Message, frozen=True):
    """Every rank saves the first step that it comes to and that is not before this one. One proposes, all are told.

    Attributes:
        leave: and then training ends. Only the first such plan of an epoch counts.
    """

    epoch: int
    step: int
    leave: bool = False


class Find(Message, frozen=True):
    """Which copies of which steps are there?"""

    id: int


class Describe(Message, frozen=True):
    """What do the images of all ranks hold at `step` in `tier`?"""

    id: int
    step: int
    tier: str


class Quote(Message, frozen=True):
    """What do the records of these ranks say, of the step that was described as `created` then?"""

    id: int
    step: int
    tier: str
    created: float
    ranks: tuple[int, ...]


class Fetch(Message, frozen=True):
    """Bring an image of `step` from `tier` into memory that the trainer can map, and hold it there.

    Attributes:
        rank: whose image; None is the trainer's own.
        chunks: only these chunks of it are looked at; None: the whole image, and its layout and record with it.
        as_file: where all of it is a file here, that is wanted and not memory.
    """

    id: int
    step: int
    tier: str
    rank: int | None = None
    chunks: tuple[int, ...] | None = None
    as_file: bool = False


class Release(Message, frozen=True):
    """The trainer has read what it fetched."""


class Tidy(Message, frozen=True):
    """Answer when what is under way is on disk and retention has done its work."""

    id: int


class Status(Message, frozen=True):
    """What is going on at this node?"""

    id: int


class Stop(Message, frozen=True):
    """Leave. Refused while trainers are attached, unless forced."""

    id: int
    force: bool = False


# ---------------------------------------------------------------------------------------------- agent → trainer


class Lent(msgspec.Struct, frozen=True):
    """A segment, whose file descriptor comes beside the message: a key that no other segment has, and its bytes."""

    key: int
    nbytes: int


class Welcome(Message, frozen=True):
    """The agent knows the run: its id, and the steps that are there already (host memory and disk).

    Attributes:
        epoch: the newest that the agent knows of.
        memory: what this rank's trainer before was lent and the agent still holds.
        meeting: where other nodes' agents meet this one, if they do.
        trouble: what the trainer should know and that keeps nobody from training; in words.
    """

    id: int
    pid: int
    run_id: str
    steps: tuple[int, ...]
    epoch: int = 0
    memory: Lent | None = None
    meeting: Meeting | None = None
    trouble: str = ""


class Leased(Message, frozen=True):
    """Memory for the trainer; the segment's file descriptor comes beside it."""

    id: int
    memory: Lent
    stride: int
    slots: int


class CopyFacts(msgspec.Struct, frozen=True):
    """One copy of one step: where it is, and if it is not clean, why.

    Attributes:
        created: when rank 0 saved the step, which tells it from others of that number; 0.0 where the copy is too
            damaged to say.
        world: how many ranks saved it; 0 where the copy is too damaged to say.
    """

    step: int
    tier: str
    clean: bool
    created: float
    reason: str = ""
    world: int = 0


class Found(Message, frozen=True):
    id: int
    copies: tuple[CopyFacts, ...]


class Described(Message, frozen=True):
    """What all ranks' images are: their layouts, each once, and who has which.

    Attributes:
        created: of the step's manifest, which tells it from others of that number.
        layout_of: of each rank, the index of its layout.
        begins: of each rank, where its boxes begin; see `core.begins`.
        records: those of the ranks whose small values are looked at, the client's own among them.
    """

    id: int
    created: float
    layouts: tuple[bytes, ...]
    layout_of: tuple[int, ...]
    begins: tuple[tuple[int, ...], ...]
    records: tuple[bytes, ...]


class Quoted(Message, frozen=True):
    """The records of the ranks that were asked for, in that order."""

    id: int
    records: tuple[bytes, ...]


class Fetched(Message, frozen=True):
    """The image lies at `offset` of a segment.

    Attributes:
        layout, record: of the image; empty where chunks were asked for, for the trainer knows them.
        passing: the segment goes when it is released; otherwise it is this rank's memory.
        verified: its bytes were checked against the record while they were read.
        kept: where part of it lies in another GPU's memory, too.
    """

    id: int
    memory: Lent
    offset: int
    passing: bool
    layout: bytes
    record: bytes
    verified: bool
    kept: Kept | None = None


class Opened(Message, frozen=True):
    """The image is a file, whose descriptor comes beside the message; the step stays there until it is released.

    Attributes:
        path: the file's, to speak of it.
    """

    id: int
    path: bytes
    layout: bytes
    record: bytes


class Done(Message, frozen=True):
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
    """One rank's memory on this node."""

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


class Report(Message, frozen=True):
    id: int
    pid: int
    version: str
    uptime: float
    host_bytes: int
    host_budget: int
    ranks: tuple[RankReport, ...]
    fallbacks: tuple[Fallback, ...] = ()


class Refused(Message, frozen=True):
    """The request failed. `kind` is the name of a class in `zerostall.errors`."""

    id: int
    kind: str
    message: str
    hint: str = ""
    errno: int | None = None

    @classmethod
    def of(cls, request: int, error: errors.ZerostallError) -> Refused:
        text = plain(str(error.args[0]) if error.args else str(error))
        number = error.errno if isinstance(error, errors.StorageError) else None
        return cls(id=request, kind=type(error).__name__, message=text, hint=error.hint, errno=number)

    def error(self) -> errors.ZerostallError:
        """The error that the other side raised, as the same class."""
        return rebuild_error(self.kind, self.message, hint=self.hint, errno=self.errno)


class Granted(Message, frozen=True):
    """The trainer may capture into this slot, and what lies on its device into that place of its locker (0: none)."""

    slot: int
    locker: int = 0
    place: int = 0


class Reached(Message, frozen=True):
    """The step is clean in `tier`."""

    step: int
    created: float
    tier: str


class Failed(Message, frozen=True):
    """The step did not get to `tier`; the agent goes on trying with the newest one."""

    step: int
    created: float
    tier: str
    kind: str
    message: str
    hint: str = ""
    errno: int | None = None

    @classmethod
    def of(cls, refused: Refused, step: int, created: float, tier: str) -> Failed:
        """What was refused, of a step on its way to `tier`."""
        return cls(step, created, tier, refused.kind, refused.message, refused.hint, refused.errno)


class Replaced(Message, frozen=True):
    """A newer image took this step's place in memory before it got to `tier`."""

    step: int
    created: float
    tier: str


class Spoiled(Message, frozen=True):
    """A save will never be clean: another rank has skipped it, or it came to nothing there; or here, in a vault.

    Attributes:
        kind: where it came to nothing here, the name of a class in `zerostall.errors`.
    """

    step: int
    created: float
    rank: int
    reason: str
    skipped: bool = False
    kind: str = ""


class Awaiting(Message, frozen=True):
    """A save that this rank has sealed is not clean yet: these ranks have said nothing of it."""

    step: int
    created: float
    ranks: tuple[int, ...]


class Hold(Message, frozen=True):
    """Skip every save of a step before this one, so that all ranks save the same steps again."""

    epoch: int
    step: int


_Request = Hello | Lease | Adopt | Find | Describe | Quote | Fetch | Tidy | Status | Stop
FromTrainer = _Request | Begin | Sealed | Discarded | Passed | Revoked | Plan | Promise | Release | Rent | NoUse
_Answer = Welcome | Leased | Found | Described | Quoted | Fetched | Opened | Done | Report | Refused
_Event = Granted | Reached | Failed | Replaced | Spoiled | Awaiting | Hold | Plan | Locker | NoLocker | Drained
FromAgent = _Answer | _Event


def rebuild_error(kind: str, message: str, *, hint: str = "", errno: int | None = None) -> errors.ZerostallError:
    """An error that crossed the socket. An unknown kind becomes `AgentError`: the name is never looked up blindly."""
    cls = getattr(errors, kind, None)
    if not (isinstance(cls, type) and issubclass(cls, errors.ZerostallError)):
        return errors.AgentError(f"{kind}: {message}", hint=hint)
    if issubclass(cls, errors.StorageError):
        return cls(message, errno=errno, hint=hint)
    return cls(message, hint=hint)
