"""Carrying one image into a store, in parts of whole chunks, each checked before it is sent.

Three ways. `S3Uploads` speaks to S3 and what is like it in its own words: each part goes with the CRC-32C that the
record has of it, which the store checks; an upload that broke off is taken up where it was, also by another process,
for the store tells which parts it has; uploads that nobody takes up can be found and thrown away. `AzureUploads` takes
up what broke off likewise. `PlainUploads` leaves it to obstore, which knows every kind of store, and neither takes up
nor lists uploads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING, Protocol, TypeVar

from zerostall.core import upload_parts
from zerostall.errors import StorageError
from zerostall.tiers.image_bytes import checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Executor, Future

    from zerostall.core.manifest import Record
    from zerostall.core.upload_parts import Part
    from zerostall.tiers.azure import Azure
    from zerostall.tiers.contract import ImageBytes
    from zerostall.tiers.s3 import S3
    from zerostall.tiers.store import Store

_NAME = 32
"""Characters of a block's name: as many as obstore's."""

AT_ONCE = 4
"""Parts in flight: at 16 MiB each enough to fill a connection of 10 Gbit/s a hundred milliseconds away."""

Gate = Callable[[int], None]
"""Called with a number of bytes before they are sent or read; returns when they may be, or raises to break off."""


class Uploads(Protocol):
    """How images get into a store."""

    def upload(self, name: str, source: ImageBytes, record: Record, gate: Gate) -> int:
        """Store an image under `name`, whole or not at all; the bytes that had to be sent.

        Raises:
            CorruptError: the source fails a checksum; nothing of that part was sent.
            StorageError: the store refused. Trying again goes on from what is there already, where that is possible.
        """
        ...

    def forget(self, below: str, *, older: float) -> list[str]:
        """Throw away uploads below a name that broke off more than `older` seconds ago; their names."""
        ...

    def close(self) -> None:
        """Let go of connections."""


class PlainUploads:
    """Through obstore. What broke off is thrown away at once, but for a process that dies (see docs/remote.md)."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def upload(self, name: str, source: ImageBytes, record: Record, gate: Gate) -> int:
        cuts = upload_parts.cut(record.nbytes, record.chunk_bytes, record.checksums)

        def pieces() -> Iterator[bytes]:
            for part in cuts:
                gate(part.nbytes)
                yield bytes(checked(source, record, part.chunks))  # obstore keeps it until it is sent

        self._store.upload(name, pieces(), piece_bytes=cuts[0].nbytes, at_once=AT_ONCE)
        return record.nbytes

    def forget(self, below: str, *, older: float) -> list[str]:
        return []

    def close(self) -> None:
        pass


class S3Uploads:
    """In S3's own words."""

    def __init__(self, store: Store, s3: S3, hands: Executor) -> None:
        self._store = store
        self._s3 = s3
        self._hands = hands

    def upload(self, name: str, source: ImageBytes, record: Record, gate: Gate) -> int:
        cuts = upload_parts.cut(record.nbytes, record.chunk_bytes, record.checksums)
        key = self._store.key(name)
        if len(cuts) == 1:
            gate(record.nbytes)
            self._s3.put(key, checked(source, record, cuts[0].chunks), record.checksum)
            return record.nbytes
        upload = self._s3.find_upload(key) or self._s3.begin(key)
        there = self._s3.parts(key, upload)
        tags = {
            part.number: stored.e_tag
            for part in cuts
            if (stored := there.get(part.number))
            and stored.holds(part, lambda part=part: checked(source, record, part.chunks))
        }
        missing = [part for part in cuts if part.number not in tags]

        def send(part: Part) -> str:
            gate(part.nbytes)
            view = checked(source, record, part.chunks)
            return self._s3.put_part(key, upload, part.number, view, part.checksum)

        tags |= _all(self._hands, send, missing)
        with _may_be_there(self._store, name, record.nbytes):
            self._s3.complete(key, upload, [(tags[part.number], part.checksum) for part in cuts], record.checksum)
        return sum(part.nbytes for part in missing)

    def forget(self, below: str, *, older: float) -> list[str]:
        gone = []
        for key, upload, begun in self._s3.uploads(self._store.key(below)):
            if time.time() - begun >= older:
                self._s3.abort(key, upload)
                gone.append(key)
        return gone

    def close(self) -> None:
        self._s3.close()


class AzureUploads:
    """In Azure's own words. A part is a block, whose name says its number and its CRC-32C.

    So what the store has of an image that broke off, whoever sent it, is told by names, and the rest is sent. Blocks
    of no blob are Azure's to forget, after a week.
    """

    def __init__(self, store: Store, azure: Azure, hands: Executor) -> None:
        self._store = store
        self._azure = azure
        self._hands = hands

    def upload(self, name: str, source: ImageBytes, record: Record, gate: Gate) -> int:
        cuts = upload_parts.cut(record.nbytes, record.chunk_bytes, record.checksums)
        key = self._store.key(name)
        if len(cuts) == 1:
            gate(record.nbytes)
            self._store.put(name, bytes(checked(source, record, cuts[0].chunks)))
            return record.nbytes
        there = self._azure.blocks(key)
        names = blocks_of(cuts, there)
        missing = [part for part in cuts if there.get(names[part.number]) != part.nbytes]

        def send(part: Part) -> None:
            gate(part.nbytes)
            self._azure.put_block(key, names[part.number], checked(source, record, part.chunks))

        _all(self._hands, send, missing)
        with _may_be_there(self._store, name, record.nbytes):
            self._azure.commit(key, [names[part.number] for part in cuts])
        return sum(part.nbytes for part in missing)

    def forget(self, below: str, *, older: float) -> list[str]:
        return []

    def close(self) -> None:
        self._azure.close()


def blocks_of(cuts: Sequence[Part], there: Iterable[str]) -> dict[int, str]:
    """What the blocks of an image are called, by number. All names of a blob's blocks are to have one length.

    Args:
        there: names of those that an upload left there, of obstore's, maybe.
    """
    length = max((len(name) for name in there), default=_NAME)
    return {part.number: f"{part.number:06d}-{part.checksum:08x}".ljust(length, ".") for part in cuts}


@contextlib.contextmanager
def _may_be_there(store: Store, name: str, nbytes: int) -> Iterator[None]:
    """An upload is ended within. Where that is refused and the image is there all the same, all is well.

    The answer to the first try was lost, or another agent has brought the same image: the parts were gone then.
    """
    try:
        yield
    except StorageError:
        if store.size(name) != nbytes:
            raise


_Sent = TypeVar("_Sent")


def _all(hands: Executor, send: Callable[[Part], _Sent], missing: list[Part]) -> dict[int, _Sent]:
    """Send parts, a few at once; what each gave, by number.

    The first that fails ends it, when those in flight have ended.
    """
    sent: dict[int, _Sent] = {}
    flying: dict[Future[_Sent], Part] = {}
    waiting = iter(missing)
    try:
        while True:
            while len(flying) < AT_ONCE and (part := next(waiting, None)) is not None:
                flying[hands.submit(send, part)] = part
            if not flying:
                return sent
            done, _ = wait(flying, return_when=FIRST_COMPLETED)
            for future in done:
                sent[flying.pop(future).number] = future.result()
    finally:
        for future in flying:
            future.cancel()
        with contextlib.suppress(BaseException):
            wait(flying)
