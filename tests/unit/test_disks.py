"""One run on several disks: how images are dealt, found again, and what a disk that is full, dead or away costs."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerostall
from images import RUN, HandMade, images_of, make_layout, manifest_of
from zerostall import native
from zerostall.core import disks
from zerostall.core import steps as names
from zerostall.core.candidates import Past
from zerostall.core.disks import AGAIN_SECONDS, Room
from zerostall.core.retention import Keep
from zerostall.errors import CorruptError, FormatError, RunMismatchError
from zerostall.flow.persist import Order, persist, prune
from zerostall.tiers import other_disks
from zerostall.tiers.disk import DiskTier
from zerostall.tiers.other_disks import OtherDisks

LAYOUT = make_layout(50_000, 7)
WORLD = 4

# ---------------------------------------------------------------------------------------------------- the decision


@given(st.lists(st.integers(0, 1 << 40), max_size=40), st.integers(1, 9))
def test_shares_are_even_and_the_same_each_time(sizes: list[int], count: int) -> None:
    rooms = [Room(1 << 50)] * count
    decision = disks.deal(sizes, rooms)
    got = [0] * count
    for nbytes, disk in zip(sizes, decision.disks, strict=True):
        got[disk] += nbytes
    assert max(got) <= sum(sizes) / count + max(sizes, default=0)
    assert decision.left_out == ()
    assert disks.deal(sizes, [Room(1 << 49)] * count) == decision


@given(st.lists(st.integers(1, 100), max_size=12), st.lists(st.integers(0, 200), min_size=1, max_size=5))
def test_no_disk_gets_more_than_it_has_room_for_but_the_first(sizes: list[int], free: list[int]) -> None:
    decision = disks.deal(sizes, [Room(one) for one in free])
    for disk in range(1, len(free)):
        assert sum(size for size, chosen in zip(sizes, decision.disks, strict=True) if chosen == disk) <= free[disk]


def test_what_is_left_out_has_a_reason() -> None:
    decision = disks.deal([10, 10, 10], [Room(100), Room(0, "dead"), Room(15)])
    assert decision.disks == (0, 2, 0)
    assert decision.left_out == ((1, "dead"), (2, "15 bytes free, 20 needed"))
    assert disks.deal([10], [Room(0, "dead"), Room(0, "dead")]).disks == (0,)


# ------------------------------------------------------------------------------------------------------- the disks


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Spread:
    """A run of four ranks on three disks."""

    def __init__(self, folder: Path) -> None:
        self.pool = native.Pool("test", 1)
        self.where = folder / "run"
        self.more = [folder / "disk 1" / "run", folder / "disk 2"]
        self.clock = Clock()
        self.where.mkdir()
        self.tier = self.opened()
        self.tier.others.use(self.more, RUN)

    def opened(self) -> DiskTier:
        """As an agent that has just started has it."""
        tier = DiskTier(self.where, self.pool)
        tier.others.clock = self.clock
        return tier

    def save(self, step: int, *, seed: int = 0, replace: bool = False) -> list[bytes]:
        made = [HandMade(LAYOUT, step, rank=rank, world=WORLD, seed=seed + 10 * rank) for rank in range(WORLD)]
        order = Order(manifest_of(*(one.record for one in made)), tuple(one.image for one in made), replace=replace)
        outcome = persist(self.tier, order)
        if outcome.error is not None:
            raise outcome.error
        return [one.bytes for one in made]

    def files(self) -> dict[str, list[str]]:
        """Where images are, by disk."""
        return {
            name: sorted(path.name for path in root.rglob("*") if "safetensors" in path.name)
            for name, root in zip(("run", "disk 1", "disk 2"), (self.where, *self.more), strict=True)
        }

    def bytes_of(self, step: int, tier: DiskTier | None = None) -> list[bytes]:
        tier = tier or DiskTier(self.where, self.pool)  # as another process finds them
        return images_of(tier, step, WORLD)


@pytest.fixture
def spread(tmp_path: Path) -> Spread:
    return Spread(tmp_path)


def test_images_are_dealt_and_found_again(spread: Spread) -> None:
    saved = spread.save(5)
    counts = {name: len(found) for name, found in spread.files().items()}
    assert counts == {"run": 2, "disk 1": 1, "disk 2": 1}
    assert spread.bytes_of(5) == saved
    assert [(one.step, one.clean) for one in zerostall.snapshots(spread.where)] == [(5, True)]
    verdicts = zerostall.verify(spread.where)
    assert verdicts[0].nbytes == WORLD * LAYOUT.nbytes
    spread.save(6)  # the same ranks to the same disks
    for disk in (spread.where, *spread.more):
        ranks = [{path.name[5:10] for path in disk.rglob(f"*step-{step:012d}/*.safetensors")} for step in (5, 6)]
        assert ranks[0] == ranks[1] != set()


def test_damage_there_is_found(spread: Spread) -> None:
    spread.save(5)
    path = next(spread.more[1].rglob("*.safetensors"))
    with path.open("r+b") as file:
        file.seek(20_000)
        file.write(b"damage")
    (verdict,) = zerostall.verify(spread.where)
    assert any(str(path) in problem and "checksum" in problem for problem in verdict.problems)
    path.unlink()
    (snapshot,) = zerostall.snapshots(spread.where)
    assert not snapshot.clean and str(spread.more[1]) in snapshot.reason


def test_retention_removes_what_lies_there(spread: Spread) -> None:
    for step in range(4):
        spread.save(step)
    assert prune(spread.tier, Keep(last=2), frozenset()) == (0, 1)
    assert {name: len(found) for name, found in spread.files().items()} == {"run": 4, "disk 1": 2, "disk 2": 2}
    assert not list(spread.more[0].glob("images/step-000000000000"))


def test_a_step_that_is_replaced_or_set_aside(spread: Spread) -> None:
    spread.save(5)
    saved = spread.save(5, seed=1, replace=True)
    assert spread.bytes_of(5) == saved
    assert sum(map(len, spread.files().values())) == WORLD
    spread.tier.set_aside([Past(5, spread.tier.created(5))])
    again = spread.save(5, seed=2)
    assert spread.bytes_of(5) == again
    assert sum(map(len, spread.files().values())) == 2 * WORLD
    spread.tier.forget_rewound(5)
    assert sum(map(len, spread.files().values())) == WORLD and spread.bytes_of(5) == again


def test_a_full_disk_is_left_out(spread: Spread, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    real = other_disks.free_bytes
    monkeypatch.setattr(other_disks, "free_bytes", lambda path: 100 if path == spread.more[0] else real(path))
    with caplog.at_level(logging.WARNING):
        saved = [spread.save(step) for step in (5, 6)]
    assert [spread.bytes_of(step) for step in (5, 6)] == saved
    assert spread.files()["disk 1"] == []
    told = [record.message for record in caplog.records if "left out" in record.message]
    assert len(told) == 1 and str(spread.more[0]) in told[0] and "100 bytes free" in told[0]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_disk_that_dies_costs_nothing_and_is_tried_again(
    spread: Spread, monkeypatch: pytest.MonkeyPatch, number: int, caplog
) -> None:
    real = OtherDisks._write
    broken = True

    def write(self: OtherDisks, path: Path, image: object, pace: object) -> None:
        if broken and path.is_relative_to(spread.more[0]):
            raise OSError(number, os.strerror(number))
        real(self, path, image, pace)  # type: ignore[arg-type]

    monkeypatch.setattr(OtherDisks, "_write", write)
    with caplog.at_level(logging.WARNING):
        saved = [spread.save(step) for step in (5, 6)]
    assert [spread.bytes_of(step) for step in (5, 6)] == saved
    assert spread.files()["disk 1"] == []
    assert sum("left out" in record.message for record in caplog.records) == 1
    broken = False
    spread.save(7)
    assert spread.files()["disk 1"] == []  # not yet
    spread.clock.now += AGAIN_SECONDS
    saved = [spread.save(8)]
    assert len(spread.files()["disk 1"]) == 1 and spread.bytes_of(8) == saved[0]


def test_a_disk_that_is_away_takes_its_steps_with_it_and_nothing_lands_in_its_place(spread: Spread) -> None:
    spread.save(5)
    away = spread.more[0].with_name("away")
    spread.more[0].rename(away)
    tier = spread.tier = spread.opened()
    tier.others.use(spread.more, RUN)
    assert tier.missing(tier.manifest(5))
    with pytest.raises(CorruptError, match="missing"):
        spread.bytes_of(5, tier)
    saved = spread.save(6)
    assert spread.bytes_of(6) == saved and not spread.more[0].exists()  # it would fill what it is mounted on
    tier.clear_leftovers()
    tier.evict(5)
    away.rename(spread.more[0])
    fresh = spread.opened()
    fresh.clear_leftovers()
    assert spread.files()["disk 1"] == []


def test_what_dead_writers_left_goes(spread: Spread) -> None:
    spread.save(5)
    before = spread.files()
    made = HandMade(LAYOUT, 6)
    spread.tier.lanes([made.image] * 2)
    spread.tier.others.put(made.image)
    folder = spread.more[1] / "images" / names.step_folder(5)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{names.kept_image(1, 'ab' * 32)}.0123456789abcdef.partial").write_bytes(b"half")
    (folder / "somebody's own").write_bytes(b"stays")
    spread.opened().clear_leftovers()
    assert spread.files() == before and (folder / "somebody's own").exists()


def test_folders_of_others_are_refused(spread: Spread, tmp_path: Path) -> None:
    other = DiskTier(tmp_path / "other", spread.pool)
    other.where.mkdir()
    with pytest.raises(RunMismatchError, match=RUN):
        other.others.use(spread.more[:1], "another")
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "run.json").write_bytes(b"")
    with pytest.raises(RunMismatchError, match="a run's own folder"):
        spread.tier.others.use([tmp_path / "third"], RUN)


def test_only_folders_that_say_so_are_read_and_swept(spread: Spread, tmp_path: Path) -> None:
    """A list that names somebody's folder gives nobody a way to remove what is in it."""
    spread.save(5)
    victim = tmp_path / "victim" / "images" / names.step_folder(5)
    victim.mkdir(parents=True)
    file = victim / names.kept_image(0, "ab" * 32)
    file.write_bytes(b"precious")
    facts = disks.RunDisks(run=RUN, folders=(*map(str, spread.more), str(tmp_path / "victim")))
    (spread.where / names.DISKS).write_bytes(disks.encode(facts))
    fresh = spread.opened()
    fresh.clear_leftovers()
    fresh.evict(5)
    assert file.read_bytes() == b"precious"
    linked = spread.more[0] / "images" / names.step_folder(5)
    linked.parent.mkdir(exist_ok=True)
    linked.symlink_to(victim)
    spread.opened().clear_leftovers()
    assert file.read_bytes() == b"precious"


@pytest.mark.parametrize("folders", [["a"], ["/a/../b"], ["/a//b"], ["/"], ["/a", "/a"], ["/a\0"]])
def test_lists_that_make_no_sense_are_refused(folders: Sequence[str]) -> None:
    body = json.dumps(
        {"version": 1, "run": RUN, "folders": folders}, separators=(",", ":"), ensure_ascii=False
    ).encode()
    data = b'{"sha256":"%s","body":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)
    with pytest.raises(FormatError):
        disks.decode_run_disks(data, source="disks.json")


def test_a_list_that_is_damaged_hides_images_and_breaks_nothing(spread: Spread) -> None:
    spread.save(5)
    (spread.where / names.DISKS).write_bytes(b"{")
    assert [one.clean for one in zerostall.snapshots(spread.where)] == [False]
    spread.save(6)
    assert [one.clean for one in zerostall.snapshots(spread.where)] == [True, True]  # written anew
