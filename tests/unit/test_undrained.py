"""When a rank counts as lost whose last image is still in a vault, and when those go on who wait for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from zerostall.agent.undrained import Undrained


class Bench:
    """Two ranks' berths, as far as they matter here."""

    def __init__(self) -> None:
        self.busy = {0: False, 1: False}
        self.berths: dict[int, Any] = {
            rank: SimpleNamespace(client=None, draining=lambda rank=rank: self.busy[rank]) for rank in (0, 1)
        }
        self.lost: list[int] = []
        self.undrained = Undrained(self.berths, lambda rank, reason: self.lost.append(rank))


def test_a_rank_is_lost_at_once_where_nothing_is_on_its_way() -> None:
    bench = Bench()
    bench.undrained.ended(0, "killed")
    assert bench.lost == [0]


def test_a_rank_is_lost_only_when_what_it_had_stowed_is_drained() -> None:
    bench = Bench()
    bench.busy = {0: True, 1: True}
    bench.undrained.ended(0, "killed")
    bench.undrained.ended(1, "killed")
    assert bench.undrained.any() and bench.lost == []
    bench.busy[1] = False
    bench.undrained.look()
    assert bench.lost == [1]
    bench.busy[0] = False
    bench.undrained.look()
    assert bench.lost == [1, 0] and not bench.undrained.any()


def test_a_rank_whose_next_trainer_has_come_is_not_lost() -> None:
    bench = Bench()
    bench.busy[0] = True
    bench.undrained.ended(0, "killed")
    bench.berths[0].client = object()
    bench.busy[0] = False
    bench.undrained.look()
    assert bench.lost == []


def test_who_waits_goes_on_when_nothing_is_on_its_way() -> None:
    bench = Bench()
    calls: list[str] = []
    bench.undrained.when_none(lambda: calls.append("at once"))
    assert calls == ["at once"]
    bench.busy[1] = True
    bench.undrained.when_none(lambda: calls.append("later"))
    bench.undrained.look()
    assert calls == ["at once"]
    bench.busy[1] = False
    bench.undrained.look()
    bench.undrained.look()
    assert calls == ["at once", "later"]
