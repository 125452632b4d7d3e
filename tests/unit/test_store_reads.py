"""Chunks of images in a store on their way to tensors: while some come, others are there already."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
import torch

from zerostall import config
from zerostall.errors import CorruptError
from zerostall.trainer.exchange import store_reads
from zerostall.trainer.exchange.filling import Place
from zerostall.trainer.exchange.store_reads import fill_from_images

CHUNK = 1000
DATA = bytes(random.Random(5).randrange(256) for _ in range(7 * CHUNK + 123))
CPU = torch.device("cpu")


class Slow:
    """An image whose chunks come when a test lets them.

    Attributes:
        asked: chunks, in the order in which they were asked for.
        held: one that is given when nothing but what it has is missing in `targets`.
    """

    def __init__(self, held: int | None = None) -> None:
        self.stored = SimpleNamespace(record=SimpleNamespace(chunk_bytes=CHUNK))
        self.asked: list[int] = []
        self.held = held
        self.places: list[Place] = []

    def chunk_size(self, index: int) -> int:
        return min(CHUNK, len(DATA) - index * CHUNK)

    def load(self, index: int, view: memoryview) -> None:
        self.asked.append(index)
        if index == self.held:
            deadline = time.monotonic() + 60
            while not self._others_are_there(index):
                assert time.monotonic() < deadline, "nothing got to its tensor while a chunk was on its way"
                time.sleep(0.001)
        view[:] = DATA[index * CHUNK : index * CHUNK + len(view)]

    def _others_are_there(self, index: int) -> bool:
        for place in self.places:
            data = place.target.numpy().tobytes()
            for at, byte in enumerate(data, start=place.offset):
                if at // CHUNK != index and byte != DATA[at]:
                    return False
        return True


def places(*extents: tuple[int, int]) -> list[Place]:
    return [Place(offset, torch.zeros(nbytes, dtype=torch.uint8)) for offset, nbytes in extents]


def right(wanted: list[Place]) -> bool:
    return all(
        place.target.numpy().tobytes() == DATA[place.offset : place.offset + place.target.numel()] for place in wanted
    )


WANTED = ((5, 0), (10, 20), (30, 2 * CHUNK), (3 * CHUNK, 2 * CHUNK), (6 * CHUNK + 999, 2), (len(DATA) - 1, 1))


@pytest.mark.parametrize("held", [0, 2, 3, 7])
def test_what_has_come_is_in_its_tensors_while_another_chunk_is_on_its_way(
    held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "restore_threads", lambda: 2)
    image = Slow(held)
    image.places = places(*WANTED)
    fill_from_images([(image, image.places)], CPU)  # type: ignore[list-item]
    assert right(image.places)
    assert sorted(image.asked) == [0, 1, 2, 3, 4, 6, 7]  # each once, and none that nobody wants


def test_a_chunk_that_is_damaged_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(index: int, view: memoryview) -> None:
        raise CorruptError(f"chunk {index} fails its checksum")

    image = Slow()
    monkeypatch.setattr(image, "load", load)
    with pytest.raises(CorruptError, match="chunk 0"):
        fill_from_images([(image, places((0, 5 * CHUNK)))], CPU)  # type: ignore[list-item]


def test_bites_end_with_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_reads, "ROUND", 3 * CHUNK)
    image = Slow()
    chunks = list(store_reads._chunks(image, places((0, len(DATA)))))  # type: ignore[arg-type]
    assert [[chunk.index for chunk in bite] for bite in store_reads._bites(chunks)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
