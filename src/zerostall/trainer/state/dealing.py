"""Which of a rank's tensors it stores: all ranks say what they have, and each decides for itself.

What several ranks have alike each stores a share of. That it is alike is proved once, before the first image with such
a share: every rank takes checksums of what it has, and they are compared.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from zerostall import native
from zerostall.core import partition
from zerostall.core.partition import Offer, Partition, Row, Shared, Stand
from zerostall.errors import FormatError, StateError
from zerostall.trainer.state import tensors, writes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerostall.core.cuts import Cut
    from zerostall.trainer.state.sharded import Sharding
    from zerostall.trainer.state.tensors import Holder
    from zerostall.trainer.world import World

_Sums: TypeAlias = dict[str, int]
_Digests: TypeAlias = list[tuple[bytes, bytes]]
_LISTED = 20


class Dealing:
    """Keeps what was decided for as long as this rank has the same to offer.

    A decision and a proof are exchanges: every rank comes to them at the same save.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._stand: Stand | None = None
        self._partition: Partition | None = None
        self._proved: set[tuple[str, tuple[int, ...]]] = set()

    def deal(
        self, rows: Sequence[tuple[Row, Sharding]], aliases: Sequence[tuple[str, str]], holders: Mapping[str, Holder]
    ) -> Partition:
        """Decide what this rank stores. `rows` have no way yet; `aliases` are other names of rows.

        Raises:
            StateError: the ranks' states do not make one; or what they should have alike is not. On every rank.
            WaitTimeoutError: a rank does not come to the exchange.
        """
        offer, stand = _offer(rows, aliases)
        if self._partition is None or stand != self._stand:
            self._partition = self._agree(offer, stand)
            self._stand = stand
            self._prove(self._partition.shared, holders)
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

    def _prove(self, groups: Sequence[Shared], holders: Mapping[str, Holder]) -> None:
        """Compare checksums of what ranks should have alike. An exchange for all ranks, whether they share or not."""
        sums: dict[Shared, _Sums] = {}
        for group in groups:
            names = [name for name in group.names if (name, group.ranks) not in self._proved]
            sums[group] = {name: checksum(holders[name]) for name in names}
        digests: _Digests = [(_key(group), _digest(found)) for group, found in sums.items()]
        said = self._world.gather(msgspec.msgpack.encode(digests), what="save: checksums of what is alike")
        different: dict[bytes, set[bytes]] = {}
        for data in said:
            for key, digest in _decoded(data, _Digests):
                different.setdefault(key, set()).add(digest)
        odd = {key for key, digests in different.items() if len(digests) > 1}
        if odd:
            self._tell({group: found for group, found in sums.items() if _key(group) in odd})
        self._proved = {(name, group.ranks) for group in groups for name in group.names}

    def _tell(self, mine: Mapping[Shared, _Sums]) -> None:
        """Find out, with all other ranks, which tensors differ; raises."""
        merged: _Sums = {}
        for found in mine.values():
            merged.update(found)
        said = self._world.gather(msgspec.msgpack.encode(merged), what="save: what is not alike")
        every = [_decoded(data, _Sums) for data in said]
        lines: list[str] = []
        for group, found in mine.items():
            for name in found:
                kinds: dict[int, list[int]] = {}
                for rank in group.ranks:
                    kinds.setdefault(every[rank].get(name, -1), []).append(rank)
                if len(kinds) > 1:
                    sides = sorted(kinds.values(), key=len, reverse=True)
                    lines.append(f"{name}: " + ", others on ".join(partition.listed(side) for side in sides))
        if not lines:
            lines = ["see the error on the ranks that share it"]
        more = f"\n  and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
        raise StateError(
            "these ranks should hold the same and do not:\n  " + "\n  ".join(lines[:_LISTED]) + more,
            hint="find out why they differ; what is meant to differ goes into zerostall.RankLocal(...)",
        )


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


def checksum(holder: Holder) -> int:
    """CRC-32C of a tensor's own elements, in their order."""
    own = tensors.own(holder)
    if isinstance(own, torch.Tensor):
        bits = writes.as_bits(own).contiguous().cpu()
        return native.crc32c_memory(bits.data_ptr(), bits.nbytes) if bits.nbytes else 0
    return native.crc32c(own.tobytes())


def _key(group: Shared) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode((group.ranks, group.names))).digest()[:16]


def _digest(sums: _Sums) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(sorted(sums.items()))).digest()[:16]


def _decoded(data: bytes, kind: object):
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise FormatError(f"another rank sent what are no checksums: {error}") from None
