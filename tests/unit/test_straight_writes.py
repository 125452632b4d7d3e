"""Images that a vault writes straight to disk: what the vault does, and what its agent makes of the answers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from images import LAYOUT_OF_ALL, record_of
from standin.cufile import NOT_SUPPORTED, FakeCuFile
from zerostall import telemetry
from zerostall.agent import straight_writes
from zerostall.agent.locker import Answer
from zerostall.agent.shelf import Locker, Shelf
from zerostall.agent.straight_writes import StraightWrites
from zerostall.core.candidates import Past
from zerostall.core.places import Places, gaps
from zerostall.native import Device, Segment, Vault, crc32c
from zerostall.tiers.contract import Image
from zerostall.tiers.host import Held
from zerostall.wire import lockers as w

CHUNK = 64 << 10
CHUNKS = 5
IMAGE = b"".join(bytes([number + 1]) * CHUNK for number in range(CHUNKS)) + b"the rest"
SUMS = [crc32c(IMAGE[at : at + CHUNK]) for at in range(0, len(IMAGE), CHUNK)]
RUNS = ((100, CHUNK), (CHUNK + 200, len(IMAGE) - CHUNK - 200))
"""What the vault has of it; the rest is in host memory alone."""


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5), st.integers(0, 40), st.integers(0, 40))
def test_gaps_are_what_is_in_no_run(steps: list[tuple[int, int]], begin: int, end: int) -> None:
    runs, at = [], 0
    for gap, size in steps:
        runs.append((at + gap, size))
        at += gap + size
    there = {byte for offset, size in runs for byte in range(offset, offset + size)}
    found = gaps(tuple(runs), begin, end)
    assert [byte for offset, size in found for byte in range(offset, offset + size)] == [
        byte for byte in range(begin, end) if byte not in there
    ]
    assert all(size > 0 for _, size in found)


# ------------------------------------------------------------------------------------------------------ the vault


class InVault:
    """One image in a vault's second place, without what only host memory has of it; and a file for it."""

    def __init__(self, device: Device, path: Path) -> None:
        self.said: list[Any] = []
        stride = -(-len(IMAGE) // 4096) * 4096
        self.locker = Locker(Vault(device, 2 * stride), stride)
        self.segment = Segment("test", 2 * stride)
        self.at = self.locker.memory.address + stride
        self.segment.view(4096, len(IMAGE))[:] = IMAGE
        ctypes.memset(self.segment.address + 4096 + RUNS[0][0], 0, RUNS[0][1])  # this the vault alone has
        for offset, size in RUNS:
            ctypes.memmove(self.at + offset, IMAGE[offset : offset + size], size)
        self.segments = {7: self.segment}
        self.lockers = {3: self.locker}
        self.shelf = Shelf(device, self.lockers, self.segments, self.said.append)
        self.path = path
        self.path.write_bytes(bytes(len(IMAGE)))
        with self.path.open("r+b") as file:
            self.shelf.show(1, file.fileno())

    def write(self, first: int, end: int, **other: int) -> Any:
        """The vault's answer."""
        order = {"id": 9, "file": 1, "locker": 3, "place": 1, "memory": 7, "offset": 4096, **other}
        missing = gaps(RUNS, first * CHUNK, end * CHUNK)
        order |= {"chunk_bytes": CHUNK, "first": first, "checksums": tuple(SUMS[first:end]), "missing": missing}
        self.shelf.write(w.Write(**order))  # type: ignore[arg-type]
        self.shelf.forget(0)  # when this returns, what was ordered before is done
        return self.said.pop()


@pytest.fixture
def shown(device: Device, tmp_path: Path) -> Callable[[], InVault]:
    return lambda: InVault(device, tmp_path / "image")


def test_whole_chunks_go_to_the_file(cufile: FakeCuFile, shown: Callable[[], InVault]) -> None:
    there = shown()
    assert there.write(0, 2) == w.Written(id=9)
    assert there.path.read_bytes() == IMAGE[: 2 * CHUNK] + bytes(len(IMAGE) - 2 * CHUNK)
    assert there.write(2, CHUNKS) == w.Written(id=9)
    assert there.path.read_bytes() == IMAGE[: CHUNKS * CHUNK] + bytes(8)
    assert cufile.registered() == 1 and cufile.count("cuFileHandleRegister") == 1
    there.shelf.hide(1)
    there.shelf.forget(3)
    assert cufile.registered() == 0
    assert there.write(0, 1).reason == "the vault does not have the file"


def test_what_the_device_finds_wrong_is_not_written(cufile: FakeCuFile, shown: Callable[[], InVault]) -> None:
    there = shown()
    ctypes.memset(there.at + 3 * CHUNK + 5, 0xEE, 1)
    answer = there.write(2, CHUNKS)
    assert isinstance(answer, w.Stuck) and "chunk 3 fails its checksum" in answer.reason
    assert cufile.count("cuFileWrite") == 0
    assert there.write(0, 3) == w.Written(id=9)


def test_what_is_not_there_is_told(cufile: FakeCuFile, shown: Callable[[], InVault]) -> None:
    there = shown()
    assert there.write(0, 1, locker=4).reason == "the vault does not have it"
    assert there.write(0, 1, memory=8).reason == "the vault does not have the rest of it"
    assert "within the vault's memory" in there.write(0, 1, place=3).reason
    cufile.fail("cuFileWrite", 1, 28)
    assert "No space left" in there.write(0, 1).reason
    assert there.write(0, 1) == w.Written(id=9)


@pytest.mark.usefixtures("cufile")
def test_off_is_not_straight(shown: Callable[[], InVault], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSTALL_GDS", "off")
    assert shown().write(0, 1) == w.NotStraight(id=9, reason="switched off", fallback=False)


def test_a_file_that_is_refused_and_a_word_that_is_none(
    cufile: FakeCuFile, shown: Callable[[], InVault], monkeypatch: pytest.MonkeyPatch
) -> None:
    cufile.fail("cuFileHandleRegister", 1, NOT_SUPPORTED)
    there = shown()
    assert "(5008)" in there.write(0, 1).reason
    monkeypatch.setenv("ZEROSTALL_GDS", "perhaps")
    assert "auto, on, off" in there.write(0, 1).reason


# ------------------------------------------------------------------------------------------------------ the agent


class Bench:
    """One rank's writes, whose locker answers as a test says: "" for written, else why it is not."""

    def __init__(self, *answers: Answer | str, handle: bytes = b"GPU-1") -> None:
        self.answers = list(answers)
        self.orders: list[w.Write] = []
        self.files: list[int] = []
        self.advanced = 0
        self.places = Places(1)
        self.past = Past(5, 5.0)
        assert self.places.reserve() == 0
        self.places.drain(0)
        self.places.keep(0, self.past, RUNS)
        locker = SimpleNamespace(
            handle=handle, gpu="GPU-1", key=3, places=self.places, show=lambda tier: None, write=self._write
        )
        vaults = SimpleNamespace(
            next_order=lambda: len(self.orders) + 1,
            show_file=lambda gpu, key, fd: self.files.append(key),
            hide_file=lambda gpu, key: self.files.remove(key),
        )
        self.writes = StraightWrites(vaults, (locker,), self._advance)  # type: ignore[arg-type]
        record = msgspec.structs.replace(
            record_of(LAYOUT_OF_ALL, bytes(LAYOUT_OF_ALL.nbytes), 5, created=5.0),
            nbytes=len(IMAGE),
            chunk_bytes=CHUNK,
            checksums=SUMS,
        )
        self.held = Held(0, Image(LAYOUT_OF_ALL, record, 0), 4096)

    def _advance(self) -> None:
        self.advanced += 1

    def _write(self, order: w.Write, then: Callable[[Answer], None]) -> None:
        self.orders.append(order)
        self.then = then
        assert self.places.reserve() is None  # nobody gets the place meanwhile
        if self.answers:
            said = self.answers.pop(0)
            if isinstance(said, str):
                said = w.Stuck(id=order.id, reason=said) if said else w.Written(id=order.id)
            then(said)

    def write(self, path: Path, turn: Callable[[], object] = lambda: None) -> int:
        image = self.writes.of(SimpleNamespace(key=7), self.held, lambda call: call())  # type: ignore[arg-type]
        if image.device is None:
            return -1
        with path.open("wb") as file:
            return image.device.write(file.fileno(), path.parent, SimpleNamespace(wait=turn))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straight_writes, "STRETCH", 2 * CHUNK)
    monkeypatch.setattr(telemetry, "_said", {})


def said() -> str:
    return " ".join(fallback.text for fallback in telemetry.fallbacks())


def test_an_image_is_written_stretch_by_stretch(tmp_path: Path) -> None:
    bench, turns = Bench("", "", ""), list[int]()
    assert bench.write(tmp_path / "image", lambda: turns.append(len(bench.orders))) == CHUNKS
    assert [(order.first, len(order.checksums)) for order in bench.orders] == [(0, 2), (2, 2), (4, 1)]
    assert turns == [0, 1, 2]
    assert [order.missing for order in bench.orders] == [((0, 100), (CHUNK + 100, 100)), (), ()]
    assert bench.files == [] and bench.advanced == 3 and bench.writes.nbytes == CHUNKS * CHUNK
    assert "went straight to disk" in bench.writes.words()
    assert bench.places.reserve() == 0


def test_a_capture_gets_the_place_and_the_rest_comes_from_host_memory(tmp_path: Path) -> None:
    bench = Bench("", "", "")

    def turn() -> None:
        if len(bench.orders) == 1:
            assert bench.places.reserve() == 0

    assert bench.write(tmp_path / "image", turn) == 2
    assert bench.files == [] and not said()
    assert bench.write(tmp_path / "image") == -1  # the image is there no more


def test_what_goes_wrong_is_said_and_the_next_image_is_tried(tmp_path: Path) -> None:
    bench = Bench("", "cuFile refuses the file: (5027)", "", "", "")
    assert bench.write(tmp_path / "image") == 2
    assert "written through host memory" in said() and "/run/udev" in said()
    assert "through host memory: cuFile" in bench.writes.reason or "5027" in bench.writes.reason
    assert bench.write(tmp_path / "image") == CHUNKS
    assert bench.writes.reason == ""


@pytest.mark.parametrize("wanted", [True, False])
def test_a_vault_that_does_not_do_it_is_asked_once(tmp_path: Path, wanted: bool) -> None:
    bench = Bench(w.NotStraight(id=1, reason="nvidia-fs is not loaded", fallback=wanted))
    assert bench.write(tmp_path / "image") == 0
    assert bench.write(tmp_path / "image") == -1
    assert bool(said()) == wanted
    assert bench.writes.words() == ", to disk through host memory: nvidia-fs is not loaded"


def test_off_asks_no_vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSTALL_GDS", "off")
    bench = Bench("")
    assert bench.write(tmp_path / "image") == -1
    assert "switched off" in bench.writes.words() and bench.orders == []


def test_one_that_does_not_answer_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straight_writes, "PATIENCE_SECONDS", 0.01)
    bench = Bench("")
    assert bench.write(tmp_path / "image") == 2
    assert "has not written it" in said()
    assert bench.places.reserve() is None  # it may still be at it
    assert bench.write(tmp_path / "image") == -1


def test_an_agent_that_leaves_waits_for_no_vault(tmp_path: Path) -> None:
    bench = Bench("")
    assert bench.write(tmp_path / "image", lambda: bench.orders and bench.writes.close()) == 2
    assert not said()
    assert bench.advanced == 1  # not once it leaves


def test_an_answer_that_comes_when_the_agent_leaves_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(straight_writes, "PATIENCE_SECONDS", 0.01)
    bench = Bench()
    assert bench.write(tmp_path / "image") == 0
    bench.writes.close()
    bench.then(w.Stuck(id=1, reason="the vault is gone"))
    assert bench.advanced == 0 and bench.places.reserve() == 0
