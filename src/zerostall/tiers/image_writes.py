"""An image's bytes into an open file, past the page cache, each chunk checked as it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall import native
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerostall.tiers.contract import Image


def write_image(fd: int, image: Image, pool: native.Pool, where: Path, *, direct: bool) -> None:
    """Return when the bytes are written; `where` is what messages call the disk.

    Straight from a device where the image lies there, too, and that can be; else, and for the rest, from host memory.
    """
    whole, chunks = image.record.nbytes // image.record.chunk_bytes, len(image.record.checksums)
    if image.device is None or not direct or whole == 0:
        _write(fd, image, pool, where, direct=direct)
        return
    _write(fd, image, pool, where, direct=direct, only=range(whole, chunks))  # makes the file as long as it will be
    done = image.device.write(fd, where)
    if done < whole:
        _write(fd, image, pool, where, direct=direct, only=range(done, whole))


def _write(
    fd: int, image: Image, pool: native.Pool, where: Path, *, direct: bool, only: Sequence[int] | None = None
) -> None:
    write = native.FileWrite(
        pool,
        fd,
        image.address,
        image.record.nbytes,
        chunk_bytes=image.record.chunk_bytes,
        checksums=image.record.checksums,
        direct=direct,
        only=only,
    )
    write.wait(None)
    if direct and write.fell_back:
        say_once(f"direct:{where}", "%s: plain writes instead of O_DIRECT: %s", where, write.fell_back)
