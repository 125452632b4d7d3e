"""Agents of several nodes and the ranks of one run on them: one roll call, one folder, one commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import stop_agent
from hand import RULES, HandTrainer, close_all, kill_agent, wait_until
from zerostall import native
from zerostall.errors import RunMismatchError
from zerostall.tiers.disk import DiskTier
from zerostall.wire import messages as m

Join = Callable[..., list[HandTrainer]]
WORLD = 3
NODES = ((0,), (1, 2))
"""The ranks of each node."""


@pytest.fixture
def folders(agent_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Path]]:
    """The runtime folder of each node's agent."""
    monkeypatch.setenv("ZEROSTALL_AGENT_IDLE", "60")
    found = [tmp_path / f"node{number}" for number in range(len(NODES))]
    yield found
    close_all()
    for folder in found:
        stop_agent(folder)


def rank_at(folder: Path, where: Path, rank: int, here: tuple[int, ...], meeting, rules: m.Rules) -> HandTrainer:
    nodes = m.Nodes(here=here, host="127.0.0.1", meeting=meeting)
    return HandTrainer(folder, where, rank=rank, world=WORLD, rules=rules, nodes=nodes)


@pytest.fixture
def join(folders: list[Path], tmp_path: Path) -> Iterator[Join]:
    def join(epoch: int = 1, rules: m.Rules = RULES, wheres: tuple[str, ...] = ("run", "run")) -> list[HandTrainer]:
        """All ranks of an attempt; each has its memory and a slot."""
        ranks: list[HandTrainer] = []
        meeting = None
        for folder, here, where in zip(folders, NODES, wheres, strict=True):
            for rank in here:
                ranks.append(rank_at(folder, tmp_path / where, rank, here, meeting, rules))
            meeting = ranks[0].welcome.meeting
        for rank in ranks:
            rank.channel.send(m.Begin(epoch=epoch))
            rank.lease()
        return ranks

    yield join


def disk_of(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "run", native.Pool("look", 1))


def seal_all(ranks: list[HandTrainer], step: int, **wish: object) -> list:
    return [rank.seal(step, seed=10 * step + rank.rank, **{"epoch": 1, **wish}) for rank in ranks]


def test_every_node_knows_soon_who_has_not_saved_a_step(join: Join) -> None:
    """For whoever stops waiting for it; a log says so later."""
    ranks = join()
    for rank in ranks[:2]:
        rank.seal(1, seed=rank.rank, epoch=1)
    for rank in ranks[:2]:
        awaiting = rank.hear(m.Awaiting)
        assert (awaiting.step, awaiting.ranks, awaiting.quiet) == (1, (2,), True)
    ranks[2].seal(1, seed=2, epoch=1)
    assert all(rank.hear(m.Reached, tier="host") for rank in ranks)


def test_a_step_is_clean_when_all_nodes_have_it_and_goes_to_disk_as_one(join: Join, tmp_path: Path) -> None:
    ranks = join()
    assert len({rank.welcome.run_id for rank in ranks}) == 1
    made = [rank.seal(1, seed=rank.rank, epoch=1, promise=True) for rank in ranks[:2]]
    assert all(rank.copies() == set() for rank in ranks)
    made.append(ranks[2].seal(1, seed=2, epoch=1, promise=True))
    for rank, image in zip(ranks, made, strict=True):
        assert rank.hear(m.Reached, tier="host").created == image.created
        assert rank.hear(m.Reached, tier="disk").created == image.created
        assert rank.copies() == {(1, "host", True), (1, "disk", True)}
        assert rank.fetch(1, "disk") == rank.fetch(1, "host") == image.bytes
        assert {copy.created for copy in rank.ask(m.Find(id=4)).copies} == {made[0].created}
    manifest = disk_of(tmp_path).manifest(1)
    assert manifest.world == WORLD and manifest.created == made[0].created


def test_what_a_rank_of_another_node_skips_all_let_go_of(join: Join) -> None:
    ranks = join()
    ranks[0].seal(1, epoch=1)
    ranks[2].seal(1, epoch=1)
    ranks[1].channel.send(m.Passed(step=1, epoch=1, turn=0, reason="busy", skipped=True))
    for rank in (ranks[0], ranks[2]):
        spoiled = rank.hear(m.Spoiled)
        assert (spoiled.step, spoiled.rank, spoiled.reason, spoiled.skipped) == (1, 1, "busy", True)
    assert {rank.hear(m.Hold).step for rank in ranks} == {2}
    seal_all(ranks, 2)
    assert [rank.hear(m.Reached, tier="host").step for rank in ranks] == [2, 2, 2]
    ranks[2].channel.send(m.Plan(epoch=1, step=9, leave=True))
    assert {rank.hear(m.Plan).step for rank in ranks} == {9}


def test_a_node_that_dies_takes_only_the_save_in_flight_with_it(join: Join, folders: list[Path]) -> None:
    ranks = join(rules=m.Rules(keep_last=3, disk_interval=3600.0))
    for step in (1, 2):
        seal_all(ranks, step)
        assert [rank.hear(m.Reached, tier="host", step=step) for rank in ranks]
    seal_all(ranks[:2], 3)
    kill_agent(folders[1])
    assert "broke" in ranks[0].hear(m.Spoiled, step=3).reason
    assert (2, "host", True) in ranks[0].copies() and (3, "host", True) not in ranks[0].copies()


def test_another_seat_at_the_same_place_hears_all_again(join: Join, folders: list[Path], tmp_path: Path) -> None:
    """What trainers do when their agent dies, they do by hand here: the next one gets the memory and the address."""
    ranks = join(rules=m.Rules(keep_last=3, disk_interval=3600.0))
    seal_all(ranks, 1)
    assert [rank.hear(m.Reached, tier="host", step=1) for rank in ranks]
    for rank in ranks[1:]:
        rank.seal(2, epoch=1)
    meeting = ranks[0].welcome.meeting
    kill_agent(folders[0])
    again = rank_at(folders[0], tmp_path / "run", 0, NODES[0], meeting, RULES)
    assert again.welcome.meeting == meeting
    again.lease()
    again.seal(2, epoch=1, promise=True)
    for rank in (again, *ranks[1:]):
        assert rank.hear(m.Reached, tier="host", step=2)
        assert rank.hear(m.Reached, tier="disk", step=2)
    assert disk_of(tmp_path).manifest(2).world == WORLD


def test_the_newest_step_gets_to_disk_when_all_trainers_are_gone(join: Join, tmp_path: Path) -> None:
    ranks = join(rules=m.Rules(keep_last=3, disk_interval=3600.0))
    for step in (1, 2, 3):
        seal_all(ranks, step)
        assert [rank.hear(m.Reached, tier="host", step=step) for rank in ranks]
    for rank in reversed(ranks):
        rank.leave()
    wait_until(lambda: 3 in disk_of(tmp_path).steps(), 30)
    ranks = join(epoch=2)
    assert all({(3, "host", True), (3, "disk", True)} <= rank.copies() for rank in ranks)
    assert {rank.welcome.epoch for rank in ranks} == {1}


def test_a_folder_of_its_own_on_one_node_is_told(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HandTrainer(folders[1], tmp_path / "elsewhere").leave()  # a run of its own is there
    first = rank_at(folders[0], tmp_path / "run", 0, NODES[0], None, RULES)
    with pytest.raises(RunMismatchError, match="one folder that all of them share"):
        rank_at(folders[1], tmp_path / "elsewhere", 1, NODES[1], first.welcome.meeting, RULES)


def test_rank_0_may_be_on_another_node_the_next_time(join: Join, folders: list[Path], tmp_path: Path) -> None:
    """Launchers may number nodes anew: the seat moves, and with it the folder's lock."""
    ranks = join()
    seal_all(ranks, 1, promise=True)
    assert [rank.hear(m.Reached, tier="disk") for rank in ranks]
    for rank in ranks:
        rank.leave()
    first = rank_at(folders[1], tmp_path / "run", 0, (0,), None, RULES)
    meeting = first.welcome.meeting
    again = [first, *(rank_at(folders[0], tmp_path / "run", rank, (1, 2), meeting, RULES) for rank in (1, 2))]
    for rank in again:
        assert (1, "disk", True) in rank.copies() and rank.welcome.run_id == ranks[0].welcome.run_id
        rank.channel.send(m.Begin(epoch=2))
        rank.lease()
    seal_all(again, 2, epoch=2, promise=True)
    for rank in again:
        assert rank.hear(m.Reached, tier="disk", step=2)
    assert disk_of(tmp_path).manifest(2).world == WORLD


def test_what_a_lost_node_left_in_memory_stays_though_it_cannot_get_to_disk(join: Join, folders: list[Path]) -> None:
    """Half of the step is here, half may be in a replica; the disk has never had it, and nobody else the folder."""
    ranks = join(rules=m.Rules(keep_last=3, disk_interval=3600.0))
    seal_all(ranks, 1, promise=True)
    assert [rank.hear(m.Reached, tier="disk", step=1) for rank in ranks]
    seal_all(ranks, 2)
    assert [rank.hear(m.Reached, tier="host", step=2) for rank in ranks]
    kill_agent(folders[1])
    ranks[0].leave()
    (first, *_) = join(epoch=2)
    assert {(1, "disk", True), (2, "host", True)} <= first.copies()
