"""Images of a step, read by several threads from any place on; no byte is given out before its chunk was checked."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.errors import CorruptError
from zerostall.flow.image_reader import buffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerostall.tiers.contract import ImageBytes, Stored


class CheckedImages:
    """Memory for the chunks that are in use and a few more, whatever the number and size of the images.

    Args:
        spare: how many chunks that nobody reads are kept, in case that somebody asks for more of them.
    """

    def __init__(self, spare: int = 2) -> None:
        self._spare = spare
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[int, int], _Chunk] = OrderedDict()
        self._free: list[memoryview] = []
        self._files = contextlib.ExitStack()
        self._images = 0

    def add(self, source: ImageBytes, stored: Stored) -> CheckedImage:
        """An image to read."""
        self._files.callback(source.close)
        self._images += 1
        return CheckedImage(self, self._images, source, stored)

    def close(self) -> None:
        """Close the images."""
        self._files.close()

    @contextlib.contextmanager
    def chunk(self, image: CheckedImage, index: int) -> Iterator[memoryview]:
        """Yield a chunk, checked."""
        key = (image.number, index)
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._chunks[key] = _Chunk()
            self._chunks.move_to_end(key)
            chunk.users += 1
        try:
            with chunk.lock:
                if chunk.data is None:
                    chunk.data = self._loaded(image, index)
            yield chunk.data
        finally:
            with self._lock:
                chunk.users -= 1
                self._let_go()

    def _loaded(self, image: CheckedImage, index: int) -> memoryview:
        size = image.chunk_size(index)
        with self._lock:
            fitting = next((at for at, memory in enumerate(self._free) if len(memory) >= size), None)
            memory = None if fitting is None else self._free.pop(fitting)
        if memory is None:
            memory = memoryview(buffer(size))
        image.load(index, memory[:size])
        return memory[:size]

    def _let_go(self) -> None:
        unused = [key for key, chunk in self._chunks.items() if not chunk.users]
        for key in unused[: max(0, len(unused) - self._spare)]:
            data = self._chunks.pop(key).data
            if data is not None and len(self._free) < self._spare:
                self._free.append(data)


@dataclass(slots=True)
class _Chunk:
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    data: memoryview | None = None


class CheckedImage:
    """One image; a `readable.Source`."""

    def __init__(self, images: CheckedImages, number: int, source: ImageBytes, stored: Stored) -> None:
        self.number = number
        self.label = source.label
        self.stored = stored
        self._images = images
        self.source = source

    def chunk_size(self, index: int) -> int:
        return self.stored.record.extent(index)[1]

    def load(self, index: int, view: memoryview) -> None:
        """Read a chunk and check it."""
        start = index * self.stored.record.chunk_bytes
        self.source.read_into(view, start)
        if native.crc32c(view) != self.stored.record.checksums[index]:
            raise CorruptError(f"{self.label}: chunk {index} (from byte {start}) fails its checksum")

    def read_into(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            index, begin = divmod(offset + done, self.stored.record.chunk_bytes)
            with self._images.chunk(self, index) as chunk:
                part = chunk[begin : begin + len(view) - done]
                view[done : done + len(part)] = part
                done += len(part)
