"""Into which parts an image is cut for an upload: a pure decision."""

from __future__ import annotations

import msgspec

from zerostall.core import checksum

LEAST_PART = 16 << 20
"""Small enough to send again, large enough that a request's overhead does not matter. Stores ask for 5 MiB."""

MOST_PARTS = 10_000
"""Of one object, in every store."""


class Part(msgspec.Struct, frozen=True):
    """A run of whole chunks.

    Attributes:
        number: from 1 on, as stores count.
        chunks: the first chunk and the one after the last.
        checksum: CRC-32C of the bytes.
    """

    number: int
    offset: int
    nbytes: int
    chunks: tuple[int, int]
    checksum: int


def cut(nbytes: int, chunk_bytes: int, checksums: list[int], *, least: int = LEAST_PART) -> list[Part]:
    """Cut an image so that every part but the last has `least` bytes or more, and there are not too many."""
    chunks = len(checksums)
    each = max(-(-least // chunk_bytes), -(-chunks // MOST_PARTS), 1)
    parts: list[Part] = []
    for first in range(0, chunks, each):
        end = min(first + each, chunks)
        offset = first * chunk_bytes
        size = min(end * chunk_bytes, nbytes) - offset
        crc = checksum.whole(checksums[first:end], size, chunk_bytes)
        parts.append(Part(len(parts) + 1, offset, size, (first, end), crc))
    return parts
