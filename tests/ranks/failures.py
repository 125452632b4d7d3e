"""Ranks of which one fails, says what nobody expected, or is the only one to save: what the others hear."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

import zerostall
from ranks.sharded import say
from zerostall.errors import ZerostallError
from zerostall.trainer import restore as restoring


class OddError(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("no")


class Fickle:
    """Part of a state that cannot be had once, on one rank."""

    def __init__(self) -> None:
        self.fails = False
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            raise OddError("nobody knows why")
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def told(saving: zerostall.Saving, timeout: float, tier: str = "host") -> str:
    began = time.monotonic()
    try:
        saving.wait(tier, timeout=timeout)
    except ZerostallError as error:
        return f"{type(error).__name__}: {error}"
    return f"clean after {time.monotonic() - began:.1f} s"


def one_fails(where: str) -> None:
    """At step 2 rank 2 fails by an error of the user's; step 3 is saved by all, step 4 by rank 0 alone, 5 by all."""
    rank = dist.get_rank()
    state: dict[str, object] = {"w": torch.arange(9.0)}
    fickle = Fickle()
    with zerostall.Checkpointer(where, rng=False, s=state, fickle=fickle) as ckpt:
        ckpt.save(1).wait("host", timeout=60)
        exchanges = ckpt._world._exchange
        ckpt.save(1, if_exists="replace", when_busy="wait").wait("host", timeout=60)
        say("exchanges while nothing changed", ckpt._world._exchange - exchanges)
        fickle.fails = rank == 2
        try:
            saving = ckpt.save(2, when_busy="wait")
        except OddError as error:
            say("second", "raised", error)
        else:
            say("second", told(saving, 30))
        fickle.fails = False
        dist.barrier()
        state["new"] = torch.full((5,), 3.0)  # the plan of before does not do any more
        exchanges = ckpt._world._exchange
        say("third", told(ckpt.save(3, when_busy="wait"), 30))
        say("exchanges for another tensor", ckpt._world._exchange - exchanges)
        dist.barrier()
        if rank == 0:
            say("fourth", told(ckpt.save(4, when_busy="wait"), 3))
        dist.barrier()
        say("fifth", told(ckpt.save(5, when_busy="wait"), 30))
        ckpt.save(6, when_busy="wait").wait("disk", timeout=60)
    target: dict[str, object] = {"w": torch.zeros(9), "new": torch.zeros(5)}
    with zerostall.Checkpointer(where, rng=False, s=target, fickle=fickle) as ckpt:
        assert ckpt.restore() == 6
    assert torch.equal(target["w"], torch.arange(9.0)) and torch.equal(target["new"], torch.full((5,), 3.0))


def disk_fails(where: str, mended: str) -> None:
    """What each rank hears of a step whose image of rank 2 cannot be written; and of the next, once that can be."""
    state: dict[str, object] = {"w": torch.arange(9.0) + dist.get_rank()}
    with zerostall.Checkpointer(where, rng=False, s=zerostall.RankLocal(state)) as ckpt:
        say("first", told(ckpt.save(1), 60, "disk"))
        dist.barrier()
        deadline = time.monotonic() + 60
        while not Path(mended).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        say("second", told(ckpt.save(2, when_busy="wait"), 60, "disk"))
        dist.barrier()


def stale_view(where: str) -> None:
    """Two steps on disk, of which every second rank does not see the newer one yet, as with a file system's caches."""
    rank = dist.get_rank()
    state: dict[str, object] = {"w": torch.full((9,), 1.0)}
    with zerostall.Checkpointer(where, rng=False, s=state) as ckpt:
        ckpt.save(1).wait("disk", timeout=60)
        state["w"].fill_(2.0)  # type: ignore[attr-defined]
        ckpt.save(2).wait("disk", timeout=60)
    dist.barrier()
    find = restoring._find
    if rank % 2:
        restoring._find = lambda link, run: [copy for copy in find(link, run) if copy.step < 2]
    target: dict[str, object] = {"w": torch.zeros(9)}
    with zerostall.Checkpointer(where, rng=False, s=target) as ckpt:
        say("restored", ckpt.restore(), target["w"][0].item())  # type: ignore[index]
        restoring._find = find
        say("then", ckpt.restore(2), target["w"][0].item())  # type: ignore[index]
