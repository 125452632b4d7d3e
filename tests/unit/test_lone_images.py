"""Images of one rank on another node's disk: there once their commit is, checked when read, gone when evicted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from images import HandMade, make_layout, replica_of
from zerostall import native
from zerostall.core.layout import CHUNK
from zerostall.errors import CorruptError, SnapshotNotFoundError, StorageError
from zerostall.tiers import files
from zerostall.tiers.lone_images import LoneImages, Replica

LAYOUT = make_layout(CHUNK + 12345)


def test_what_is_put_is_found_again_checked_and_evicted(tmp_path: Path) -> None:
    images = LoneImages(tmp_path / "rank-00003", native.Pool("disk", 2))
    made = HandMade(LAYOUT, 5, rank=3, world=4)
    replica = replica_of(made)
    assert images.replicas() == []
    images.put(made.image, replica)
    assert LoneImages(images.where, native.Pool("disk", 1)).replicas() == [replica]
    stored = images.open(replica)
    assert stored.record == made.record and stored.layout.same(LAYOUT)
    target = native.Segment("target", 3 * CHUNK)
    images.get(replica, stored, target.address, chunks=(1,))
    assert bytes(target.view(CHUNK, LAYOUT.nbytes - CHUNK)) == made.bytes[CHUNK:] and not any(target.view(0, CHUNK))
    images.get(replica, stored, target.address)
    assert bytes(target.view(0, LAYOUT.nbytes)) == made.bytes

    again = HandMade(LAYOUT, 5, rank=3, world=4, seed=50)
    images.put(again.image, replica_of(again))
    assert images.replicas() == [replica_of(again)]
    file = next(images.where.rglob("*.safetensors"))
    with file.open("r+b") as changed:
        changed.seek(CHUNK + 1)
        changed.write(b"!?")
    with pytest.raises(CorruptError, match="first chunk 1"):
        images.get(replica_of(again), images.open(replica_of(again)), target.address)
    with pytest.raises(CorruptError, match="is not the record that was stored"):
        images.open(replica)
    images.evict(5, replica)  # what was put in its place meanwhile stays
    assert images.replicas() == [replica_of(again)]
    images.evict(5, replica_of(again))
    assert images.replicas() == [] and not file.exists()
    images.evict(5, replica)
    with pytest.raises(SnapshotNotFoundError):
        images.open(replica)


def test_an_image_stays_where_there_is_no_room_for_another_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = LoneImages(tmp_path, native.Pool("disk", 1))
    before, again = HandMade(LAYOUT, 5), HandMade(LAYOUT, 5, seed=50)
    images.put(before.image, replica_of(before))
    monkeypatch.setattr(files, "free_bytes", lambda where: LAYOUT.nbytes - 1)
    with pytest.raises(StorageError):
        images.put(again.image, replica_of(again))
    assert whole(images) == [replica_of(before)]


CALLS = ("open", "mkdir", "rename", "replace", "fsync", "unlink", "rmdir")


class Dies(BaseException):
    """As if the process had been killed there."""


def interrupted(k: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The k-th of `CALLS` fails, or all from the k-th on where the process dies. What was called is listed."""
    called: list[str] = []
    for name in CALLS:

        def call(*args: object, _name: str = name, _real: object = getattr(os, name), **more: object) -> object:
            called.append(_name)
            if len(called) == k or (len(called) > k and isinstance(error, Dies)):
                raise error
            return _real(*args, **more)  # type: ignore[operator]

        monkeypatch.setattr(os, name, call)
    return called


def whole(images: LoneImages) -> list[Replica]:
    """What is there, each read and compared with its checksums."""
    found, target = images.replicas(), native.Segment("target", 3 * CHUNK)
    for replica in found:
        images.get(replica, images.open(replica), target.address)
    return found


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), Dies()])
def test_an_image_is_replaced_or_stays_wherever_that_fails(tmp_path: Path, error: BaseException) -> None:
    before, again = (HandMade(LAYOUT, 5, seed=seed) for seed in (1, 50))
    refused, seen = 0, set()
    for k in range(1, 200):
        images = LoneImages(tmp_path / str(k), native.Pool("disk", 1))
        images.put(before.image, replica_of(before))
        with pytest.MonkeyPatch.context() as monkeypatch:
            called = interrupted(k, error, monkeypatch)
            try:
                images.put(again.image, replica_of(again))
            except (StorageError, Dies):
                refused += 1
                seen.add(called[k - 1])
                failed = True
            else:
                failed = False
        later = LoneImages(images.where, native.Pool("disk", 1))
        left = whole(later)
        if failed and not isinstance(error, Dies):
            assert left == [replica_of(before)], f"call {k}, {called[k - 1]}"
        else:
            assert left in ([replica_of(before)], [replica_of(again)]), f"call {k}"
        if not failed:
            assert left == [replica_of(again)]
        assert [path.name for path in later.where.glob("st*")] == ["step-000000000005"]
        later.put(again.image, replica_of(again))  # nothing is in the way of another try
        assert whole(later) == [replica_of(again)]
        if len(called) < k:
            break
    assert refused > 5 and {"open", "mkdir", "rename", "fsync"} <= seen


def test_what_was_not_finished_or_is_damaged_is_removed(tmp_path: Path) -> None:
    images = LoneImages(tmp_path, native.Pool("disk", 2))
    for step in (1, 2, 3, 4):
        made = HandMade(LAYOUT, step)
        images.put(made.image, replica_of(made))
    commits = [tmp_path / f"step-{step:012}" / "replica.json" for step in (1, 2, 3)]
    commits[0].unlink()
    commits[1].write_bytes(commits[1].read_bytes().replace(b'"step":2', b'"step":9'))
    assert [replica.step for replica in images.replicas()] == [3, 4]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000000003", "step-000000000004"]
    os.utime(commits[2], (7, 7))
    assert images.written(3) == 7.0 < images.written(4)
