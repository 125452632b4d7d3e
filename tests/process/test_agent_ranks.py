"""One agent and several ranks, each a connection: when a step is clean, spoiled, held off, given up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from hand import LAYOUT, RULES, HandTrainer, close_all
from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.errors import RunMismatchError, ZerostallError
from zerostall.tiers.disk import DiskTier
from zerostall.wire import messages as m

Join = Callable[..., list[HandTrainer]]


@pytest.fixture
def join(own_agent: Path, tmp_path: Path) -> Iterator[Join]:
    def join(world: int = 2, epoch: int = 1, rules: m.Rules = RULES) -> list[HandTrainer]:
        """All ranks of an attempt; each has its memory and a slot."""
        ranks = [HandTrainer(own_agent, tmp_path / "run", rank=rank, world=world, rules=rules) for rank in range(world)]
        for rank in ranks:
            rank.channel.send(m.Begin(epoch=epoch))
            rank.lease()
        return ranks

    yield join
    close_all()


def pass_by(rank: HandTrainer, step: int, *, epoch: int = 1, skipped: bool = True) -> None:
    rank.channel.send(m.Passed(step=step, epoch=epoch, turn=0, reason="busy", skipped=skipped))


def leave(ranks: list[HandTrainer]) -> None:
    for rank in ranks:
        rank.leave()


def test_a_step_is_clean_when_all_have_sealed_it_and_goes_to_disk_as_one(join: Join, tmp_path: Path) -> None:
    first, second = join()
    one = first.seal(1, epoch=1, promise=True)
    assert first.copies() == second.copies() == set()
    two = second.seal(1, seed=7, epoch=1)
    for rank, made in ((first, one), (second, two)):
        assert rank.hear(m.Reached, tier="host").created == made.created
        assert rank.hear(m.Reached, tier="disk").created == made.created
    assert first.copies() == second.copies() == {(1, "host", True), (1, "disk", True)}
    assert (first.fetch(1, "disk"), second.fetch(1, "disk")) == (one.bytes, two.bytes)
    manifest = DiskTier(tmp_path / "run", native.Pool("look", 1)).manifest(1)
    assert manifest.world == 2 and manifest.created == one.created
    assert {copy.created for rank in (first, second) for copy in rank.ask(m.Find(id=4)).copies} == {one.created}


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_agent_tells_what_all_ranks_images_are_and_quotes_their_records(join: Join, tier: str) -> None:
    ranks = join()
    made = [rank.seal(1, seed=number, epoch=1, promise=True) for number, rank in enumerate(ranks)]
    ranks[0].hear(m.Reached, tier=tier)
    told = ranks[1].ask(m.Describe(id=7, step=1, tier=tier))
    assert [layouts.decode(data).digest for data in told.layouts] == [LAYOUT.digest]
    assert (told.layout_of, told.begins, told.created) == ((0, 0), ((), ()), made[0].created)
    assert [manifests.decode_record(data).rank for data in told.records] == [0, 1]
    quoted = ranks[1].ask(m.Quote(id=8, step=1, tier=tier, created=told.created, ranks=(1, 0)))
    assert quoted.records == told.records[::-1]
    for wrong in ({"created": told.created + 1}, {"ranks": (2,)}, {"step": 2}):
        request = m.Quote(id=9, step=1, tier=tier, created=told.created, ranks=(1,))
        with pytest.raises(ZerostallError):
            ranks[0].ask(msgspec.structs.replace(request, **wrong))


def test_what_one_rank_skips_or_tears_the_others_let_go_of(join: Join) -> None:
    first, second = join()
    made = first.seal(1, epoch=1)
    pass_by(second, 1)
    assert first.hear(m.Spoiled) == m.Spoiled(step=1, created=made.created, rank=1, reason="busy", skipped=True)
    assert first.hear(m.Hold).step == second.hear(m.Hold).step == 2
    granted = second.hear(m.Granted)
    second.channel.send(m.Discarded(slot=granted.slot, step=2, reason="torn", grant=granted.number, epoch=1))
    made = first.seal(2, epoch=1)
    assert first.hear(m.Spoiled) == m.Spoiled(step=2, created=made.created, rank=1, reason="torn")
    for rank in (first, second):
        rank.seal(3, epoch=1)
    assert first.hear(m.Reached, tier="host").step == second.hear(m.Reached, tier="host").step == 3
    second.channel.send(m.Revoked(step=3, created=second.ask(m.Find(id=4)).copies[0].created, reason="late"))
    assert first.hear(m.Spoiled).step == 3
    assert first.copies() == set()


def test_the_step_before_the_one_in_flight_is_whole_when_a_rank_dies(join: Join) -> None:
    ranks = join(3)
    for step in (1, 2, 3, 4):
        for rank in ranks:
            rank.seal(step, epoch=1)
        assert [rank.hear(m.Reached, tier="host", step=step) for rank in ranks]
    for rank in ranks[:2]:
        rank.seal(5, epoch=1)
    ranks[2].leave()
    for rank in ranks[:2]:
        spoiled = rank.hear(m.Spoiled)
        assert spoiled.step == 5 and spoiled.rank == 2 and "has ended" in spoiled.reason
    leave(ranks)
    ranks = join(3, epoch=2)
    assert all((4, "host", True) in rank.copies() for rank in ranks)
    assert not any(copy[0] == 5 for rank in ranks for copy in rank.copies())
    assert all(rank.welcome.epoch == 1 for rank in ranks)


def test_a_rank_whose_connection_breaks_comes_back_and_the_step_is_clean(join: Join, tmp_path: Path) -> None:
    """Whether the agent heard of its image before or not; nobody is told that the step is lost."""
    first, second = join()
    for step, heard in ((1, False), (2, True), (3, False)):
        _, image = second.capture(step, seed=10 + step, epoch=1)
        if heard:
            second.channel.send(image)
        first.seal(step, epoch=1)
        kept, stride = second.segment, second.stride
        assert kept is not None
        second.channel.close()  # no word of leaving
        second = HandTrainer(first.folder, tmp_path / "run", rank=1, world=2, rules=RULES)
        second.segment, second.stride = kept, stride
        second.ask(
            m.Adopt(id=3, layout=layouts.encode(LAYOUT), slots=3, images=(image,), busy_slot=None, grant=image.grant),
            kept.fileno(),
        )
        for rank in (first, second):
            rank.hear(m.Reached, tier="host", step=step)
            rank.hear(m.Reached, tier="disk", step=step)
        assert not [event for event in first.events if isinstance(event, m.Spoiled)]
    assert first.fetch(3, "host") != second.fetch(3, "host")  # each its own


def test_images_of_two_attempts_are_never_one_step(join: Join) -> None:
    ranks = join()
    for rank in ranks:
        rank.seal(4, epoch=1)
    assert ranks[0].hear(m.Reached, tier="host")
    ranks[0].seal(5, epoch=1)
    leave(ranks)
    ranks = join(epoch=2)
    ranks[1].seal(5, seed=50, epoch=2)
    assert all(copy[0] != 5 for rank in ranks for copy in rank.copies())
    ranks[0].seal(5, seed=51, epoch=2)
    assert ranks[1].hear(m.Reached, tier="host").step == 5
    assert ranks[0].hear(m.Reached, tier="host").step == 5


def test_who_is_missing_is_named_and_given_up(join: Join) -> None:
    first, _, third = join(3, rules=m.Rules(keep_last=3, patience=2.0))
    for rank in (first, third):
        rank.seal(1, epoch=1)
    for rank in (first, third):
        assert 1 in rank.hear(m.Awaiting).ranks
        spoiled = rank.hear(m.Spoiled)
        assert "has not saved it for 2 s" in spoiled.reason


def test_a_smaller_world_finds_and_keeps_what_the_larger_one_left_in_memory(join: Join, tmp_path: Path) -> None:
    ranks = join(3, rules=m.Rules(keep_last=3, disk_interval=3600.0))
    for step in (1, 2):
        for rank in ranks:
            rank.seal(step, epoch=1)
        assert [rank.hear(m.Reached, tier="host", step=step) for rank in ranks]
    ranks[1].leave()
    with pytest.raises(RunMismatchError, match="runs with 3 ranks now"):
        HandTrainer(ranks[0].folder, tmp_path / "run", rank=1, world=2)
    leave(ranks)
    ranks = join(2, epoch=2)
    assert {(copy.step, copy.tier, copy.world) for copy in ranks[0].ask(m.Find(id=4)).copies} >= {(2, "host", 3)}
    for rank in ranks:
        rank.channel.send(m.Promise(step=2, created=3.0))
    disk = DiskTier(tmp_path / "run", native.Pool("look", 1))
    for rank in ranks:
        rank.seal(3, epoch=2, promise=True)
    assert [rank.hear(m.Reached, tier="disk", step=3) for rank in ranks]
    assert disk.manifest(2).world == 3 and disk.manifest(3).world == 2


def test_a_larger_world_finds_in_memory_what_the_smaller_one_left(join: Join) -> None:
    """Ranks that were not there get it from those that were, and no step is lost for one that is not on disk yet."""
    ranks = join(2, rules=m.Rules(keep_last=3, disk_interval=3600.0))
    made: list = []
    for step in (1, 2):
        made = [rank.seal(step, seed=rank.rank, epoch=1) for rank in ranks]
        assert [rank.hear(m.Reached, tier="host", step=step) for rank in ranks]
    leave(ranks)
    ranks = join(4, epoch=2)
    for rank in ranks:
        found = rank.ask(m.Find(id=4)).copies
        assert (2, "host", True, 2, made[0].created) in {(c.step, c.tier, c.clean, c.world, c.created) for c in found}
        told = rank.ask(m.Describe(id=7, step=2, tier="host"))
        assert (told.created, told.layout_of) == (made[0].created, (0, 0))
        for other, image in enumerate(made):
            fetched, fds = rank.ask_for_memory(m.Fetch(id=5, step=2, tier="host", rank=other))
            segment = native.Segment.attach(fds[0], fetched.memory.nbytes)
            assert bytes(segment.view(fetched.offset, LAYOUT.nbytes)) == image.bytes
            segment.close()
            os.close(fds[0])
        rank.channel.send(m.Release())
