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
