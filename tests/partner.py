"""What a partner node holds of a rank, as a tier: brought there and read from there by the agents' own connections.

It is committed when the rank's home says that the step is clean, which the manager tells those who look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from images import RUN
from zerostall import native
from zerostall.agent import pulling
from zerostall.agent.afar import Afar
from zerostall.agent.guests import Guests
from zerostall.agent.images import Images
from zerostall.agent.neighbourhood import Neighbourhood
from zerostall.agent.pace import Pace
from zerostall.agent.peers import Given, PeerDoor
from zerostall.core.candidates import Past
from zerostall.core.layout import Layout
from zerostall.core.manifest import Manifest, Record
from zerostall.core.placement import ImageId
from zerostall.errors import SnapshotNotFoundError
from zerostall.flow.budget import Budget
from zerostall.tiers.contract import Image, Stored
from zerostall.tiers.host import HostTier
from zerostall.tiers.image_bytes import MemoryBytes
from zerostall.wire import cluster as w
from zerostall.wire import peers as p

SECRET = "a secret of sixteen or more"
RANK = ImageId(RUN, 0)
_Room = Callable[[Layout, Record], Callable[[int, int], memoryview]]


class Home:
    """Gives the image that the rank has just sealed."""

    image: Image

    @contextlib.contextmanager
    def given(self, image: ImageId, step: int, created: float, chunks: object = None) -> Iterator[Given]:
        yield Given(self.image.layout, self.image.record, "attempt", MemoryBytes(self.image).view)

    def damaged(self, image: ImageId, record: Record, chunk: int) -> None:
        raise AssertionError(f"chunk {chunk} left home damaged")


class Partner:
    """See `contract.Tier`; of one rank of a run of one.

    Attributes:
        doubts: the steps that it no longer trusts.
    """

    name = "replica"

    def __init__(self, pool: native.Pool) -> None:
        self.doubts: list[int] = []
        self._guests = Guests(Budget(1 << 30), pool)
        self._clean: dict[int, float] = {}

        def doubt(image: ImageId, step: int, why: str, *, disk: bool = False) -> None:
            self.doubts.append(step)

        images = Images(cast("Any", []), self._guests, doubt, lambda call: call())
        self._home = Home()
        self._doors = [PeerDoor("127.0.0.1", SECRET, source, Pace(None)) for source in (self._home, images)]
        self._afar = Afar(Neighbourhood("taker", cast("Any", self), cast("Any", self)), RUN)

    def close(self) -> None:
        with ThreadPoolExecutor(2) as hands:  # each looks up twice a second
            list(hands.map(PeerDoor.close, self._doors))
        self._guests.close()

    # -------------------------------------------------------------------------------------------------- verbs

    def put(self, image: Image) -> None:
        self._home.image = image
        record = image.record
        place = self._guests.reserve(RANK, record.world, image.layout)
        assert place is not None
        request = p.Pull(RUN, record.rank, record.step, record.created)
        self.pull(self._doors[0].address, request, lambda layout, record: place.view)
        self._guests.seal(place, record, "attempt")
        self._clean.pop(record.step, None)

    def commit(self, manifest: Manifest, *, replace: bool = False) -> None:
        self._clean[manifest.step] = manifest.created
        past = Past(manifest.step, manifest.created)
        self._guests.offered(RANK, self._guests.images(RANK), (), {past})

    def steps(self) -> list[int]:
        return sorted(past.step for past in self._guests.images(RANK) if past.step in self._clean)

    def manifest(self, step: int) -> Manifest:
        return self._afar.manifest(step)

    def open(self, step: int, rank: int) -> Stored:
        self._afar.manifest(step)
        return self._afar.open(step, rank)

    def get(self, step: int, rank: int, address: int, *, chunks: Sequence[int] | None = None) -> Stored:
        self._afar.manifest(step)
        return self._afar.get(step, rank, address, chunks=chunks)

    def evict(self, step: int) -> None:
        self._clean.pop(step, None)
        self._guests.forget(RANK, step, "attempt")

    def memory_of(self, step: int) -> HostTier:
        """Where the partner has it."""
        tier = self._guests.tier_with(RANK, step)
        assert tier is not None
        return tier

    # ------------------------------------------------------------------- what a node has of others, and of a manager

    def pull(
        self, address: str, request: p.Pull, room: _Room, tries: int = 1, known: dict[str, Layout] | None = None
    ) -> pulling.Pulled:
        return pulling.pull(
            address, "taker", SECRET, request, room, tries=tries, stopping=lambda seconds: False, known=known
        )

    def peek(self, address: str, requests: Iterable[p.Pull], known: dict[str, Layout]) -> Iterator[pulling.Pulled]:
        return pulling.peek(address, "taker", SECRET, requests, known)

    def whereis_all(self, run: str, step: int) -> list[w.LocatedCopy]:
        if run != RUN:
            raise SnapshotNotFoundError(f"there is no run {run}")
        peer = w.Peer("partner", self._doors[1].address)
        return [
            w.LocatedCopy(past.step, "attempt", "replica", peer, past.step in self._clean, 1, past.created)
            for past in self._guests.images(RANK)
            if past.step == step
        ]
