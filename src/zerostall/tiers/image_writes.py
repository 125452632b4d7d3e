"""An image's bytes into an open file, past the page cache, each chunk checked as it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall import native
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerostall.tiers.contract import Image, Pace


_LOOK_SECONDS = 0.02
"""How often a write looks whether others come before it; a few blocks of 4 MiB go to disk meanwhile."""


class AtOnce:
    """Nobody comes before it; see `contract.Pace`."""

    def free(self) -> bool:
        return True

    def wait(self) -> None:
        pass


AT_ONCE = AtOnce()


def write_image(fd: int, image: Image, pool: native.Pool, where: Path, *, direct: bool, pace: Pace = AT_ONCE) -> None:
    """Return when the bytes are written, at that pace; `where` is what messages call the disk.

    Straight from a device where the image lies there, too, and that can be; else, and for the rest, from host memory.
    """
    whole, chunks = image.record.nbytes // image.record.chunk_bytes, len(image.record.checksums)
    if image.device is None or not direct or whole == 0:
        _write(fd, image, pool, where, pace, direct=direct)
        return
    # This makes the file as long as it will be.
    _write(fd, image, pool, where, pace, direct=direct, only=range(whole, chunks))
    done = image.device.write(fd, where, pace)
    if done < whole:
        _write(fd, image, pool, where, pace, direct=direct, only=range(done, whole))


def _write(
    fd: int,
    image: Image,
    pool: native.Pool,
    where: Path,
    pace: Pace,
    *,
    direct: bool,
    only: Sequence[int] | None = None,
) -> None:
    pace.wait()
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
    while not write.wait(_LOOK_SECONDS):
        if not pace.free():
            write.hold()
            pace.wait()
            write.go_on()
    if direct and write.fell_back:
        say_once(f"direct:{where}", "%s: plain writes instead of O_DIRECT: %s", where, write.fell_back)
