"""What the agents of one run say to each other when its ranks are on several nodes.

The agent of rank 0's node is the *seat*: it keeps the roll call, says which saves are clean, and commits steps to the
folder that all nodes share. The others are *outposts*: each has one connection to the seat (see `wire.peers` for how
it begins) and says on it what its ranks say. Everything here is an event; nothing is answered.

    outpost → seat   Here  Sealed  Passed  Revoked  Began  Found  Lost  Promise  Plan  Written  Copied  Evicted  Known
    seat → outpost   Clean  Verdict  Awaiting  Plan  Keep  Write  Commit  Stored  Settle  Copy  ToRank  Evicted  Ask

Where the nodes do not share a folder, each has its own: what an outpost has written it commits when the seat has; and
a step that goes from one folder, for an image of it is dirty, goes from all.
"""

from __future__ import annotations

import msgspec

from zerostall.core.candidates import Past  # noqa: TC001 - msgspec reads its fields' types at run time
from zerostall.core.copying import Copy as Copies
from zerostall.core.manifest import RankFacts  # noqa: TC001
from zerostall.core.roll import Save, Spoiled  # noqa: TC001
from zerostall.wire.messages import Failed, Message, Plan, Reached, Refused

# ----------------------------------------------------------------------------------------------- outpost → seat


class Here(Message, frozen=True):
    """The first message: the ranks of this node, and those of them whose trainer is there.

    Attributes:
        apart: this node has a folder of its own.
        drafts: steps that were put there and not committed, said once a connection; `Settle` answers it.
        copies: other nodes keep copies of its ranks' images, as the manager plans it; `Copied` says how far they are.
    """

    world: int
    ranks: tuple[int, ...]
    trains: tuple[int, ...]
    apart: bool = False
    drafts: tuple[int, ...] | None = None
    copies: bool = False


class Sealed(Message, frozen=True):
    """A rank's image is whole, in memory of this node.

    Attributes:
        facts: what the manifest will say of it.
        created: when this rank saved it.
        promise, replace, pin, aside: as in `messages.Sealed`.
    """

    save: Save
    facts: RankFacts
    created: float
    promise: bool = False
    replace: bool = False
    pin: bool = False
    aside: tuple[Past, ...] = ()


class Passed(Message, frozen=True):
    """A rank goes on without that save; fields as in `messages.Passed`."""

    rank: int
    save: Save
    reason: str
    skipped: bool


class Revoked(Message, frozen=True):
    """A rank's image is dirty after all.

    Attributes:
        save: None where it is in memory no longer.
    """

    rank: int
    save: Save | None
    past: Past
    reason: str


class Began(Message, frozen=True):
    """A rank has agreed with all others where to go on from."""

    rank: int
    epoch: int


class Found(Message, frozen=True):
    """A rank's trainer is there."""

    rank: int


class Lost(Message, frozen=True):
    """A rank's trainer is gone."""

    rank: int
    reason: str


class Promise(Message, frozen=True):
    """A rank waits for its image in `tier`.

    Attributes:
        save: None where it is in memory no longer.
    """

    rank: int
    past: Past
    save: Save | None
    tier: str


class Written(Message, frozen=True):
    """The images of this node's ranks are in the folder that `Write` named; or they are not, and why."""

    save: Save
    failure: Refused | None = None


class RankCopies(msgspec.Struct, frozen=True):
    """How the copies of a rank's image stand, and how many bytes of the rank's images went to other nodes, ever."""

    rank: int
    copy: Copies
    given: int = 0


class Copied(Message, frozen=True):
    """How far the copies of the save are that is on its way to other nodes; None: none is, as far as is known here."""

    save: Save | None
    ranks: tuple[RankCopies, ...]


# ----------------------------------------------------------------------------------------------- seat → outpost


class Clean(Message, frozen=True):
    """Every rank has sealed the save.

    Attributes:
        created: when rank 0 saved it, which is how all call it.
    """

    save: Save
    created: float
    metric: float | None = None


class Verdict(Message, frozen=True):
    """Saves that can never be clean; and, unless it is 0, the step before which all skip."""

    spoiled: tuple[Spoiled, ...] = ()
    hold: int = 0


class Awaiting(Message, frozen=True):
    """A save is not clean yet: these ranks have said nothing of it. `quiet`: it is early to say so in a log."""

    save: Save
    ranks: tuple[int, ...]
    quiet: bool = False


class Keep(Message, frozen=True):
    """The save goes to disk next: its images stay until `Stored`."""

    save: Save


class Write(Message, frozen=True):
    """Write the images of the save into this folder, one of those below the run's.

    Attributes:
        aside: where a node has a folder of its own, set these committed steps in it aside first.
    """

    save: Save
    folder: str
    aside: tuple[Past, ...] = ()


class Commit(Message, frozen=True):
    """The save is committed on disk: commit what was written of it into a folder of this node's own.

    Attributes:
        manifest: the file.
    """

    save: Save
    manifest: bytes
    pin: bool = False


class Settle(Message, frozen=True):
    """Of the drafts that `Here` told of, those that these manifests speak of are committed; others never will be.

    Attributes:
        unsure: steps of which the seat cannot read the manifest just now: what was put of them stays.
    """

    manifests: tuple[bytes, ...]
    unsure: tuple[int, ...] = ()


class Ask(Message, frozen=True):
    """Which of these steps has a node with a folder of its own committed? Of them rank 0's node has drafts, for another
    one was that when they were put. `Known` answers it.
    """

    steps: tuple[int, ...]


class Known(Message, frozen=True):
    """The manifests of those that are committed there."""

    manifests: tuple[bytes, ...]


class Stored(Message, frozen=True):
    """The save is committed on disk; or it is not, and why."""

    save: Save
    failure: Refused | None = None


class Copy(Message, frozen=True):
    """This save is on its way to the nodes that keep copies, and that one they all have; see `core.copying`."""

    current: Save | None
    safe: Save | None


class ToRank(Message, frozen=True):
    """What a rank that waits for an image of its own is to hear."""

    rank: int
    message: Reached | Failed


# ------------------------------------------------------------------------------------------------------- either way


class Evicted(Message, frozen=True):
    """A committed step is no more in a node's own folder, for an image of it is dirty after all.

    Attributes:
        past: by when rank 0 saved it.
    """

    past: Past


FromOutpost = (
    Here | Sealed | Passed | Revoked | Began | Found | Lost | Promise | Plan | Written | Copied | Evicted | Known
)
FromSeat = Clean | Verdict | Awaiting | Plan | Keep | Write | Commit | Stored | Settle | Copy | ToRank | Evicted | Ask
