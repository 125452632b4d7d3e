"""What vouches for an image is written anew only into the step that it was in."""

from __future__ import annotations

from pathlib import Path

import pytest

from images import HandMade, make_layout, manifest_of
from zerostall import native
from zerostall.core.manifest import Manifest, Record
from zerostall.errors import SnapshotNotFoundError
from zerostall.tiers import vouching
from zerostall.tiers.disk import DiskTier

LAYOUT = make_layout(5000)


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged, too"])
def test_nothing_of_a_step_gets_into_the_one_that_has_taken_its_place(tmp_path: Path, damaged: bool) -> None:
    """Between the look and the write the writer may have committed another step of that number."""
    pool = native.Pool("test", 1)
    disk = DiskTier(tmp_path / "run", pool)
    old, new = HandMade(LAYOUT, 3, seed=1), HandMade(LAYOUT, 3, seed=2)
    for made in (old, new):
        disk.put(made.image)
        disk.commit(manifest_of(made.record), replace=True)
    manifest = tmp_path / "run/step-000000000003/manifest.json"
    if damaged:
        manifest.write_bytes(b"{")
    before = manifest.read_bytes()
    parts: list[Manifest | Record] = [manifest_of(old.record), old.record]
    for part in parts:
        with pytest.raises(SnapshotNotFoundError, match="another step 3"):
            vouching.write_again(disk, part)
    assert manifest.read_bytes() == before
    vouching.write_again(disk, manifest_of(new.record))
    assert disk.open(3, 0).record == new.record
    pool.close()


def test_whose_images_are_here_is_seen_where_the_file_that_says_so_is_damaged(tmp_path: Path) -> None:
    """Else the step would be lost on all nodes for the smallest of its files."""
    pool = native.Pool("test", 1)
    disk = DiskTier(tmp_path / "run", pool)
    mine, others = HandMade(LAYOUT, 3, world=2), HandMade(LAYOUT, 3, rank=1, world=2)
    disk.put(mine.image)
    disk.commit(manifest_of(mine.record, others.record), here=[0])
    file = tmp_path / "run/step-000000000003/ranks.json"
    for data in (b"", b"{", file.read_bytes().replace(b"[0]", b"[1]")):
        file.write_bytes(data)
        assert disk.here(3) == {0}
        assert disk.open(3, 0).record == mine.record
        with pytest.raises(SnapshotNotFoundError, match="another node's disk"):
            disk.open(3, 1)
    pool.close()
