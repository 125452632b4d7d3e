"""A trainer comes to its agent: what it says of its run, and the memory that it is lent.

trainer → agent   Hello  Lease  Adopt       agent → trainer   Welcome  Leased  Done
"""

from __future__ import annotations

import msgspec

from zerostall.core.heirs import Holding
from zerostall.core.retention import Keep
from zerostall.wire.message import Message
from zerostall.wire.saves import Sealed


class Rules(msgspec.Struct, frozen=True):
    """What the trainer wants of its run: retention and whether every sealed image must reach the disk.

    Attributes:
        keep_last, keep_every, keep_best, best_mode, keep_within: see `core.retention.Keep`; seconds.
        lossless: `when_busy="wait"`: no sealed image is replaced before it is on disk.
        disk_interval: seconds from one write to disk to the next, unless somebody waits for it.
        patience: seconds after which a save that some ranks have sealed, and others have said nothing of, is given up.
        disks: folders on other disks that images are dealt over, beside the run's own.
    """

    keep_last: int
    keep_every: int | None = None
    keep_best: int | None = None
    best_mode: str = "min"
    lossless: bool = False
    disk_interval: float = 0.0
    patience: float = 600.0
    disks: tuple[str, ...] = ()
    keep_within: float | None = None

    def keep(self) -> Keep:
        return _keep(self)


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
    keep_within: float | None = None

    def keep(self) -> Keep:
        return _keep(self)

    def __repr__(self) -> str:
        return f"<RemoteRules {self.url}>"


def _keep(rules: Rules | RemoteRules) -> Keep:
    mode = "max" if rules.best_mode == "max" else "min"
    return Keep(rules.keep_last, rules.keep_every, rules.keep_best, mode, rules.keep_within)


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
        elder: the run that some ranks' folders hold already, and the newest step that one of them has. An empty folder
            goes on with it.
    """

    here: tuple[int, ...]
    host: str
    meeting: Meeting | None = None
    elder: Holding | None = None

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


class Lent(msgspec.Struct, frozen=True):
    """A segment, whose file descriptor comes beside the message: a key that no other segment has, and its bytes."""

    key: int
    nbytes: int


class Lease(Message, frozen=True):
    """Asks for memory: `slots` images of `layout`. The memory of the run before is given again if it fits.

    `begins`: this rank's; see `core.begins`.
    """

    id: int
    layout: bytes
    slots: int
    begins: tuple[int, ...] = ()


class Leased(Message, frozen=True):
    """Memory for the trainer; the segment's file descriptor comes beside it."""

    id: int
    memory: Lent
    stride: int
    slots: int


class Adopt(Message, frozen=True):
    """Hands a segment (its file descriptor beside the message) to a new agent, with what is sealed in it.

    Attributes:
        stowed: of these images a vault has still to bring a part, as far as the trainer knows. It hears of each what
            became of it: `Drained`, now or later, or `Spoiled`.
        busy_slot: is captured into, or was granted to be; place: with it granted, a locker and which of its places.
        grant: the newest grant that the trainer has heard of, that of the busy slot if there is one. Later ones have
            greater numbers, so that what was said before is not taken for news.
    """

    id: int
    layout: bytes
    slots: int
    images: tuple[Sealed, ...]
    busy_slot: int | None
    grant: int = 0
    place: tuple[int, int] = (0, 0)
    stowed: tuple[Sealed, ...] = ()
    begins: tuple[int, ...] = ()


class Leave(Message, frozen=True):
    """The trainer goes. A connection that ends without this may just have broken, as long as the process is there."""


class Done(Message, frozen=True):
    id: int
