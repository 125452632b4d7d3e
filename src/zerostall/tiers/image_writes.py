"""An image's bytes into an open file, past the page cache, each chunk checked as it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall import native
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.tiers.contract import Image


def write_image(fd: int, image: Image, pool: native.Pool, where: Path, *, direct: bool) -> None:
    """Return when the bytes are written; `where` is what messages call the disk."""
    write = native.FileWrite(
        pool,
        fd,
        image.address,
        image.record.nbytes,
        chunk_bytes=image.record.chunk_bytes,
        checksums=image.record.checksums,
        direct=direct,
    )
    write.wait(None)
    if direct and write.fell_back:
        say_once(f"direct:{where}", "%s: plain writes instead of O_DIRECT: %s", where, write.fell_back)
