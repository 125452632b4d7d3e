"""What trainers, their agent and its vaults say of images in another GPU's memory.

A *vault* is a process of the agent that lends memory of one GPU; a *locker* is what one rank has of it: one or two
places for an image.

    trainer → agent   Rent  NoUse                  agent → trainer   Locker  NoLocker  Drained   (all events)
    agent → vault     Lend  TakeBack  Show  Hide  Drain  Mirror  ShowFile  HideFile  Write
    vault → agent     Ready  Opened  Declined  Emptied  Mirrored  Stuck  Written  NotStraight  Slow  Closed
"""

from __future__ import annotations

import msgspec

from zerostall.wire.message import Message


class Stowed(msgspec.Struct, frozen=True):
    """Where the part of an image lies that was on a device.

    Attributes:
        locker: the key of the locker.
        place: which of its places.
        runs: offset in the image and size of what is there, rising.
        samples: offset, size and CRC-32C of what the device itself has looked at of it when it was captured.
    """

    locker: int
    place: int
    runs: tuple[tuple[int, int], ...]
    samples: tuple[tuple[int, int, int], ...] = ()


class Kept(msgspec.Struct, frozen=True):
    """Where the part of an image that was on a device still lies, beside the whole of it in host memory.

    Attributes:
        gpu: in whose memory.
        handle: CUDA's, for `cuIpcOpenMemHandle`.
        offset: where the image begins there.
        runs: as in `Stowed`.
    """

    gpu: str
    handle: bytes
    offset: int
    runs: tuple[tuple[int, int], ...]


# ---------------------------------------------------------------------------------------------- trainer → agent


class Rent(Message, frozen=True):
    """Asks for a locker for images of `nbytes` in the memory of that GPU, until it is asked for another.

    Answered by `Locker` or `NoLocker` when that is known, and again whenever it changes.

    Attributes:
        mirror: the GPU in whose memory a second copy of each is to be; "" for none. Nothing is answered for it.
    """

    gpu: str
    nbytes: int
    mirror: str = ""


class NoUse(Message, frozen=True):
    """The trainer cannot use that locker."""

    locker: int
    reason: str


# ---------------------------------------------------------------------------------------------- agent → trainer


class Locker(Message, frozen=True):
    """Memory of another GPU.

    Attributes:
        handle: CUDA's, for `cuIpcOpenMemHandle`.
        stride: bytes from one place to the next.
    """

    key: int
    gpu: str
    handle: bytes
    stride: int
    places: int


class NoLocker(Message, frozen=True):
    """There is none, or none any more (`key` says which, 0: there was none)."""

    key: int
    reason: str


class Drained(Message, frozen=True):
    """What was stowed of a step is in its slot of host memory, and this is the record, with checksums."""

    slot: int
    step: int
    created: float
    record: bytes


# ---------------------------------------------------------------------------------------------- agent → vault


class Lend(Message, frozen=True):
    """Make a locker of up to `places` places of `stride` bytes; answered by `Opened` or `Declined`."""

    key: int
    stride: int
    places: int


class TakeBack(Message, frozen=True):
    """Free the locker; nobody captures into it any more, or what comes of that counts for nothing."""

    key: int


class Show(Message, frozen=True):
    """A segment of host memory, whose descriptor is beside the message, for `Drain` to name."""

    key: int
    nbytes: int
    stride: int


class Hide(Message, frozen=True):
    """That segment is drained into no longer."""

    key: int


class Drain(Message, frozen=True):
    """Bring an image to where the rest of it lies; answered by `Emptied` or `Stuck` with this id."""

    id: int
    locker: int
    place: int
    memory: int
    offset: int
    nbytes: int
    chunk_bytes: int
    runs: tuple[tuple[int, int], ...]
    samples: tuple[tuple[int, int, int], ...] = ()


class Mirror(Message, frozen=True):
    """Copy what lies in another vault's memory, at `offset` of what `handle` opens, to a place of that locker.

    Answered by `Mirrored` or `Stuck` with this id.
    """

    id: int
    locker: int
    place: int
    handle: bytes
    offset: int
    runs: tuple[tuple[int, int], ...]


class ShowFile(Message, frozen=True):
    """A file to write, whose descriptor is beside the message, for `Write` to name; its flags are the vault's alone."""

    key: int


class HideFile(Message, frozen=True):
    """Nothing more is written to that file."""

    key: int


class Write(Message, frozen=True):
    """Write whole chunks of an image to their place in that file, straight from a place of that locker.

    Answered by `Written`, `NotStraight` or `Stuck` with this id, perhaps after what was ordered later.

    Attributes:
        memory, offset: where the whole image lies in host memory.
        first, checksums: the first of these chunks, and of each the CRC-32C.
        missing: offset in the image and size of what of them is in host memory alone, rising.
    """

    id: int
    file: int
    locker: int
    place: int
    memory: int
    offset: int
    chunk_bytes: int
    first: int
    checksums: tuple[int, ...]
    missing: tuple[tuple[int, int], ...]


# ---------------------------------------------------------------------------------------------- vault → agent


class Ready(Message, frozen=True):
    """The vault has its GPU."""

    name: str
    budget: int


class Opened(Message, frozen=True):
    key: int
    handle: bytes
    places: int


class Declined(Message, frozen=True):
    key: int
    reason: str


class Emptied(Message, frozen=True):
    """All is in host memory.

    Attributes:
        checksums: CRC-32C of each chunk of the whole image.
        ghosts: offsets of samples that arrived as other bytes than the device held.
    """

    id: int
    checksums: tuple[int, ...]
    seconds: float
    ghosts: tuple[int, ...] = ()


class Mirrored(Message, frozen=True):
    """All is in the other place, too."""

    id: int


class Stuck(Message, frozen=True):
    id: int
    reason: str


class Written(Message, frozen=True):
    """It is in the file, and not synced."""

    id: int


class NotStraight(Message, frozen=True):
    """Files do not go straight from this GPU's memory, nor will they.

    Attributes:
        fallback: somebody wanted them to.
    """

    id: int
    reason: str
    fallback: bool


class Slow(Message, frozen=True):
    """The vault does it in a slower way."""

    reason: str


class Closed(Message, frozen=True):
    """The vault ends."""

    reason: str


ToVault = Lend | TakeBack | Show | Hide | Drain | Mirror | ShowFile | HideFile | Write
FromVault = Ready | Opened | Declined | Emptied | Mirrored | Stuck | Written | NotStraight | Slow | Closed
