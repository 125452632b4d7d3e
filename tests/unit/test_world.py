"""Ranks agree: here they are threads that share a store of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from hand import wait_until
from zerostall.core.agreement import Awaited, difference
from zerostall.errors import CapabilityError, RankError, RunMismatchError, StateError, StorageError, WaitTimeoutError
from zerostall.trainer.world import World

SIZE = 4


def ranks(size: int, run: Callable[[World], object], store: object = None, *, patience: float = 60.0) -> list[object]:
    """What `run` returns, or raises, on each rank."""
    results: list[object] = [None] * size
    store = dist.HashStore() if store is None else store

    def one(rank: int) -> None:
        try:
            results[rank] = run(World(rank, size, store, patience=patience))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_everybody_gets_what_everybody_gave() -> None:
    def run(world: World) -> list[bytes]:
        for number in range(20):
            assert world.gather(bytes([world.rank, number])) == [bytes([rank, number]) for rank in range(SIZE)]
        return world.gather(b"")

    assert ranks(SIZE, run) == [[b""] * SIZE] * SIZE


def test_rank_0_decides_and_an_error_of_its_is_everybodys() -> None:
    def refuse(data) -> bytes:
        raise RunMismatchError(f"no: {len(data)}", hint="try another")

    def run(world: World) -> bytes:
        for _ in range(3):
            with pytest.raises(RunMismatchError, match="no: 4") as caught:
                world.decide(b"x", refuse, what="test")
            assert caught.value.hint == "try another"
        return world.decide(b"%d" % world.rank, b"".join, what="test")

    assert ranks(SIZE, run) == [b"0123"] * SIZE


def test_what_one_rank_fails_with_all_raise() -> None:
    def run(world: World) -> bytes:
        for error, kind in ((StateError("bad: model.w"), StateError), (KeyError("w"), RankError)):
            with pytest.raises((kind, type(error)), match=r"rank 2 of 4: .*w" if world.rank != 2 else "w"):
                with world.excused("test"):
                    if world.rank == 2:
                        raise error
                world.gather(b"")
        return world.gather(b"fine")[2]

    assert ranks(SIZE, run) == [b"fine"] * SIZE


def test_what_all_do_fails_on_all_and_only_after_all_are_through() -> None:
    through: list[int] = []

    def run(world: World) -> None:
        with pytest.raises(StorageError) as caught, world.together("test"):
            if world.rank == 1:
                raise StorageError("gone", errno=5)
            through.append(world.rank)
        assert caught.value.errno == 5 and sorted(through) == [0, 2, 3]
        with world.together("test"):
            pass

    assert ranks(SIZE, run) == [None] * SIZE


def test_ranks_at_different_points_of_the_program_are_told() -> None:
    def run(world: World) -> None:
        world.gather(b"", what="restore" if world.rank == 3 else "save")

    errors = ranks(SIZE, run)
    assert all(isinstance(error, RankError) and "rank 3 is at 'restore'" in str(error) for error in errors), errors


def test_a_missing_rank_is_named_by_all_and_coming_late_it_learns_so() -> None:
    store = dist.HashStore()

    # The others learn from rank 0, which alone is impatient here.
    results: list[object] = []

    given_up = threading.Event()

    def impatient(world: World) -> None:
        world.patience = 0.2 if world.rank == 0 else 60.0
        with pytest.raises(WaitTimeoutError, match=r"ranks? (1, )?(2, )?3 of 4"):  # others may have slept
            if world.rank == 0:
                wait_until(lambda: store.check(["hello/1", "hello/2"]))
            elif world.rank == 3:
                assert given_up.wait(60)
            world.gather(b"")
        given_up.set()
        world.patience = 60.0
        results.append(world.gather(b"%d" % world.rank))

    assert ranks(SIZE, impatient, store) == [None] * SIZE
    assert results == [[b"0", b"1", b"2", b"3"]] * SIZE


def test_rank_0_is_missed_by_the_others() -> None:
    world = World(1, 2, dist.HashStore(), patience=0.1)
    with pytest.raises(WaitTimeoutError, match="rank 0 of 2"):
        world.gather(b"")


def test_who_is_alive_is_waited_for_however_slow() -> None:
    awaited = Awaited(began=0.0, patience=10.0)
    assert awaited.late({1: 0, 2: 7}, 5.0) == []
    assert awaited.late({1: 0, 2: 8}, 10.5) == [1]
    assert awaited.late({2: 9}, 20.0) == []
    assert awaited.late({2: 9}, 29.9) == []
    assert awaited.late({2: 9}, 30.1) == [2]


def test_what_an_attempt_before_has_said_in_the_same_store_is_not_heard() -> None:
    """torchrun's store goes on through restarts of the workers; attempts may have died anywhere."""
    store = dist.HashStore()
    for attempt in range(4):

        def run(world: World, attempt: int = attempt) -> list[list[bytes]]:
            mine = b"%d.%d" % (attempt, world.rank)
            found = [world.gather(mine) for _ in range(attempt + 1)]
            if world.rank == 0:
                world._store.set(f"hello/{1 + attempt % (SIZE - 1)}", "of one that died before it was answered")
            return found

        expected = [[b"%d.%d" % (attempt, rank) for rank in range(SIZE)]] * (attempt + 1)
        assert ranks(SIZE, run, store) == [expected] * SIZE


def test_nothing_piles_up_in_the_store() -> None:
    store = dist.HashStore()

    def run(world: World) -> None:
        for _ in range(50):
            world.gather(b"x")

    ranks(2, run, store)
    assert store.num_keys() < 12


def test_what_differs_is_named() -> None:
    assert difference([{"a": "1"}, {"a": "1"}]) == ""
    assert difference([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}]) == "rank 1 has b=3, rank 0 has b=2"
    assert difference([{"a": "1"}, {"a": "1", "new": "x"}]) == "rank 1 has new=x, rank 0 has new=None"


def test_one_process_is_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = World.of()
    assert (world.rank, world.size, world.gather(b"x")) == (0, 1, [b"x"])
    with pytest.raises(KeyError), world.together("test"):
        raise KeyError
    with pytest.raises(ValueError, match="process_group"):
        World.of(object())


def test_one_of_several_processes_is_no_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(CapabilityError, match="not initialized"):
        World.of()


def test_a_slurm_task_that_trains_alone_says_so(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert World.of().size == 1
    assert "one of 4 tasks" in caplog.text


def test_patience_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("soon", "-1", "inf", "0"):
        monkeypatch.setenv("ZEROSTALL_RANKS_PATIENCE", wrong)
        with pytest.raises(ValueError, match="ZEROSTALL_RANKS_PATIENCE"):
            World.alone()
