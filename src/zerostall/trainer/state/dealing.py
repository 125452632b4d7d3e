"""Which of a rank's tensors it stores: all ranks say what they have, and each decides for itself.

What several ranks have alike each stores a share of. That it is alike is proved once, before the first image with such
a share is sealed (`proving`).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import partition
from zerostall.core.partition import Offer, Partition, Row, Shared, Stand
from zerostall.trainer.state.proving import Proof

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from zerostall.core.cuts import Cut
    from zerostall.trainer.state.sharded import Sharding
    from zerostall.trainer.state.tensors import Holder
    from zerostall.trainer.world import World


class Dealing:
    """Keeps what was decided for as long as this rank has the same to offer.

    A decision is an exchange: every rank comes to it at the same save.

    Attributes:
        proof: of what was decided last.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._stand: Stand | None = None
        self._partition: Partition | None = None
        self._proved: set[tuple[str, tuple[int, ...]]] = set()
        self._proofs = 0
        self.proof: Proof | None = None

    def deal(
        self,
        rows: Sequence[tuple[Row, Sharding]],
        aliases: Sequence[tuple[str, str]],
        holders: Mapping[str, Holder],
        guarded: Collection[str],
    ) -> Partition:
        """Decide what this rank stores. `rows` have no way yet; `aliases` are other names of rows.

        Args:
            guarded: names of those that only an optimizer's step changes.

        Raises:
            StateError: the ranks' states do not make one. On every rank.
            WaitTimeoutError: a rank does not come to the exchange.
        """
        offer, stand = _offer(rows, aliases)
        if self._partition is None or stand != self._stand:
            self._partition = self._agree(offer, stand)
            self._stand = stand
            self.proof = self._prove(self._partition.shared, holders, guarded)
        return self._partition

    def _agree(self, offer: Offer, stand: Stand) -> Partition:
        world = self._world
        said = world.gather(partition.encode_stand(stand), what="save: who has what")
        stands = [partition.decode_stand(data) for data in said]
        speakers = partition.speakers(stands)
        mine = offer.encode() if speakers[stand.offer] == world.rank else b""
        offers: dict[bytes, Offer] = {}
        for data in filter(None, world.gather(mine, what="save: what is offered")):
            offers[hashlib.sha256(data).digest()] = partition.decode_offer(data)
        return partition.decide(world.rank, stands, offers)

    def _prove(self, groups: Sequence[Shared], holders: Mapping[str, Holder], guarded: Collection[str]) -> Proof:
        """Every rank makes one, whether it shares or not. What was proved before need not be again."""
        new = [(group, [name for name in group.names if (name, group.ranks) not in self._proved]) for group in groups]
        self._proved = {(name, group.ranks) for group in groups for name in group.names}
        self._proofs += 1
        return Proof(self._world.aside(f"proof/{self._proofs}"), new, holders, guarded, self.proof)


def _offer(rows: Sequence[tuple[Row, Sharding]], aliases: Sequence[tuple[str, str]]) -> tuple[Offer, Stand]:
    """What this rank has, and where it stands in it."""
    ways: dict[tuple[tuple[Cut, ...], tuple[int, ...], tuple[int, ...]], int] = {}
    found: list[Row] = []
    for row, sharding in rows:
        # A rank outside of a tensor's mesh does not know how it is cut; it has nothing to say of it.
        if sharding.indexes is None:
            continue
        key = (sharding.cuts, sharding.indexes, sharding.axes)
        found.append(msgspec.structs.replace(row, way=ways.setdefault(key, len(ways))))
    found.sort(key=lambda row: row.name)
    offer = Offer(tuple(cuts for cuts, _, _ in ways), tuple(found), tuple(sorted(aliases)))
    return offer, Stand(offer.digest, tuple(indexes for _, indexes, _ in ways))
