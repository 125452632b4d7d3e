"""A writer that dies while it replaces a step leaves the old or the new one, never neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from images import HandMade, make_layout, manifest_of
from zerostall import native
from zerostall.tiers.disk import DiskTier

LAYOUT = make_layout(5000)


class Died(BaseException):
    pass


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    pool = native.Pool("test", 1)
    tier = DiskTier(tmp_path / "run", pool)
    old, new = HandMade(LAYOUT, 3, seed=1), HandMade(LAYOUT, 3, seed=2)
    tier.put(old.image)
    tier.commit(manifest_of(old.record))
    tier.put(new.image)
    left = renames
    rename = Path.rename

    def dying_rename(self: Path, target: Path) -> Path:
        nonlocal left
        if self.is_dir():
            if left == 0:
                raise Died
            left -= 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dying_rename)
    if renames < 2:
        with pytest.raises(Died):
            tier.commit(manifest_of(new.record), replace=True)
    else:
        tier.commit(manifest_of(new.record), replace=True)
    monkeypatch.undo()
    again = DiskTier(tmp_path / "run", pool)
    again.clear_leftovers()
    assert again.steps() == [3]
    target = native.Segment("target", 1 << 16)
    again.get(3, 0, target.address)
    got = bytes(target.view(0, LAYOUT.nbytes))
    assert got in (old.bytes, new.bytes)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["layouts", "step-000000000003"]
