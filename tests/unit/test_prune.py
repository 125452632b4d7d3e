"""Retention on a disk with thousands of kept steps: what is in them is not read again and again."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from images import HandMade, make_layout, manifest_of
from zerostall import native
from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.retention import Keep
from zerostall.errors import StorageError
from zerostall.flow.persist import prune
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.step_files import StepFiles

MANIFEST = manifest_of(HandMade(make_layout(100), 0).record)


def commit(where: Path, step: int, metric: float | None = None, created: float = 0.0) -> Path:
    """A step of which only the manifest is there; retention asks for no more."""
    folder = where / names.step_folder(step)
    folder.mkdir(parents=True, exist_ok=True)
    found = msgspec.structs.replace(MANIFEST, step=step, metric=metric, created=created)
    (folder / names.MANIFEST).write_bytes(manifests.encode_manifest(found))
    return folder


class Opens:
    """Counts the files that are opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = os.open

        def counting(*args: object, **options: object) -> int:
            self.count += 1
            return real(*args, **options)

        monkeypatch.setattr(os, "open", counting)

    def during(self, tier: DiskTier, keep: Keep) -> tuple[int, tuple[int, ...]]:
        self.count = 0
        evicted = prune(tier, keep, frozenset())
        return self.count, evicted


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "run", native.Pool("test", 1))


def test_thousands_of_kept_steps(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(0, 50_000, 10):
        commit(tier.where, step, metric=float(step))
    opens = Opens(monkeypatch)
    assert opens.during(tier, Keep(last=3, every=10)) == (0, ())
    commit(tier.where, 50_001)
    commit(tier.where, 50_002)
    commit(tier.where, 50_003)
    commit(tier.where, 50_004)
    opened, evicted = opens.during(tier, Keep(last=3, every=10))
    assert opened <= 5  # to remove that one, durably
    assert evicted == (50_001,)
    assert opens.during(tier, Keep(last=3, every=10, best=3))[0] == 5003  # once each
    assert opens.during(tier, Keep(last=3, every=10, best=3)) == (0, ())


def test_a_step_that_was_replaced_is_read_again(tier: DiskTier) -> None:
    for step, metric in enumerate((5.0, 1.0, 4.0, 3.0)):
        commit(tier.where, step, metric=metric)
    assert prune(tier, Keep(last=1, best=2), frozenset()) == (0, 2)
    path = tier.where / names.step_folder(1) / names.MANIFEST
    commit(tier.where, 4, metric=2.0)
    path.unlink()
    commit(tier.where, 1, metric=9.0)
    assert prune(tier, Keep(last=1, best=2), frozenset()) == (1,)


def test_pins_and_damage(tier: DiskTier) -> None:
    for step in range(6):
        commit(tier.where, step, metric=float(step))
    (tier.where / names.step_folder(1) / names.PINNED).touch()
    (tier.where / names.step_folder(0) / names.MANIFEST).write_bytes(b"damaged")
    assert prune(tier, Keep(last=1, best=1), frozenset({3})) == (0, 2, 4)
    (tier.where / names.step_folder(1) / names.PINNED).unlink()
    (tier.where / names.step_folder(3) / names.PINNED).touch()
    assert prune(tier, Keep(last=1), frozenset()) == (1,)


def test_steps_go_by_their_age_and_what_cannot_be_read_stays(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, hour in enumerate((0.0, 10.0, 20.0, 23.0, 25.0, 26.0)):
        commit(tier.where, step, created=1e9 + 3600 * hour)
    (tier.where / names.step_folder(2) / names.MANIFEST).write_bytes(b"damaged")
    real = StepFiles.manifest

    def manifest(self: StepFiles, step: int) -> manifests.Manifest:
        if step == 1:
            raise StorageError("the disk does not answer")
        return real(self, step)

    monkeypatch.setattr(StepFiles, "manifest", manifest)
    assert prune(tier, Keep(last=1, within="4h"), frozenset()) == (0, 2)
    monkeypatch.setattr(StepFiles, "manifest", real)
    assert prune(tier, Keep(last=1, within=3600), frozenset()) == (1, 3)
    assert tier.steps() == [4, 5]
