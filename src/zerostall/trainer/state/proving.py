"""The proof that ranks hold alike what they share: in the background of the first save with such a share.

Checksums are of the moment of that save. A device takes those of what lies on it itself, in the order of training's
work, so that nobody waits. What lies in host memory a thread reads, and the guard waits for it as for a capture. Then
that thread exchanges them with all other ranks; no image is sealed before it is through.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from zerostall import native
from zerostall.core import partition
from zerostall.errors import CapacityError, DeviceError, FormatError, StateError, ZerostallError
from zerostall.telemetry import say_once
from zerostall.trainer.state import tensors, writes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from zerostall.core.partition import Shared
    from zerostall.trainer.devices import Devices
    from zerostall.trainer.state.tensors import Holder
    from zerostall.trainer.world import World

_Sums: TypeAlias = dict[str, int]
_Digests: TypeAlias = list[tuple[bytes, bytes]]
_LISTED = 20


class Proof:
    """Made by every rank at the same save, whether it shares anything or not.

    | verb | thread | waits for |
    |---|---|---|
    | begin | training | what others than an optimizer may change: that is read at once |
    | await_read | training, before such a change | what is in host memory |
    | verdict | any | all ranks |

    Args:
        world: the ranks, in exchanges of this proof alone.
        groups: what is shared with whom, and
        names: of which tensors.
        guarded: those that nobody changes before `await_read`.
        before: the proof before this one, of what is not proved again: what it finds holds for this one, too.

    Attributes:
        settled: it is known that all is alike.
        error: why it is not, once that is known.
    """

    def __init__(
        self,
        world: World,
        groups: Sequence[tuple[Shared, Sequence[str]]],
        holders: Mapping[str, Holder],
        guarded: Collection[str],
        before: Proof | None = None,
    ) -> None:
        self.settled = False
        self.error: ZerostallError | None = None
        self._world = world
        self._groups = [(group, tuple(names)) for group, names in groups]
        # Of now: what training puts in their place later is not what is saved.
        self._views = {name: _bits(holders[name]) for _, names in groups for name in names}
        self._guarded = guarded
        self._before = before
        self._sums: _Sums = {}
        self._probes: list[tuple[native.Probe, list[str]]] = []
        self._begun = False
        self._read = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerostall proof", daemon=True)

    def begin(self, devices: Devices) -> None:
        """See the table. Once is enough: the same state may be looked at again."""
        if self._begun:
            return
        self._begun = True
        on_devices: dict[int, list[str]] = {}
        for name, view in self._views.items():
            if view.is_cuda and view.is_contiguous() and view.numel():
                on_devices.setdefault(view.get_device(), []).append(name)
            elif view.is_cuda or name not in self._guarded:
                self._sums[name] = checksum(view)
        for ordinal, names in on_devices.items():
            if not self._have_looked(devices, ordinal, names):
                self._sums |= {name: checksum(self._views[name]) for name in names}
        self._thread.start()

    def await_read(self) -> None:
        """See the table."""
        self._read.wait()

    def verdict(self) -> None:
        """Return when all is known to be alike.

        Raises:
            StateError: it is not; names tensors and ranks.
            WaitTimeoutError: ranks are missing.
        """
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _have_looked(self, devices: Devices, ordinal: int, names: list[str]) -> bool:
        """Have a device take checksums, as work of its current stream."""
        device = devices.get(ordinal)
        if device is None:
            return False
        try:
            device.load_probes()
            probe = native.Probe(device, [(self._views[name].data_ptr(), self._views[name].nbytes) for name in names])
            stream = torch.cuda.current_stream(ordinal).cuda_stream
            probe.launch(stream)
            probe.fetch(stream)
        except (CapacityError, DeviceError) as error:
            say_once(
                f"no-proof {ordinal}",
                "cuda:%d cannot take checksums (%s): the first save waits until what ranks share was brought to host "
                "memory and read there",
                ordinal,
                error,
            )
            return False
        self._probes.append((probe, names))
        return True

    def _run(self) -> None:
        try:
            try:
                for name in self._views.keys() - self._sums.keys() - {n for _, names in self._probes for n in names}:
                    self._sums[name] = checksum(self._views[name])
            finally:
                self._read.set()
            for probe, names in self._probes:
                self._sums.update(zip(names, probe.checksums(), strict=True))
            if self._before is not None:
                self._before.verdict()
            self._compare()
            self.settled = True
        except ZerostallError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whoever seals must hear
            self.error = StateError(f"it could not be found out whether ranks hold the same: {error!r}")
        finally:
            self._views.clear()
            self._probes.clear()
            self._before = None

    def _compare(self) -> None:
        """An exchange for all ranks, whether they share or not."""
        digests: _Digests = [(_key(group), self._digest(names)) for group, names in self._groups]
        said = self._world.gather(msgspec.msgpack.encode(digests), what="save: checksums of what is alike")
        different: dict[bytes, set[bytes]] = {}
        for data in said:
            for key, digest in _decoded(data, _Digests):
                different.setdefault(key, set()).add(digest)
        odd = {key for key, digests in different.items() if len(digests) > 1}
        if odd:
            self._tell([(group, names) for group, names in self._groups if _key(group) in odd])

    def _tell(self, mine: Sequence[tuple[Shared, Sequence[str]]]) -> None:
        """Find out, with all other ranks, which tensors differ; raises."""
        merged = {name: self._sums[name] for _, names in mine for name in names}
        said = self._world.gather(msgspec.msgpack.encode(merged), what="save: what is not alike")
        every = [_decoded(data, _Sums) for data in said]
        lines: list[str] = []
        for group, names in mine:
            for name in names:
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

    def _digest(self, names: Sequence[str]) -> bytes:
        sums = sorted((name, self._sums[name]) for name in names)
        return hashlib.sha256(msgspec.msgpack.encode(sums)).digest()[:16]


def _bits(holder: Holder) -> torch.Tensor:
    own = tensors.own(holder)
    return writes.as_bits(own if isinstance(own, torch.Tensor) else torch.from_numpy(own.copy()))


def checksum(bits: torch.Tensor) -> int:
    """CRC-32C of a tensor's elements, in their order."""
    here = bits.contiguous().cpu()
    return native.crc32c_memory(here.data_ptr(), here.nbytes) if here.nbytes else 0


def _key(group: Shared) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode((group.ranks, group.names))).digest()[:16]


def _decoded(data: bytes, kind: object):
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise FormatError(f"another rank sent what are no checksums: {error}") from None
