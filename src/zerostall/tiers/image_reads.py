"""The bytes of an image from a file to memory, checked on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall import native
from zerostall.errors import CorruptError
from zerostall.tiers.files import opened, storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerostall.core.manifest import Record


def read_image(
    path: Path, record: Record, address: int, *, threads: int, direct: bool, chunks: Sequence[int] | None = None
) -> None:
    """Bring the image, or these chunks of it, to their places from `address` on.

    Raises:
        CorruptError: it is missing or fails a checksum.
        StorageError: it cannot be read.
    """
    pool = native.Pool("disk-read", threads, awaited=True)  # a restore waits, not training's next step
    try:
        with opened(path) as fd:
            read = native.FileRead(
                pool,
                fd,
                address,
                record.nbytes,
                chunk_bytes=record.chunk_bytes,
                checksums=record.checksums,
                direct=direct,
                only=chunks,
            )
            with storage_errors(path, f"step {record.step}", 0, doing="read"):
                read.wait(None)
    except FileNotFoundError:
        raise CorruptError(f"{path} is missing") from None
    finally:
        pool.close()
    if read.bad:
        raise CorruptError(
            f"{path}: {len(read.bad)} of {len(record.checksums)} chunks fail their checksum, "
            f"first chunk {min(read.bad)}"
        )
