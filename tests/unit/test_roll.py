"""Which saves are whole over all ranks: the table, said in words."""

from __future__ import annotations

import time

from zerostall.core.roll import NOTHING, News, Roll, Save, Spoiled


def save(step: int, turn: int = 0, epoch: int = 1) -> Save:
    return Save(epoch, step, turn)


def test_a_save_is_clean_when_every_rank_has_sealed_it() -> None:
    roll = Roll(3)
    assert roll.sealed(0, save(5), 0.0) == roll.sealed(2, save(5), 1.0) == NOTHING
    assert roll.pending() == [save(5)]
    assert roll.sealed(1, save(5), 2.0) == News(clean=(save(5),))
    assert roll.pending() == []


def test_ranks_may_be_some_saves_apart() -> None:
    roll = Roll(2)
    for step in (1, 2, 3):
        assert roll.sealed(0, save(step), 0.0) == NOTHING
    for step in (1, 2, 3):
        assert roll.sealed(1, save(step), 0.0) == News(clean=(save(step),))


def test_what_a_rank_has_passed_is_spoiled_whoever_says_so_first() -> None:
    roll = Roll(2)
    roll.sealed(0, save(1), 0.0)
    assert roll.passed(1, save(1), "torn") == News(spoiled=(Spoiled(save(1), 1, "torn"),))
    assert roll.passed(1, save(2), "torn") == NOTHING
    assert roll.sealed(0, save(2), 0.0) == News(spoiled=(Spoiled(save(2), 1, "torn"),))
    assert roll.pending() == []


def test_a_rank_that_saves_other_steps_is_found_out() -> None:
    roll = Roll(2)
    roll.sealed(0, save(1), 0.0)
    roll.sealed(0, save(2), 0.0)
    assert roll.sealed(1, save(3), 0.0).spoiled == tuple(
        Spoiled(save(step), 1, "it went on to step 3") for step in (1, 2)
    )
    assert roll.sealed(0, save(4), 0.0).spoiled == (Spoiled(save(3), 0, "it went on to step 4"),)


def test_the_same_step_saved_again_is_another_save() -> None:
    roll = Roll(2)
    roll.sealed(0, save(1, turn=0), 0.0)
    assert roll.sealed(1, save(1, turn=1), 0.0).clean == ()
    assert roll.sealed(0, save(1, turn=1), 0.0).clean == (save(1, turn=1),)


def test_images_of_two_attempts_never_meet() -> None:
    roll = Roll(2)
    roll.sealed(0, save(7, epoch=1), 0.0)
    assert roll.began(1, 2).spoiled == (Spoiled(save(7, epoch=1), 1, "the ranks have begun anew"),)
    roll.began(0, 2)
    assert roll.sealed(1, save(7, epoch=2), 0.0) == NOTHING
    assert roll.sealed(0, save(7, epoch=2), 0.0).clean == (save(7, epoch=2),)


def test_a_rank_that_is_gone_spoils_what_it_has_not_sealed() -> None:
    roll = Roll(2)
    roll.sealed(0, save(1), 0.0)
    assert roll.lost(1, "killed") == News(spoiled=(Spoiled(save(1), 1, "killed"),))
    assert roll.sealed(0, save(2), 0.0) == News(spoiled=(Spoiled(save(2), 1, "killed"),))
    roll.found(1)
    assert roll.sealed(0, save(3), 0.0) == NOTHING
    assert roll.sealed(1, save(3), 0.0).clean == (save(3),)


def test_ranks_are_waited_for_and_given_up() -> None:
    roll = Roll(3)
    roll.sealed(1, save(1), 100.0)
    assert roll.late(100.5, 1.0, 16) == []
    assert roll.late(101.5, 1.0, 16) == [(save(1), (0, 2))]
    assert roll.late(102.5, 1.0, 16) == []  # that is known
    assert roll.awaited(120.0, 30.0) == []
    assert roll.awaited(131.0, 30.0) == [(save(1), (0, 2))]
    assert roll.awaited(132.0, 30.0) == []
    assert roll.overdue(150.0, 60.0) == NOTHING
    assert roll.overdue(161.0, 60.0).spoiled == (Spoiled(save(1), 0, "it has not saved it for 60 s"),)
    assert roll.pending() == []


def test_ranks_that_come_late_hear_the_same_reason() -> None:
    roll = Roll(4)
    roll.passed(2, save(1), "out of memory")
    told = Spoiled(save(1), 2, "out of memory")
    assert roll.sealed(1, save(1), 0.0).spoiled == (told,)
    roll.sealed(2, save(2), 0.0)
    assert roll.sealed(0, save(1), 1.0).spoiled == (told,)  # not rank 1, which has sealed it, too
    assert roll.sealed(3, save(1), 1.0).spoiled == (told,)
    roll = Roll(3)
    roll.sealed(0, save(1), 0.0)
    roll.sealed(1, save(1), 0.0)
    (given_up,) = roll.overdue(70.0, 60.0).spoiled
    assert roll.sealed(2, save(1), 71.0).spoiled == (given_up,)
    roll.sealed(0, save(2), 0.0)
    roll.revoked(0, save(2), "torn")
    assert roll.sealed(1, save(2), 0.0).spoiled == (Spoiled(save(2), 0, "torn"),)
    for step in range(3, 1000):  # what is long over is forgotten
        roll.passed(0, save(step), "no")
    assert len(roll._fates) < 100


def test_one_rank_needs_nobody() -> None:
    roll = Roll(1)
    assert roll.sealed(0, save(1), 0.0).clean == (save(1),)
    assert roll.passed(0, save(2), "busy", skipped=True) == NOTHING


def test_skips_that_agree_hold_nobody_up() -> None:
    roll = Roll(4)
    for step in range(100):
        for rank in range(4):
            assert roll.passed(rank, save(step), "busy", skipped=True) == NOTHING


def test_skips_that_disagree_hold_all_up_farther_each_time_until_a_save_is_clean() -> None:
    roll = Roll(2)
    holds = []
    step = 1
    for _ in range(4):
        roll.sealed(0, save(step), 0.0)
        holds.append(roll.passed(1, save(step), "busy", skipped=True).hold - step)
        assert roll.passed(1, save(step), "busy", skipped=True).hold == 0
        step += holds[-1]
    assert holds == [1, 2, 4, 8]
    roll.sealed(0, save(step), 0.0)
    assert roll.sealed(1, save(step), 0.0).clean
    roll.passed(1, save(step + 1), "busy", skipped=True)
    assert roll.sealed(0, save(step + 1), 0.0).hold == step + 2


def test_sixteen_thousand_ranks_are_decided_in_a_moment() -> None:
    world = 16_384
    roll = Roll(world)
    start = time.process_time()
    for rank in range(world):
        news = roll.sealed(rank, save(1), 0.0)
    assert news.clean == (save(1),)
    for rank in range(world):
        roll.passed(rank, save(2), "busy", skipped=True)
    assert time.process_time() - start < 5.0  # 0.05 s where it was measured: this finds what grows with the square
