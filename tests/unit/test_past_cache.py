"""Checksums of files as the disk has them, past what the kernel remembers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from zerostall import native, telemetry
from zerostall.errors import CorruptError, StorageError
from zerostall.tiers import past_cache

PARTS = [
    (0, 1),
    (0, 4096),
    (0, 5 << 20),
    (4096, 1 << 20),
    (100, 5000),
    ((2 << 20) - 7, (2 << 20) + 9),
    (5 << 20, 12_345),
]


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, bytes]:
    held = os.urandom((5 << 20) + 12_345)
    path = tmp_path / "runs" / "step" / "image"
    path.parent.mkdir(parents=True)
    path.write_bytes(held)
    return path, held


def checksum(path: Path, start: int, nbytes: int) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return past_cache.checksum(fd, start, nbytes, path)
    finally:
        os.close(fd)


@pytest.mark.parametrize(("start", "nbytes"), PARTS)
def test_any_part_has_the_checksum_of_its_bytes(data: tuple[Path, bytes], start: int, nbytes: int) -> None:
    path, held = data
    assert checksum(path, start, nbytes) == native.crc32c(held[start : start + nbytes])


@pytest.mark.parametrize("refuses", ["fcntl", "read"])
@pytest.mark.parametrize(("start", "nbytes"), PARTS)
def test_so_it_has_where_direct_reads_are_refused(
    data: tuple[Path, bytes], start: int, nbytes: int, refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, held = data
    monkeypatch.setattr(telemetry, "_said", {})
    set_flags, read = past_cache.fcntl.fcntl, os.preadv

    def no_flags(fd: int, command: int, value: int = 0) -> int:
        if command == past_cache.fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(fd, command, value)

    def no_read(fd: int, views: list[memoryview], at: int) -> int:
        if set_flags(fd, past_cache.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(fd, views, at)

    if refuses == "fcntl":
        monkeypatch.setattr(past_cache.fcntl, "fcntl", no_flags)
    else:
        monkeypatch.setattr(past_cache.os, "preadv", no_read)
    assert checksum(path, start, nbytes) == native.crc32c(held[start : start + nbytes])
    assert [one.text for one in telemetry._said.values()] == [
        f"{path.parent.parent}: plain reads instead of O_DIRECT: Invalid argument"
    ]


@pytest.mark.parametrize("least", [1, 511, 4096, 70_000])
def test_reads_that_fall_short_are_gone_on_with(
    data: tuple[Path, bytes], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, held = data
    read = os.preadv
    monkeypatch.setattr(past_cache.os, "preadv", lambda fd, views, at: min(read(fd, views, at), max(least, 40_000)))
    assert checksum(path, 3, 300_000) == native.crc32c(held[3:300_003])


def test_a_file_that_was_cut_is_damage_and_a_refusal_names_it(
    data: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, held = data
    with pytest.raises(CorruptError, match="ends at byte"):
        checksum(path, 0, len(held) + 1)

    def refused(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(past_cache.os, "preadv", refused)
    with pytest.raises(StorageError, match="Input/output error") as caught:
        checksum(path, 0, 10)
    assert caught.value.filename == str(path) and caught.value.errno == errno.EIO
