"""Files into tensors by `native.Load`: what restoring a step from disk and loading without an agent have in common."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core.layout import CHUNK
from zerostall.errors import CorruptError
from zerostall.flow import straight
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_WAIT = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class File:
    """An open file, and what it must add up to.

    Attributes:
        checksums: of each chunk of `chunk_bytes` bytes; None where nobody knows.
    """

    fd: int
    path: Path
    nbytes: int
    chunk_bytes: int = CHUNK
    checksums: Sequence[int] | None = None


@contextlib.contextmanager
def apart(file: File) -> Iterator[File]:
    """Open the same file once more, for one job: those that share an open file share its flags, O_DIRECT among them.

    The first job that ended would have the others go on through the page cache. A job keeps what it began with.
    """
    try:
        fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:  # no /proc, for one
        say_once("load-apart", "a file cannot be opened twice (%s): part of it may go through the page cache", error)
        yield file
        return
    try:
        yield replace(file, fd=fd)
    finally:
        os.close(fd)


def begin(
    pool: native.Pool,
    file: File,
    plan: native.Plan,
    targets: native.Tensors,
    pieces: Sequence[int],
    *,
    staging: native.Staging,
    device: native.Device | None = None,
    only: Sequence[int] | None = None,
    held: int = 0,
) -> native.Load:
    """Begin to read pieces of a file, which rise, each into its tensor. All of these are on `device`; None: the host's.

    Its memory must be idle. Straight from the file where cuFile takes it.

    Args:
        only: no chunks but these, which rise.
        held: the address of memory that lies as the file and has those chunks: they come from there. 0: from the file.
    """
    return native.Load(
        pool,
        plan,
        targets,
        file.fd,
        pieces,
        checksums=file.checksums,
        direct=not held,
        staging=staging,
        device=device,
        straight=straight.device_file(device, file.fd, file.path) if device is not None and not held else None,
        only=only,
        held=held,
    )


def end(job: native.Load, file: File) -> None:
    """Wait for it. Raises what went wrong, naming the file."""
    try:
        job.wait(_WAIT)
    except CorruptError as error:
        raise CorruptError(f"{file.path}: {error.args[0]}") from None
    if job.fell_back:
        say_once(f"load:{file.path.parent}", "%s: read through the page cache: %s", file.path.parent, job.fell_back)
    if job.bounced:
        say_once("gds-bounced", "cuFile reads into memory of its own first: %s", job.bounced)
