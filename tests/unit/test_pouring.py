"""Tensors filled from a vault, and from host memory where that cannot be; on the stand-in driver."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from standin.cuda import LAUNCH_FAILED, FakeCuda, StandIn
from zerostall import native, telemetry
from zerostall.errors import CorruptError
from zerostall.trainer import file_loads, pouring
from zerostall.trainer.devices import Devices
from zerostall.trainer.file_loads import File
from zerostall.wire.lockers import Kept

SIZES = [5000, 70_000, 4096]
CHUNK = 64 << 10
NBYTES = 4 * sum(SIZES)


class Restored:
    """Tensors to be filled; an image in host memory, and beside it in memory of the other device."""

    def __init__(self, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = fake
        self.stream = fake.stream()
        self.devices = Devices()
        monkeypatch.setattr(self.devices, "now", self._now)
        self.pool = native.Pool("test", 2)
        # A process cannot open the handle of memory of its own.
        self.vault = StandIn(fake, NBYTES // 4, index=1)
        opened = SimpleNamespace(address=self.vault.data_ptr(), close=lambda: None)
        monkeypatch.setattr(pouring.native, "Peer", lambda *_: opened)
        self.segment = native.Segment("test", NBYTES)
        data = b"".join(bytes([k + 1]) * (4 * size) for k, size in enumerate(SIZES))
        self.segment.view(0, NBYTES)[:] = data
        fake.write(self.vault, data)
        offsets = [4 * sum(SIZES[:k]) for k in range(len(SIZES))]
        sizes = [4 * size for size in SIZES]
        self.plan = native.Plan(nbytes=NBYTES, header=b"", chunk_bytes=CHUNK, offsets=offsets, sizes=sizes)
        checksums = [native.crc32c(data[at : at + CHUNK]) for at in range(0, NBYTES, CHUNK)]
        record = SimpleNamespace(nbytes=NBYTES, checksums=checksums)
        kept = Kept(gpu="GPU-other", handle=b"", offset=0, runs=((0, NBYTES),))
        self.image = pouring.Mapped(record, self.segment, 0, kept=(kept,))  # type: ignore[arg-type]

    def _now(self) -> list[tuple[native.Device, int]]:
        return [(device, self.stream) for device in self.devices._open.values()]

    def pour(self, places: tuple[int, ...] = (0, 0, 0)) -> int:
        self.tensors = [StandIn(self.fake, size, index=place) for size, place in zip(SIZES, places, strict=True)]
        return pouring.pour(
            self.pool,
            self.devices,
            self.plan,
            self.tensors,  # type: ignore[arg-type]
            range(len(SIZES)),
            self.image,
        )

    def right(self) -> bool:
        return [t.bytes() for t in self.tensors] == [bytes([k + 1]) * (4 * size) for k, size in enumerate(SIZES)]


@pytest.fixture
def restored(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Restored]:
    telemetry._said.clear()
    restored = Restored(fake, monkeypatch)
    yield restored
    restored.devices.close()
    restored.pool.close()


def said() -> str:
    return " ".join(found.text for found in telemetry.fallbacks())


def test_all_comes_from_the_vault_and_host_memory_is_left_alone(restored: Restored) -> None:
    restored.segment.view(0, NBYTES)[:] = bytes(NBYTES)
    assert restored.pour() == NBYTES
    assert restored.right() and not said()


@pytest.mark.parametrize(
    ("amiss", "why"),
    [
        (lambda restored: restored.fake.write(restored.vault, b"x"), "chunk 0 arrived as other bytes"),
        (lambda restored: restored.fake.fail("cuStreamWriteValue64", 1, LAUNCH_FAILED), "cuStreamWriteValue64"),
        (lambda restored: restored.fake.fail("cuModuleLoadData", 1, LAUNCH_FAILED), "cuModuleLoadData"),
    ],
    ids=["other bytes", "a copy", "no kernel"],
)
def test_host_memory_serves_where_the_vault_cannot(restored: Restored, amiss, why: str) -> None:
    amiss(restored)
    assert restored.pour() == 0
    assert restored.right()
    assert why in said() and "GPU-other" in said()


def test_targets_on_several_gpus_come_from_host_memory(restored: Restored) -> None:
    assert restored.pour((0, 1, 0)) == 0
    assert restored.right()
    assert "on several GPUs" in said()


def test_what_does_not_come_in_time_is_not_waited_for(restored: Restored, monkeypatch: pytest.MonkeyPatch) -> None:
    recall = native.Recall

    class Late:
        def __init__(self, *arguments: object, **options: object) -> None:
            restored.fake.hold(restored.stream)  # the copies come after it
            self.job = recall(*arguments, **options)  # type: ignore[arg-type]

        def wait(self, timeout: float) -> bool:
            assert timeout > 1
            assert not self.job.wait(0)
            restored.fake.release()
            return False

    monkeypatch.setattr(pouring.native, "Recall", Late)
    assert restored.pour() == 0
    assert restored.right()
    assert "it had not come in" in said()


@pytest.fixture
def filed(restored: Restored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pouring.Filed]:
    monkeypatch.setattr(restored.devices, "settle", lambda: restored.fake.settle(restored.stream))
    path = tmp_path / "image"
    path.write_bytes(restored.segment.view(0, NBYTES))
    record = SimpleNamespace(nbytes=NBYTES, chunk_bytes=CHUNK, checksums=restored.image.record.checksums)
    with path.open("rb") as file:
        yield pouring.Filed(record, File(file.fileno(), path, NBYTES, CHUNK, record.checksums))  # type: ignore[arg-type]


def loading(restored: Restored, filed: pouring.Filed, tensors: list, pieces: list[int]) -> pouring.Loading:
    return pouring.Loading(restored.pool, restored.devices, restored.plan, tensors, pieces, filed.file)


def test_from_a_file_to_several_devices_and_the_host(restored: Restored, filed: pouring.Filed) -> None:
    on_host = np.zeros(SIZES[1], np.float32)
    tensors = [StandIn(restored.fake, SIZES[0], index=0), on_host, StandIn(restored.fake, SIZES[2], index=1)]
    under_way = loading(restored, filed, tensors, [0, 1, 2])
    under_way.begin()
    under_way.end()
    found = [tensors[0].bytes(), on_host.tobytes(), tensors[2].bytes()]  # type: ignore[union-attr]
    assert found == [bytes([k + 1]) * (4 * size) for k, size in enumerate(SIZES)]


def test_some_chunks_from_the_file_and_the_others_from_memory(restored: Restored, filed: pouring.Filed) -> None:
    path, chunks = filed.file.path, -(-NBYTES // CHUNK)
    with path.open("r+b") as file:
        file.write(bytes(CHUNK))  # of the first chunk the file has nothing
    on_host = np.zeros(SIZES[0], np.float32)
    tensors = [on_host, *(StandIn(restored.fake, size, index=0) for size in SIZES[1:])]
    under_way = loading(restored, filed, tensors, [0, 1, 2])
    under_way.begin(list(range(1, chunks)))
    under_way.begin([0], held=restored.segment.address)
    under_way.end()
    found = [on_host.tobytes(), *(tensor.bytes() for tensor in tensors[1:])]
    assert found == [bytes([k + 1]) * (4 * size) for k, size in enumerate(SIZES)]


def test_chunk_by_chunk_in_any_order_from_places_that_are_used_again(restored: Restored, filed: pouring.Filed) -> None:
    data, place = bytes(restored.segment.view(0, NBYTES)), native.Segment("place", CHUNK)
    on_host = np.zeros(SIZES[1], np.float32)
    tensors = [StandIn(restored.fake, SIZES[0], index=0), on_host, StandIn(restored.fake, SIZES[2], index=1)]
    under_way = loading(restored, filed, tensors, [0, 1, 2])
    problems: list[BaseException] = []
    for chunk in reversed(range(-(-NBYTES // CHUNK))):
        part = data[chunk * CHUNK : (chunk + 1) * CHUNK]
        place.view(0, len(part))[:] = part
        under_way.bring(chunk, place.address)
        under_way.settled(problems)
    under_way.end()
    found = [tensors[0].bytes(), on_host.tobytes(), tensors[2].bytes()]  # type: ignore[union-attr]
    assert b"".join(found) == data and not problems
    under_way.bring(0, place.address)
    under_way.bring(1, place.address)  # what is there is another chunk's
    with pytest.raises(CorruptError, match="chunk 1"):
        under_way.end()


def test_one_that_has_ended_leaves_the_others_past_the_page_cache(filed: pouring.Filed) -> None:
    """O_DIRECT is a flag of the open file: each job has one of its own."""
    with file_loads.apart(filed.file) as one, file_loads.apart(filed.file) as other:
        fcntl.fcntl(one.fd, fcntl.F_SETFL, fcntl.fcntl(one.fd, fcntl.F_GETFL) | os.O_NOATIME)
        flags = [fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NOATIME for fd in (one.fd, other.fd, filed.file.fd)]
        assert flags == [os.O_NOATIME, 0, 0]
        assert os.pread(one.fd, NBYTES, 0) == os.pread(filed.file.fd, NBYTES, 0)


def test_a_damaged_file_is_told_by_name(restored: Restored, filed: pouring.Filed) -> None:
    assert bytes(filed.mapped(restored.pool).segment.view(0, NBYTES)) == bytes(restored.segment.view(0, NBYTES))
    data = bytearray(filed.file.path.read_bytes())
    data[CHUNK + 5] ^= 1
    filed.file.path.write_bytes(data)
    target = np.zeros(SIZES[1], np.float32)
    under_way = loading(restored, filed, [target], [1])
    under_way.begin()
    with pytest.raises(CorruptError, match=r"image: chunk 1 of \d fails its checksum"):
        under_way.end()
    with pytest.raises(CorruptError, match=r"image: chunk 1 of \d fails its checksum"):
        filed.mapped(restored.pool)
