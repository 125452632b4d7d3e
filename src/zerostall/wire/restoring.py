"""What a restore asks of the agent: which copies there are, what they hold, and their bytes.

trainer → agent   Find  Describe  Quote  Fetch  Common  Take  Release
agent → trainer   Found  Described  Quoted  Fetched  Opened  InCommon  Coming  Arrived
"""

from __future__ import annotations

import msgspec

from zerostall.wire.attaching import Lent
from zerostall.wire.lockers import Kept
from zerostall.wire.message import Message


class Find(Message, frozen=True):
    """Which copies of which steps are there?"""

    id: int


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


class Describe(Message, frozen=True):
    """What do the images of all ranks hold at `step` in `tier`?"""

    id: int
    step: int
    tier: str


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


class Quote(Message, frozen=True):
    """What do the records of these ranks say, of the step that was described as `created` then?"""

    id: int
    step: int
    tier: str
    created: float
    ranks: tuple[int, ...]


class Quoted(Message, frozen=True):
    """The records of the ranks that were asked for, in that order."""

    id: int
    records: tuple[bytes, ...]


class Fetch(Message, frozen=True):
    """Bring an image of `step` from `tier` into memory that the trainer can map, and hold it there.

    Attributes:
        rank: whose image; None is the trainer's own.
        chunks: only these chunks of it are looked at; None: the whole image, and its layout and record with it.
        as_file: each byte is read once, in any order. Where all of it is a file here, that is wanted, not memory, and
            `chunks` of it will be read then; what is in a store comes chunk by chunk.
    """

    id: int
    step: int
    tier: str
    rank: int | None = None
    chunks: tuple[int, ...] | None = None
    as_file: bool = False


class Fetched(Message, frozen=True):
    """The image lies at `offset` of a segment.

    Attributes:
        layout, record: of the image; empty where chunks were asked for, for the trainer knows them.
        passing: the segment goes when it is released; otherwise it is this rank's memory.
        verified: its bytes were checked against the record while they were read.
        kept: where part of it lies in other GPUs' memory, too.
        source: the tier that it came from, where that is not the one that was asked: "partner", a disk of another node.
    """

    id: int
    memory: Lent
    offset: int
    passing: bool
    layout: bytes
    record: bytes
    verified: bool
    kept: tuple[Kept, ...] = ()
    source: str = ""


class Opened(Message, frozen=True):
    """The image is a file, whose descriptor comes beside the message; the step stays there until it is released.

    Attributes:
        path: the file's, to speak of it.
        layout, record: of the image; empty where chunks were asked for, for the trainer knows them.
    """

    id: int
    path: bytes
    layout: bytes
    record: bytes


class Common(Message, frozen=True):
    """Of the chunks of an opened image that are to be read: which do others of this node want, too?

    Asked once all ranks of the node have said which chunks they want. Those are then fetched into memory, where they
    are read once for all; the others are the client's to read.
    """

    id: int
    step: int
    tier: str
    rank: int


class InCommon(Message, frozen=True):
    """Those chunks, rising."""

    id: int
    chunks: tuple[int, ...]


class Coming(Message, frozen=True):
    """The chunks of the image come to places in a segment, which are all of one size, and fewer than the chunks may be.

    The segment is the same for all images that the trainer has not released.

    Attributes:
        layout, record: of the image; empty where chunks were asked for, for the trainer knows them.
    """

    id: int
    memory: Lent
    place_bytes: int
    layout: bytes
    record: bytes


class Take(Message, frozen=True):
    """What has come of all that was fetched and is `Coming`? Answered when something has.

    Asked once all ranks of the node have said which chunks they want: each is then read once for all of them.

    Attributes:
        taken: places whose chunks the trainer was told of, and needs no longer.
    """

    id: int
    taken: tuple[int, ...] = ()


class Arrival(msgspec.Struct, frozen=True):
    """A chunk of a rank's image is in that place, was checked, and stays there until the trainer has taken it."""

    rank: int
    chunk: int
    place: int


class Arrived(Message, frozen=True):
    """What has come that the trainer was not told of; nothing: all has come before."""

    id: int
    chunks: tuple[Arrival, ...]


class Release(Message, frozen=True):
    """The trainer has read what it fetched.

    Attributes:
        damaged: why it was of no use, if it was not what its checksums say.
    """

    damaged: str = ""
