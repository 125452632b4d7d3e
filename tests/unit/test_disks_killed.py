"""A writer to several disks is killed before each thing it does to a file system: nothing that was there is lost, no
step is there by half, and the next start leaves no image that nobody speaks of. (The short form takes every fourth.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from images import RUN, HandMade, images_of, make_layout, manifest_of
from zerostall import native
from zerostall.core.retention import Keep
from zerostall.flow.persist import Order, persist, prune
from zerostall.tiers.disk import DiskTier

LAYOUT = make_layout(5_000)
WORLD = 3
DOES = [(os, "open"), (os, "fsync"), (os, "write"), (Path, "rename"), (Path, "replace"), (Path, "unlink")]
DOES += [(Path, "rmdir"), (Path, "mkdir"), (os, "rmdir"), (os, "unlink")]


class Killed(BaseException):
    pass


class Death:
    """Comes before the call of that number, and from then on nothing is done any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.at = 0, 1 << 60
        for where, name in DOES:
            monkeypatch.setattr(where, name, self._mortal(getattr(where, name)))

    def _mortal(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls > self.at:
                raise Killed
            return real(*args, **options)

        return call

    def never(self) -> None:
        self.at = 1 << 60

    def after(self, calls: int) -> None:
        self.calls, self.at = 0, calls


@pytest.fixture
def death(monkeypatch: pytest.MonkeyPatch) -> Iterator[Death]:
    death = Death(monkeypatch)
    yield death
    death.never()


class Run:
    def __init__(self, folder: Path) -> None:
        self.where, self.more = folder / "run", [folder / "disk1", folder / "disk2"]
        self.pool = native.Pool("test", 1)
        self.where.mkdir()
        self.saved: dict[tuple[int, int], list[bytes]] = {}

    def started(self) -> DiskTier:
        """As by an agent that has just taken the folder."""
        tier = DiskTier(self.where, self.pool)
        tier.clear_leftovers()
        tier.others.use(self.more, RUN)
        return tier

    def save(self, tier: DiskTier, step: int, seed: int) -> None:
        made = [HandMade(LAYOUT, step, rank=rank, world=WORLD, seed=seed + rank) for rank in range(WORLD)]
        self.saved[step, seed] = [one.bytes for one in made]
        order = Order(manifest_of(*(one.record for one in made)), tuple(one.image for one in made), replace=True)
        outcome = persist(tier, order)
        assert outcome.error is None, outcome.error

    def found(self, step: int) -> list[bytes]:
        return images_of(DiskTier(self.where, self.pool), step, WORLD)

    def images(self) -> int:
        return sum("safetensors" in path.name for root in (self.where, *self.more) for path in root.rglob("*"))


@pytest.mark.parametrize("what", ["a new step", "a step in place of another", "retention", "the first start"])
def test_whenever_it_is_killed(tmp_path: Path, death: Death, what: str, request: pytest.FixtureRequest) -> None:
    number, killed = 0, True
    while killed:
        folder = tmp_path / str(number)
        folder.mkdir()
        run = Run(folder)
        if what != "the first start":
            tier = run.started()
            for step in (1, 2):
                run.save(tier, step, 0)
        death.after(number)
        killed = False
        try:
            if what == "the first start":
                run.save(run.started(), 2, 10)
            elif what == "a new step":
                run.save(tier, 3, 10)
            elif what == "retention":
                prune(tier, Keep(last=1), frozenset())
            else:
                run.save(tier, 2, 10)
        except Killed:
            killed = True
        death.never()
        again = run.started()
        steps = again.steps()
        for step in steps:
            assert run.found(step) in [bytes_ for (of, _), bytes_ in run.saved.items() if of == step], number
            assert again.missing(again.manifest(step)) == ""
        assert what == "the first start" or steps in ([1, 2], [1, 2, 3], [2]), (number, steps)
        assert run.images() == WORLD * len(steps), (number, what)
        run.save(again, 9, 20)  # and it goes on
        assert run.found(9) == run.saved[9, 20]
        number += 1 if request.config.getoption("--long") else 4
    assert number > (4 if what == "retention" else 20)
