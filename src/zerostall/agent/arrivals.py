"""Chunks of images on their way from a store to this node's trainers: each read once, through a few places in memory.

Trainers say which chunks of which images they want. Once one asks what has come, reading begins, several chunks at
a time. One that has come, and is what its checksum says, is told to all who want it, and its place is free when all
have taken it from there. So the memory is bounded, whatever the images' size, and nobody waits for a whole image.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.agent.refusing import ours
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.layout import CHUNK
from zerostall.errors import AgentError, FormatError, StorageError
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from zerostall.agent.client import Client
    from zerostall.agent.loop_call import Post
    from zerostall.flow.governor import Governor
    from zerostall.flow.worker import Worker
    from zerostall.tiers.remote import RemoteTier
    from zerostall.tiers.remote_images import RemoteImage

PLACES = 16
"""Chunks in memory at once: twice what is read at once, so that some come while others are taken. A chunk of more than
16 MiB, as another writer may make them, takes several places that follow each other.
"""

_Key = tuple[int, int, int]  # step, rank, chunk


@dataclass(slots=True, eq=False)
class _Place:
    """Where a chunk is, or is to be; and who wants it and has not taken it.

    Attributes:
        number: the first of its places.
        count: how many it takes.
    """

    number: int
    count: int
    clients: set[Client]


@dataclass(slots=True, eq=False)
class _Taker:
    """One trainer.

    Attributes:
        waiting: the chunks that it wants, and that have not come.
        come: those that have, and of which it was not told.
        told: where those are that it was told of and has not taken.
        asking: the id of its request for more, which is to be answered.
        error: why it gets no more.
    """

    waiting: set[_Key] = field(default_factory=set)
    come: list[m.Arrival] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    asking: int | None = None
    error: Exception | None = None


class Arrivals:
    """Those of one run. Driven by the agent's loop; what reads comes back through `post`.

    Args:
        steps: those that are being read: one entry for each request.
        reader: looks for what is to be read, and gives memory back.
    """

    def __init__(self, steps: list[int], post: Post, governor: Governor, reader: Worker) -> None:
        self._steps = steps
        self._post = post
        self._governor = governor
        self._reader = reader
        self._users = 0
        self._images: dict[tuple[int, int], RemoteImage] = {}
        self._memory: native.Segment | None = None
        self._free: set[int] = set()
        self._takers: dict[Client, _Taker] = {}
        self._wanted: dict[_Key, set[Client]] = {}  # and not begun
        self._flying: dict[_Key, _Place] = {}
        self._there: dict[_Key, _Place] = {}

    def open(
        self, client: Client, rank: int, remote: RemoteTier, request: m.Fetch, otherwise: Callable[[], None]
    ) -> None:
        """Have chunks of an image come to the client.

        Where they are larger than all memory that others are using for theirs, `otherwise` is called, on the loop.
        """
        self._users += 1
        self._steps.append(request.step)
        held = contextlib.ExitStack()
        held.enter_context(self._governor.restoring())
        claim = client.claim()

        def let_go() -> None:
            self._steps.remove(request.step)
            held.close()
            self._users -= 1
            if self._users == 0:
                self._images.clear()
                self._give_back()

        def done() -> None:
            self._leave(client)
            let_go()

        def refuse(error: Exception) -> None:
            let_go()
            client.send(m.Refused.of(request.id, ours(error, remote.where)))

        def begin(image: RemoteImage) -> None:
            if not claim.stands():
                let_go()
                return
            if self._memory is not None and _places(image) > self._memory.nbytes // CHUNK:
                let_go()
                otherwise()
                return
            try:
                answer, memory = self._expected(client, rank, request, image)
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                refuse(error)
                return
            claim.settle(answer, memory.fileno(), done)

        def look() -> None:
            key = request.step, rank
            try:
                # Nobody forgets it before this client is done.
                image = self._images.get(key) or remote.image(*key)
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                self._post(partial(refuse, error))
            else:
                self._images[key] = image
                self._post(lambda: begin(image))

        self._reader.submit(look)

    def take(self, client: Client, request: m.Take) -> None:
        """Answer with what has come for the client, once something has.

        Raises:
            AgentError: it has asked for nothing here. Another agent was asked, or this one when the connection broke.
            FormatError: it says that it has taken what it never was told of.
        """
        taker = self._takers.get(client)
        if taker is None:
            raise AgentError("nothing is on its way to this trainer: what was has gone with the connection before")
        if taker.asking is not None or not taker.told.issuperset(request.taken):
            raise FormatError("Take: that chunk is not there, or is not on its way")
        taker.told.difference_update(request.taken)
        for key in [key for key, place in self._there.items() if place.number in request.taken]:
            self._let_go(key, client)
        taker.asking = request.id
        self._answer(client, taker)
        self._read_on()

    # ------------------------------------------------------------------------------------------- what is wanted

    def _expected(
        self, client: Client, rank: int, request: m.Fetch, image: RemoteImage
    ) -> tuple[m.Coming, native.Segment]:
        layout, record = image.stored.layout, image.stored.record
        every = range(len(record.checksums))
        if not all(chunk in every for chunk in request.chunks or ()):
            raise FormatError(f"the image of rank {rank} at step {request.step} has no chunk so numbered")
        if self._memory is None:
            places = max(PLACES, _places(image))
            self._memory = native.Segment("zerostall-arrivals", places * CHUNK, populate=False)
            self._free = set(range(places))
        known = request.chunks is not None
        answer = m.Coming(
            id=request.id,
            memory=m.Lent(0, self._memory.nbytes),
            place_bytes=CHUNK,
            layout=b"" if known else layouts.encode(layout),
            record=b"" if known else manifests.encode_record(record),
        )
        taker = self._takers.setdefault(client, _Taker())
        for chunk in every if request.chunks is None else request.chunks:
            self._want(client, taker, (request.step, rank, chunk))
        return answer, self._memory

    def _want(self, client: Client, taker: _Taker, key: _Key) -> None:
        if (there := self._there.get(key)) is not None:
            if client not in there.clients:
                there.clients.add(client)
                taker.come.append(m.Arrival(key[1], key[2], there.number))
            return
        taker.waiting.add(key)
        flying = self._flying.get(key)
        (self._wanted.setdefault(key, set()) if flying is None else flying.clients).add(client)

    def _leave(self, client: Client) -> None:
        """The client wants nothing any more."""
        taker = self._takers.pop(client, None)
        if taker is not None:
            self._stop(client, taker)
            for key in [key for key, place in self._there.items() if client in place.clients]:
                self._let_go(key, client)
        self._read_on()

    def _stop(self, client: Client, taker: _Taker) -> None:
        """Read nothing more for it. It may still be at work on what it was told of."""
        for key in taker.waiting:
            clients = self._wanted.get(key)
            if clients is None:
                self._flying[key].clients.discard(client)
                continue
            clients.discard(client)
            if not clients:
                del self._wanted[key]
        taker.waiting.clear()
        untold = {one.place for one in taker.come}
        for key in [key for key, place in self._there.items() if place.number in untold]:
            self._let_go(key, client)
        taker.come.clear()

    def _let_go(self, key: _Key, client: Client) -> None:
        place = self._there[key]
        place.clients.discard(client)
        if not place.clients:
            del self._there[key]
            self._free_again(place)

    def _free_again(self, place: _Place) -> None:
        self._free.update(range(place.number, place.number + place.count))

    # ------------------------------------------------------------------------------------------------- reading

    def _read_on(self) -> None:
        """Begin to read as many chunks as there are places for, in their order: none is passed over."""
        while self._memory is not None and self._wanted:
            key = next(iter(self._wanted))
            image = self._images[key[:2]]
            _, nbytes = image.stored.record.extent(key[2])
            count = _counted(nbytes)
            number = _gap(self._free, count)
            if number is None:
                return
            place = _Place(number, count, self._wanted.pop(key))
            self._free.difference_update(range(number, number + count))
            self._flying[key] = place
            try:
                future = image.begin(key[2], self._memory.view(place.number * CHUNK, nbytes))
            except RuntimeError as error:
                closed = StorageError(f"the store is being let go of: {error}")
                self._post(partial(self._come, key, closed))
                continue
            future.add_done_callback(lambda future, key=key: self._post(partial(self._come, key, _problem(future))))

    def _come(self, key: _Key, error: Exception | None) -> None:
        """A chunk is there, or it is not to be had."""
        place = self._flying.pop(key)
        if place.clients and error is None:
            self._there[key] = place
        else:
            self._free_again(place)
        for client in list(place.clients):
            taker = self._takers[client]
            taker.waiting.discard(key)
            if error is None:
                taker.come.append(m.Arrival(key[1], key[2], place.number))
            elif taker.error is None:
                taker.error = error
                self._stop(client, taker)
            self._answer(client, taker)
        self._read_on()
        self._give_back()

    def _answer(self, client: Client, taker: _Taker) -> None:
        if taker.asking is None:
            return
        if taker.error is not None:
            answer = m.Refused.of(taker.asking, ours(taker.error, "the store"))
        elif taker.come or not taker.waiting:
            answer = m.Arrived(id=taker.asking, chunks=tuple(taker.come))
            taker.told.update(one.place for one in taker.come)
            taker.come.clear()
        else:
            return
        taker.asking = None
        client.send(answer)

    def _give_back(self) -> None:
        """Let go of the memory when nobody needs it, and nobody is writing there."""
        if self._users == 0 and not self._flying and self._memory is not None:
            self._reader.submit(self._memory.close)
            self._memory = None


def _counted(nbytes: int) -> int:
    """How many places so many bytes take."""
    return max(1, -(-nbytes // CHUNK))


def _places(image: RemoteImage) -> int:
    """How many its largest chunk takes."""
    record = image.stored.record
    return _counted(min(record.chunk_bytes, record.nbytes))


def _gap(free: set[int], count: int) -> int | None:
    """The first of `count` free places that follow each other."""
    return next((one for one in sorted(free) if all(one + k in free for k in range(count))), None)


def _problem(future: Future[None]) -> Exception | None:
    """What went wrong, as far as it is known."""
    if future.cancelled():
        return StorageError("the store is being let go of")
    error = future.exception()
    return error if error is None or isinstance(error, Exception) else AgentError(f"reading ended: {error!r}")
