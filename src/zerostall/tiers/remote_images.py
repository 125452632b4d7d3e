"""What the objects of the remote tier hold: images, records and layouts, each named by what is in it.

So objects of one name are the same, whoever wrote them, and none is in another's way. Which of them are a step is for
`remote.RemoteTier` to say.
"""

from __future__ import annotations

import time
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.layout import CHUNK
from zerostall.errors import CorruptError
from zerostall.telemetry import say_once
from zerostall.tiers import kept, urls
from zerostall.tiers.contract import Image, ImageBytes, Stored
from zerostall.tiers.image_bytes import MemoryBytes
from zerostall.tiers.uploads import AzureUploads, Gate, PlainUploads, S3Uploads, Uploads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, Record
    from zerostall.tiers.store import Found, Store

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """One image, of which chunks are asked for one by one.

    Attributes:
        begin: begins to read a chunk into memory of its size; the future ends when it is there and was checked.
            RuntimeError: the tier is closed.
    """

    stored: Stored
    begin: Callable[[int, memoryview], Future[None]]


class RemoteImages:
    """Args as of `remote.RemoteTier`."""

    def __init__(self, store: Store, hands: Executor, gate: Gate) -> None:
        self._store = store
        self._hands = hands
        self._gate = gate
        self._layouts: dict[str, Layout] = {}
        self._written: set[str] = set()
        # With HTTP and TLS, which an agent without a store need not import.
        from zerostall.tiers import azure, s3

        in_blocks = store.scheme in urls.AZURE_SCHEMES
        reason = azure.why_not(store) if in_blocks else s3.why_not(store)
        if reason:
            say_once(
                f"uploads:{store.url}",
                "%s: uploads go through obstore (%s): one that breaks off begins anew",
                store.url,
                reason,
            )
        self._uploads: Uploads = PlainUploads(store)
        if not reason and in_blocks:
            self._uploads = AzureUploads(store, azure.Azure(store), hands)
        elif not reason:
            self._uploads = S3Uploads(store, s3.S3(store), hands)

    # ------------------------------------------------------------------------------------------------- writing

    def carry(self, stored: Stored, source: ImageBytes) -> int:
        """Send an image and its record, but for what is there already; how many bytes had to be sent."""
        record = stored.record
        self._write_layout(stored.layout)
        data = manifests.encode_record(record)
        digest = manifests.facts(record, data).record
        folder = kept.folder(record.step)
        image = f"{folder}/{names.kept_image(record.rank, digest)}"
        sent = 0
        if self._store.size(image) != record.nbytes:
            sent = self._uploads.upload(image, source, record, self._gate)
        self._store.put(f"{folder}/{names.kept_record(record.rank, digest)}", data)
        return sent

    def _write_layout(self, layout: Layout) -> None:
        if layout.digest not in self._written:
            self._store.put(f"{names.LAYOUTS}/{names.layout_file(layout.digest)}", layouts.encode(layout))
            self._written.add(layout.digest)
        self._layouts[layout.digest] = layout

    # ------------------------------------------------------------------------------------------------- reading

    def layout(self, digest: str, begins: Sequence[int]) -> Layout:
        if digest not in self._layouts:
            name = f"{names.LAYOUTS}/{names.layout_file(digest)}"
            try:
                data = self._store.read(name).data
            except FileNotFoundError:
                raise CorruptError(f"{self._store.address(name)} is missing") from None
            layout = layouts.decode(data, begins, source=self._store.address(name))
            if layout.digest != digest:
                raise CorruptError(f"{self._store.address(name)} holds another layout than its name says")
            self._layouts[digest] = layout
        return layouts.moved(self._layouts[digest], begins)

    def record(self, manifest: Manifest, rank: int) -> tuple[str, Found]:
        """A rank's record and the object that holds it."""
        usual = kept.folder(manifest.step) + "/" + names.kept_record(rank, manifest.ranks[rank].record)
        for name in (usual, _beside(manifest.step, names.record_file(rank))):
            try:
                return name, self._store.read(name)
            except FileNotFoundError:
                continue
        raise CorruptError(f"{self._store.address(usual)} is missing")

    def name(self, manifest: Manifest, rank: int) -> str:
        """The object that holds a rank's image."""
        name = kept.folder(manifest.step) + "/" + names.kept_image(rank, manifest.ranks[rank].record)
        beside = _beside(manifest.step, names.image_file(rank))
        return beside if self._store.size(name) is None and self._store.size(beside) is not None else name

    def get(self, name: str, stored: Stored, address: int, chunks: Sequence[int] | None) -> None:
        """Bring the image in that object to `address`, or these chunks of it, each checked.

        Raises:
            CorruptError: it is not what the record says, or is gone.
        """
        target = MemoryBytes(Image(stored.layout, stored.record, address))

        def bring(index: int) -> bool:
            return self.bring(name, stored.record, index, target.view(*stored.record.extent(index)))

        wanted = range(len(stored.record.checksums)) if chunks is None else chunks
        whole = self.each(bring, wanted)
        bad = [index for index, right in zip(wanted, whole, strict=True) if not right]
        if bad:
            raise CorruptError(
                f"{self._store.address(name)}: {len(bad)} of {len(whole)} chunks fail their checksum, "
                f"first chunk {bad[0]}"
            )

    def bring(self, name: str, record: Record, index: int, view: memoryview) -> bool:
        """Read one chunk of the image in that object; whether it is right. Raises as `get`."""
        start, _ = record.extent(index)
        try:
            for _ in range(2):  # what broke on the way is right the second time
                for at in range(0, len(view), CHUNK):  # another writer's chunk may be larger than a request should be
                    some = view[at : at + CHUNK]
                    self._gate(len(some))
                    self._store.read_range(name, start + at, some)
                if native.crc32c(view) == record.checksums[index]:
                    return True
        except FileNotFoundError:
            raise CorruptError(f"{self._store.address(name)} is missing") from None
        return False

    def begin(self, name: str, record: Record, index: int, view: memoryview) -> Future[None]:
        """Begin to read one chunk, which is right when the future has ended without an error."""

        def read() -> None:
            if not self.bring(name, record, index, view):
                raise CorruptError(f"{self._store.address(name)}: chunk {index} fails its checksum")

        return self._hands.submit(read)

    # ------------------------------------------------------------------------------------------------ removing

    def discard(self, manifest: Manifest, keep: set[str]) -> None:
        """Remove what a manifest named, but for what another one names."""
        below = kept.folder(manifest.step)
        self._store.delete(f"{below}/{name}" for name in sorted(kept.objects_of(manifest) - keep))
        if not keep:  # where a folder that was copied here has them
            for file in (names.image_file, names.record_file):
                self._store.delete(_beside(manifest.step, file(rank.rank)) for rank in manifest.ranks)

    def abandon(self, step: int, keep: set[str]) -> None:
        """Remove what was sent of a step, but for what a manifest names."""
        self._uploads.forget(f"{kept.folder(step)}/", older=0.0)
        there = self._store.objects(kept.folder(step))
        self._store.delete(f"{kept.folder(step)}/{name}" for name in there if name not in keep)

    def clear(self, counted: set[int | None], older: float) -> list[str]:
        """Remove what was sent more than `older` seconds ago of steps that are not `counted`, and uploads as old."""
        cleared = self._uploads.forget(f"{names.IMAGES}/", older=older)
        for folder in self._store.folders(names.IMAGES):
            step = names.parse_step(folder)
            if step is None or step in counted:
                continue
            below = f"{names.IMAGES}/{folder}"
            old = [
                f"{below}/{name}"
                for name, one in self._store.objects(below).items()
                if names.parse_kept(name) is not None and time.time() - one.modified >= older
            ]
            self._store.delete(old)
            cleared += old
        return cleared

    def each(self, do: Callable[[_In], _Out], over: Iterable[_In]) -> list[_Out]:
        """`do` to each, some at once, in order; the first error is raised when all that was begun has ended."""
        futures = [self._hands.submit(do, one) for one in over]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def close(self) -> None:
        """Let go of connections."""
        self._uploads.close()


def _beside(step: int, file: str) -> str:
    """Where a folder that was copied into the store has a file: beside the manifest."""
    return f"{names.step_folder(step)}/{file}"
