"""A rank's locker on the agent's side: who is waited for, and for how long."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from zerostall.agent.stowage import LINGER_SECONDS, PATIENCE_SECONDS, Stowage
from zerostall.wire import lockers as w
from zerostall.wire import messages as m

NBYTES = 1000


class Bench:
    """A berth, its run and the vaults, as far as they matter here."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.asked: list[Any] = []
        self.ended: list[str] = []
        slots = SimpleNamespace(fill=lambda slot: None, discard=lambda slot: None)
        segment = SimpleNamespace(nbytes=4096, fileno=lambda: 0)
        layout = SimpleNamespace(digest="layout", begins=())
        tier = SimpleNamespace(slots=slots, layout=layout, key=1, segment=segment, stride=4096)
        self.berth = SimpleNamespace(rank=0, client=object(), current=tier, send=self.told.append)
        self.passed: list[str] = []
        undrained = SimpleNamespace(look=lambda: None)
        run = SimpleNamespace(
            where="run", undrained=undrained, passed=lambda berth, save, reason: self.passed.append(reason)
        )
        vaults = SimpleNamespace(
            lend=lambda gpu, request, renter: self.asked.append(request),
            take_back=lambda gpu, key: self.asked.append("taken back"),
            show=lambda gpu, message, fd: None,
            drain=lambda gpu, order, renter: self.asked.append(order),
            next_order=lambda: len(self.asked) + 1,
            end=lambda gpu, reason: self.ended.append(reason),
        )
        self.stowage = Stowage(run, self.berth, vaults)  # type: ignore[arg-type]
        self.stowage.rent(w.Rent(gpu="GPU-1", nbytes=NBYTES))
        self.stowage.opened(w.Opened(key=self.asked[0].key, handle=b"handle", places=2))

    def stow(self, step: int) -> None:
        granted = self.stowage.reserve()
        assert granted is not None
        record = SimpleNamespace(
            step=step, created=float(step), layout="layout", begins=(), nbytes=NBYTES, chunk_bytes=NBYTES
        )
        stowed = w.Stowed(*granted, runs=((0, NBYTES),))
        self.stowage.stow(0, record, SimpleNamespace(save=None), stowed)  # type: ignore[arg-type]


def test_a_vault_that_does_not_drain_is_ended_and_its_images_are_dirty() -> None:
    bench = Bench()
    bench.stow(1)
    assert isinstance(bench.asked[-1], w.Drain)
    now = time.monotonic()
    bench.stowage.advance(now + PATIENCE_SECONDS / 2)
    assert bench.ended == []
    bench.stowage.advance(now + PATIENCE_SECONDS + 2)
    (reason,) = bench.ended
    assert "has not drained step 1" in reason
    bench.stowage.lost(reason)
    assert not bench.stowage.draining()
    (spoiled,) = [told for told in bench.told if isinstance(told, m.Spoiled)]
    assert (spoiled.kind, spoiled.step) == ("AgentError", 1) and reason in spoiled.reason
    assert bench.passed == [spoiled.reason]


def test_a_locker_waits_for_the_next_trainer_and_for_it_to_restore() -> None:
    bench = Bench()
    now = time.monotonic()
    bench.stowage.advance(now)
    bench.berth.client = None
    bench.stowage.advance(now + 1000)  # the trainer has just gone
    bench.stowage.advance(now + 1000 + LINGER_SECONDS - 1)
    bench.berth.client = object()  # another one, which has asked for nothing yet
    bench.stowage.advance(now + 1000 + LINGER_SECONDS)
    bench.stowage.advance(now + 1000 + 2 * LINGER_SECONDS - 1)
    assert "taken back" not in bench.asked
    bench.stowage.advance(now + 1000 + 2 * LINGER_SECONDS + 1)
    assert bench.asked[-1] == "taken back" and bench.stowage.nbytes() == 0


def test_the_trainer_that_has_asked_for_it_keeps_it() -> None:
    bench = Bench()
    for hours in range(5):
        bench.stowage.advance(time.monotonic() + 3600 * hours)
    assert bench.stowage.nbytes() == 2 * 4096
