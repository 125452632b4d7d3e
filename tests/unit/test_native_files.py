"""Images to files and back: sizes, damage, short files, direct and plain."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import numpy as np
import pytest

from unit.native_images import checksums_of, segment_with
from zerostall.errors import CorruptError, StorageError
from zerostall.native import FileRead, FileWrite, Pool, Segment, Verify, crc32c
from zerostall.tiers import image_writes
from zerostall.tiers.contract import Image

CHUNK = 64 << 10


@pytest.fixture
def pool():
    pool = Pool("test-io", 4)
    yield pool
    pool.close()


def image_of(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def write(pool: Pool, path: Path, image: bytes, *, direct: bool, chunk_bytes: int = CHUNK) -> str | None:
    segment = segment_with(image)
    with path.open("w+b") as file:
        checksums = checksums_of(image, chunk_bytes)
        job = FileWrite(
            pool,
            file.fileno(),
            segment.address,
            len(image),
            chunk_bytes=chunk_bytes,
            checksums=checksums,
            direct=direct,
        )
        assert job.wait(30)
        assert job.nbytes_done == len(image)
        assert not fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT
        return job.fell_back


def test_a_write_that_is_held_leaves_the_threads_to_others_and_goes_on(tmp_path: Path) -> None:
    image = image_of(CHUNK + 5)
    large, small = segment_with(image * 16), segment_with(image)
    one = Pool("one-thread", 1)
    with (tmp_path / "large").open("w+b") as file, (tmp_path / "small").open("w+b") as other:

        def write(file: IO[bytes], segment: Segment, times: int) -> FileWrite:
            return FileWrite(
                one, file.fileno(), segment.address, times * len(image), chunk_bytes=CHUNK,
                checksums=checksums_of(image * times, CHUNK), direct=False,
            )  # fmt: skip

        held = write(file, large, 16)
        held.hold()
        done = []
        for _ in range(2):  # the first may have to wait for what was in flight
            assert write(other, small, 1).wait(30)
            done.append(held.nbytes_done)
        assert done[0] == done[1]
        held.go_on()
        assert held.wait(30)
    assert (tmp_path / "large").read_bytes() == image * 16
    assert (tmp_path / "small").read_bytes() == image
    one.close()


@pytest.mark.parametrize("often", [0.0, 60.0])
def test_an_image_is_written_at_a_pace(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: float
) -> None:
    image = image_of(8 * CHUNK + 5)
    segment = segment_with(image)
    record = SimpleNamespace(nbytes=len(image), chunk_bytes=CHUNK, checksums=checksums_of(image, CHUNK))
    asked: list[str] = []
    pace = SimpleNamespace(free=lambda: bool(asked.append("free")), wait=lambda: asked.append("wait"))
    monkeypatch.setattr(image_writes, "_LOOK_SECONDS", often)
    with (tmp_path / "image").open("w+b") as file:
        whole = Image(None, record, segment.address)  # type: ignore[arg-type]
        image_writes.write_image(file.fileno(), whole, pool, tmp_path, direct=False, pace=pace)  # type: ignore[arg-type]
    assert (tmp_path / "image").read_bytes() == image
    assert asked == ["wait"] + asked.count("free") * ["free", "wait"]
    assert often == 0.0 or asked == ["wait"]


@pytest.mark.parametrize("done", [0, 1, 3])
@pytest.mark.parametrize("rest", [0, 5])
def test_what_a_device_has_not_written_comes_from_memory(pool: Pool, tmp_path: Path, done: int, rest: int) -> None:
    image = image_of(3 * CHUNK + rest)
    segment = segment_with(image)
    segment.view(0, done * CHUNK)[:] = b"?" * (done * CHUNK)  # would be found if it were read
    path = tmp_path / "image"

    def write(fd: int, where: Path, pace: object) -> int:
        assert os.fstat(fd).st_size == len(image)
        os.pwrite(fd, image[: done * CHUNK], 0)
        return done

    record = SimpleNamespace(nbytes=len(image), chunk_bytes=CHUNK, checksums=checksums_of(image, CHUNK))
    whole = Image(None, record, segment.address, SimpleNamespace(write=write))  # type: ignore[arg-type]
    with path.open("w+b") as file:
        image_writes.write_image(file.fileno(), whole, pool, tmp_path, direct=True)
    assert path.read_bytes() == image


@pytest.mark.parametrize("direct", [True, False])
def test_some_chunks_alone_are_written(pool: Pool, tmp_path: Path, direct: bool) -> None:
    image, path = image_of(3 * CHUNK + 5), tmp_path / "image"
    segment, checksums = segment_with(image), checksums_of(image, CHUNK)
    with path.open("w+b") as file:

        def write_only(*chunks: int) -> None:
            FileWrite(
                pool, file.fileno(), segment.address, len(image), chunk_bytes=CHUNK, checksums=checksums,
                direct=direct, only=chunks,
            ).wait(30)  # fmt: skip

        write_only()
        assert path.read_bytes() == bytes(len(image))  # as long as it will be
        write_only(1, 3)
        assert path.read_bytes() == bytes(CHUNK) + image[CHUNK : 2 * CHUNK] + bytes(CHUNK) + image[3 * CHUNK :]
        write_only(0, 2)
        assert path.read_bytes() == image
        with pytest.raises(ValueError, match="no chunk 4"):
            write_only(4)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, CHUNK, CHUNK + 1, 5 * CHUNK + 12345])
def test_there_and_back(pool: Pool, tmp_path: Path, direct: bool, nbytes: int) -> None:
    image, path = image_of(nbytes), tmp_path / "image"
    path.write_bytes(b"x" * 500_000)  # an older, longer file
    with path.open("r+b"):
        write(pool, path, image, direct=direct)
    assert path.read_bytes() == image
    segment = Segment("test", nbytes + 100)
    segment.view(0, nbytes + 100)[:] = b"\xaa" * (nbytes + 100)
    with path.open("rb") as file:
        job = FileRead(
            pool,
            file.fileno(),
            segment.address,
            nbytes,
            chunk_bytes=CHUNK,
            checksums=checksums_of(image, CHUNK),
            direct=direct,
        )
        assert job.wait(30)
    assert job.bad == []
    assert job.verified == -(-nbytes // CHUNK)
    assert bytes(segment.view(0, nbytes)) == image
    assert bytes(segment.view(nbytes, 100)) == b"\xaa" * 100


def test_large_chunks_are_written_in_blocks(pool: Pool, tmp_path: Path) -> None:
    image, path = image_of((21 << 20) + 77), tmp_path / "image"
    assert write(pool, path, image, direct=True, chunk_bytes=9 << 20) is None or True
    assert path.read_bytes() == image


def cached(path: Path) -> int:
    """How many pages of a file lie in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        pages = -(-len(view) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        data = np.frombuffer(view, np.uint8)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data)), found) == 0
        del data
        return sum(page & 1 for page in found)


def test_what_goes_past_the_page_cache_leaves_it_to_others(pool: Pool, tmp_path: Path) -> None:
    image = image_of((8 << 20) + 777)
    reason = write(pool, tmp_path / "direct", image, direct=True, chunk_bytes=1 << 20)
    if reason is not None:
        pytest.skip(reason)
    write(pool, tmp_path / "plain", image, direct=False, chunk_bytes=1 << 20)
    assert cached(tmp_path / "plain") > 2000 and cached(tmp_path / "direct") < 200
    segment = Segment("test", len(image))
    with (tmp_path / "direct").open("rb") as file:
        sums = checksums_of(image, 1 << 20)
        job = FileRead(
            pool, file.fileno(), segment.address, len(image), chunk_bytes=1 << 20, checksums=sums, direct=True
        )
        assert job.wait(30)
    assert cached(tmp_path / "direct") < 200


def test_what_keeps_from_direct_is_told(pool: Pool, tmp_path: Path) -> None:
    image = image_of(10_000)
    reason = write(pool, tmp_path / "image", image, direct=True, chunk_bytes=1000)
    assert reason is not None and "page" in reason
    assert (tmp_path / "image").read_bytes() == image
    assert write(pool, tmp_path / "image", image, direct=False) is None


def test_damage_and_missing_bytes_are_found(pool: Pool, tmp_path: Path) -> None:
    image, path = image_of(6 * CHUNK), tmp_path / "image"
    damaged = bytearray(image)
    damaged[CHUNK + 5] ^= 1
    damaged[4 * CHUNK] ^= 128
    path.write_bytes(damaged[: 5 * CHUNK + 10])
    for direct in (True, False):
        segment = Segment("test", len(image))
        with path.open("rb") as file:
            job = FileRead(
                pool,
                file.fileno(),
                segment.address,
                len(image),
                chunk_bytes=CHUNK,
                checksums=checksums_of(image, CHUNK),
                direct=direct,
            )
            assert job.wait(30)
        assert job.bad == [1, 4, 5]
        assert job.verified == 1


def test_an_image_that_changed_is_not_written_as_good(pool: Pool, tmp_path: Path) -> None:
    image = image_of(3 * CHUNK)
    segment = segment_with(image)
    segment.view(2 * CHUNK, 1)[0] ^= 1
    with (tmp_path / "image").open("w+b") as file:
        job = FileWrite(
            pool,
            file.fileno(),
            segment.address,
            len(image),
            chunk_bytes=CHUNK,
            checksums=checksums_of(image, CHUNK),
            direct=False,
        )
        with pytest.raises(CorruptError, match="chunk 2"):
            job.wait(30)
        with pytest.raises(CorruptError):
            job.wait()
    check = Verify(pool, segment.address, len(image), CHUNK, checksums_of(image, CHUNK))
    assert check.wait(30)
    assert check.bad == [2]


def test_the_systems_refusal_arrives_with_its_number(pool: Pool, tmp_path: Path) -> None:
    image = image_of(CHUNK)
    segment = segment_with(image)
    path = tmp_path / "image"
    path.touch()
    with path.open("rb") as file:
        job = FileWrite(
            pool,
            file.fileno(),
            segment.address,
            CHUNK,
            chunk_bytes=CHUNK,
            checksums=checksums_of(image, CHUNK),
            direct=False,
        )
        with pytest.raises(StorageError) as caught:
            job.wait(30)
    assert caught.value.errno == 9
    with pytest.raises(StorageError, match="descriptor"):
        FileRead(pool, -1, segment.address, CHUNK, chunk_bytes=CHUNK, checksums=[0], direct=False)
    with path.open("ab") as file, pytest.raises(ValueError, match="appending"):
        FileWrite(pool, file.fileno(), segment.address, CHUNK, chunk_bytes=CHUNK, checksums=[0], direct=False)
    with pytest.raises(ValueError, match="2 checksums for 1"):
        Verify(pool, segment.address, CHUNK, CHUNK, [0, 0])


def test_a_full_disk_is_told_with_its_number(pool: Pool) -> None:
    image = image_of(CHUNK)
    segment = segment_with(image)
    with Path("/dev/full").open("r+b", buffering=0) as file:
        job = FileWrite(
            pool,
            file.fileno(),
            segment.address,
            CHUNK,
            chunk_bytes=CHUNK,
            checksums=checksums_of(image, CHUNK),
            direct=False,
        )
        with pytest.raises(OSError, match="No space left") as caught:
            job.wait(30)
    assert caught.value.errno == 28


def test_only_the_chunks_that_are_asked_for_are_read(tmp_path: Path) -> None:
    data = bytes(range(256)) * 100
    path = tmp_path / "image"
    path.write_bytes(data)
    checksums = [crc32c(data[at : at + 4096]) for at in range(0, len(data), 4096)]
    image = Segment("only", len(data) + 4096 - len(data) % 4096, populate=False)
    pool = Pool("only", 2)
    with path.open("rb") as file:
        common = (pool, file.fileno(), image.address, len(data))
        read = FileRead(*common, chunk_bytes=4096, checksums=checksums, direct=False, only=[1, len(checksums) - 1])
        read.wait(None)
        with pytest.raises(ValueError, match="there is no chunk 99"):
            FileRead(*common, chunk_bytes=4096, checksums=checksums, direct=False, only=[99])
    assert read.bad == []
    view = image.view(0, len(data))
    last = 4096 * (len(checksums) - 1)
    assert bytes(view[4096:8192]) == data[4096:8192] and bytes(view[last:]) == data[last:]
    assert not any(view[:4096]) and not any(view[8192:last])
    pool.close()


LARGE = 4 << 20


def memory_of(pages: str, nbytes: int) -> Segment:
    """Shared memory on huge pages, on such as the system gives by itself, or that nobody has touched yet."""
    segment = Segment("test-io", nbytes, populate=pages == "huge")
    if pages == "the system's":
        segment.touch(1)
    if pages == "huge" and not segment.huge:
        pytest.skip("shared memory has no huge pages here")
    return segment


@pytest.mark.parametrize("pages", ["huge", "the system's", "untouched"])
def test_an_image_goes_to_disk_and_back_whatever_pages_it_lies_on(pool: Pool, tmp_path: Path, pages: str) -> None:
    image = image_of(3 * LARGE + 4097)
    checksums = checksums_of(image, LARGE)
    source, target = memory_of("huge" if pages == "untouched" else pages, len(image)), memory_of(pages, len(image))
    source.view(0, len(image))[:] = image
    with (tmp_path / "image").open("w+b") as file:
        common = {"chunk_bytes": LARGE, "checksums": checksums, "direct": True}
        assert FileWrite(pool, file.fileno(), source.address, len(image), **common).wait(60)
        assert (tmp_path / "image").read_bytes() == image
        read = FileRead(pool, file.fileno(), target.address, len(image), **common)
        assert read.wait(60)
        assert read.bad == []
        assert bytes(target.view(0, len(image))) == image
        for damaged in (LARGE + 17, len(image) - 1):
            os.pwrite(file.fileno(), bytes([image[damaged] ^ 1]), damaged)
        read = FileRead(pool, file.fileno(), target.address, len(image), **common)
        assert read.wait(60)
        assert read.bad == [1, 3]


@pytest.mark.parametrize("pages", ["huge", "the system's"])
def test_memory_that_changed_is_not_written_as_if_it_had_not(pool: Pool, tmp_path: Path, pages: str) -> None:
    image = image_of(2 * LARGE)
    source = memory_of(pages, len(image))
    source.view(0, len(image))[:] = image
    source.view(LARGE, 1)[0] ^= 1
    with (tmp_path / "image").open("w+b") as file:
        common = {"chunk_bytes": LARGE, "checksums": checksums_of(image, LARGE), "direct": True}
        job = FileWrite(pool, file.fileno(), source.address, len(image), **common)
        with pytest.raises(CorruptError, match="chunk 1 of the image in memory"):
            job.wait(60)
        file.truncate(0)
        file.write(image)
        file.flush()
        job = FileWrite(pool, file.fileno(), source.address, len(image), only=[1], **common)
        with pytest.raises(CorruptError, match="chunk 1 of the image in memory"):
            job.wait(60)
    assert (tmp_path / "image").read_bytes() == image  # what is to be put in place of something is checked first
