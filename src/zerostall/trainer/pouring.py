"""The bytes of an image into tensors: over NVLink from vaults that still have them, else from host memory.

What comes from another GPU's memory is checked where it arrives, by the GPU itself. Whatever keeps it from coming is
said, and host memory, where the whole image lies, serves in its place.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core import layout as layouts
from zerostall.errors import CapabilityError, CorruptError, WaitTimeoutError, ZerostallError
from zerostall.telemetry import log, say_once
from zerostall.trainer import file_loads
from zerostall.trainer.devices import Straightened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.core.manifest import Record
    from zerostall.trainer.devices import Devices
    from zerostall.trainer.file_loads import File
    from zerostall.trainer.state.tensors import Holder
    from zerostall.wire import messages as m

_HOST = -1
_WORTH_PINNING = 64 << 20
_PATIENCE_SECONDS = 20.0
_LEAST_RATE = 1e9


@dataclass(frozen=True, slots=True)
class Mapped:
    """One rank's image in memory that this process has mapped.

    Attributes:
        offset: where it begins in the segment.
        verified: its bytes were checked on their way there.
        kept: where what of it was on a device lies in other GPUs' memory, too.
        source: the tier that it came from, where that is not the one that was asked.
    """

    record: Record
    segment: native.Segment
    offset: int
    verified: bool = False
    kept: tuple[m.Kept, ...] = ()
    source: str = ""

    @property
    def address(self) -> int:
        return self.segment.address + self.offset


@dataclass(frozen=True, slots=True)
class Filed:
    """One rank's image in a file that is open."""

    record: Record
    file: File

    def mapped(self, pool: native.Pool) -> Mapped:
        """All of it in memory, checked, for whoever reads here and there in it.

        Raises:
            CorruptError: a chunk fails its checksum.
        """
        record = self.record
        segment = native.Segment("zerostall-restore", max(record.nbytes, 1), populate=False)
        job = native.FileRead(
            pool,
            self.file.fd,
            segment.address,
            record.nbytes,
            chunk_bytes=record.chunk_bytes,
            checksums=record.checksums,
            direct=True,
        )
        through(job)
        if job.bad:
            raise CorruptError(f"{self.file.path}: chunk {job.bad[0]} of {len(record.checksums)} fails its checksum")
        return Mapped(record, segment, 0, verified=True)


class Loading:
    """Bytes of a file to tensors, each with its piece of the image, which are in rising order, in one pass.

    Nothing may be used before the end. The devices' memory must be idle from the first `begin` on.

    Args:
        spare: memory for what is on the way, by device, that several of these may have in turns: what they need then
            grows with what is under way at once, and not with how many there are.
    """

    def __init__(
        self,
        pool: native.Pool,
        devices: Devices,
        plan: native.Plan,
        holders: Sequence[Holder],
        pieces: Sequence[int],
        file: File,
        spare: dict[int, list[native.Staging]] | None = None,
    ) -> None:
        self._pool = pool
        self._devices = devices
        self._plan = plan
        self._file = file
        self._straightened = Straightened(holders)
        tensors = self._straightened.tensors
        places: dict[int, list[int]] = {}
        for k, tensor in enumerate(tensors):
            for ordinal in _targets([tensor]).devices or [_HOST]:
                places.setdefault(ordinal, []).append(k)
        self._places = [
            (ordinal, [pieces[k] for k in mine], _targets([tensors[k] for k in mine]))
            for ordinal, mine in places.items()
        ]
        self._jobs: list[tuple[native.Load, int, native.Staging]] = []
        self._spare = {} if spare is None else spare
        devices.see(ordinal for ordinal in places if ordinal != _HOST)
        devices.settle()

    def begin(self, only: Sequence[int] | None = None, held: int = 0) -> None:
        """Begin to bring all chunks, or only some; see `file_loads.begin`."""
        for ordinal, pieces, targets in self._places:
            device = self._devices.get(ordinal)
            spare = self._spare.setdefault(ordinal, [])
            staging = spare.pop() if spare else native.Staging(self._pool.threads, device)
            with file_loads.apart(self._file) as file:
                # In one go: a job that is interrupted (Ctrl-C) before it is noted is awaited, for nobody holds it.
                self._jobs.append(
                    (
                        file_loads.begin(
                            self._pool,
                            file,
                            self._plan,
                            targets,
                            pieces,
                            staging=staging,
                            device=device,
                            only=only,
                            held=held,
                        ),
                        ordinal,
                        staging,
                    )
                )

    def bring(self, chunk: int, address: int) -> None:
        """Begin to bring one chunk from memory, which stays as it is until `settled` has returned."""
        self.begin([chunk], held=address - chunk * self._plan.chunk_bytes)

    def settled(self, problems: list[BaseException]) -> None:
        """Wait for all that was begun, whatever goes wrong; what does is added."""
        while self._jobs:
            job, ordinal, staging = self._jobs.pop(0)
            try:
                file_loads.end(job, self._file)
            except BaseException as error:  # noqa: BLE001 - whoever asked raises it
                problems.append(error)
                job.cancel()
                with contextlib.suppress(ZerostallError):
                    job.wait()
            self._spare[ordinal].append(staging)

    def give_up(self) -> None:
        """What was begun and is not settled comes to nothing, and touches no memory afterwards."""
        for job, _, _ in self._jobs:
            job.cancel()
        self.settled([])

    def end(self) -> None:
        """Wait for all that was begun, and do what that leaves to be done.

        Raises:
            CorruptError: a chunk fails its checksum.
        """
        problems: list[BaseException] = []
        self.settled(problems)
        raise_first(problems)
        self._straightened.pour()


def through(job: native.Job) -> None:
    """Wait until a job has ended. Whatever keeps this from waiting (Ctrl-C) ends the job first: memory that it reads
    goes next, and who holds the error holds the job.
    """
    try:
        job.wait(None)
    except BaseException:
        job.cancel()
        with contextlib.suppress(ZerostallError):
            job.wait(None)
        raise


def raise_first(problems: list[BaseException]) -> None:
    """Raise the first, if there is one, and empty the list: an error in a frame that it holds keeps tensors alive."""
    wrong = problems[0] if problems else None
    problems.clear()
    try:
        if wrong is not None:
            raise wrong
    finally:
        del wrong


def pour(
    pool: native.Pool,
    devices: Devices,
    plan: native.Plan,
    holders: Sequence[Holder],
    pieces: Sequence[int],
    image: Mapped,
    *,
    pin: bool = False,
) -> int:
    """Fill the tensors, each with its piece of the image; how many bytes came from another GPU's memory.

    Args:
        pin: register host memory with CUDA where much of it is read: worth it where captures will go there.

    Raises:
        CorruptError: a chunk fails its checksum.
    """
    straightened = Straightened(holders)
    tensors = straightened.tensors
    targets = _targets(tensors)
    if targets.devices:
        devices.see(targets.devices)
    recalled, taken = 0, frozenset[int]()
    for number, kept in enumerate(image.kept if targets.devices else (), start=1):
        try:
            recalled, taken = _recall(pool, devices, plan, targets, pieces, image, kept)
            break
        except ZerostallError as error:
            instead = "its mirror" if number < len(image.kept) else "host memory"
            why = error.args[0]
            say_once(
                f"recall {kept.gpu} {why}", "%s is restored from, not the memory of %s: %s", instead, kept.gpu, why
            )
    if left := [k for k in range(len(tensors)) if k not in taken]:
        if taken:
            targets = _targets([tensors[k] for k in left])
        if targets.devices and pin:
            _pin(devices, pool, image)
        # Checked once more on this last hop even where the agent has just checked: it costs nothing while copying.
        native.Scatter(
            pool,
            plan,
            targets,
            image.address,
            [pieces[k] for k in left],
            checksums=image.record.checksums,
            streams=devices.now(),
        ).wait(None)
    straightened.pour()
    return recalled


def _targets(tensors: Sequence[Holder]) -> native.Tensors:
    targets = native.Tensors(tensors, [False] * len(tensors))
    targets.refresh()
    return targets


def _recall(
    pool: native.Pool,
    devices: Devices,
    plan: native.Plan,
    targets: native.Tensors,
    pieces: Sequence[int],
    image: Mapped,
    kept: m.Kept,
) -> tuple[int, frozenset[int]]:
    """Fill what can be filled from the vault: the bytes, and which tensors.

    Raises:
        ZerostallError: whatever was amiss, so that what was filled counts for nothing.
    """
    if len(targets.devices) != 1:
        raise CapabilityError("what is restored is on several GPUs")
    stream = next(pair for pair in devices.now() if pair[0].ordinal == targets.devices[0])
    memory = native.Peer(stream[0], kept.handle)
    try:
        at = memory.address + kept.offset
        job = native.Recall(pool, plan, targets, pieces, peer=at, runs=kept.runs, stream=stream)
        try:
            patience = _PATIENCE_SECONDS + image.record.nbytes / _LEAST_RATE
            if not job.wait(patience):
                raise WaitTimeoutError(f"it had not come in {patience:.0f} s")
            if bad := job.bad(image.address, image.record.checksums):
                raise CorruptError(f"chunk {bad[0]} arrived as other bytes")
            log.info("%d bytes came from the memory of %s", job.nbytes_done, kept.gpu)
            return job.nbytes_done, frozenset(job.taken)
        finally:
            del job  # waits for what is in flight
    finally:
        memory.close()


def _pin(devices: Devices, pool: native.Pool, image: Mapped) -> None:
    """Register the image with CUDA, so that copy engines read it directly; not worth it for a small one."""
    segment, offset, nbytes = image.segment, image.offset, image.record.nbytes
    if segment.pinned(offset) or nbytes < _WORTH_PINNING or offset % layouts.ALIGN:
        return
    end = min(segment.nbytes, -(-(offset + nbytes) // layouts.ALIGN) * layouts.ALIGN)
    devices.pin(segment, stretch=1 << 50, threads=pool.threads, offset=offset, nbytes=end - offset)
