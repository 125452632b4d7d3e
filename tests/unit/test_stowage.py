"""A rank's lockers on the agent's side: who is waited for, for how long, and what becomes of images in any order."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from images import LAYOUT_OF_ALL, record_of
from zerostall.agent.quay import Quay
from zerostall.agent.stowage import LINGER_SECONDS, PATIENCE_SECONDS, Stowage
from zerostall.core.candidates import Past
from zerostall.wire import lockers as w
from zerostall.wire import messages as m

NBYTES = LAYOUT_OF_ALL.nbytes
DATA = bytes(NBYTES)
SUMS = record_of(LAYOUT_OF_ALL, DATA, 1).checksums


class Bench:
    """A berth, its run and the vaults, as far as they matter here.

    Attributes:
        orders: what vaults have been told to do and have not answered, with its number.
        sealed, spoiled: steps.
    """

    def __init__(self, mirror: str = "") -> None:
        self.told: list[Any] = []
        self.asked: list[Any] = []
        self.ended: list[str] = []
        self.orders: dict[int, tuple[str, Any, Any]] = {}
        self.renters: dict[str, Any] = {}
        self.sealed: list[int] = []
        self.slots: list[str] = []
        slots = SimpleNamespace(fill=lambda slot: None, discard=lambda slot: self.slots.append("discarded"))
        segment = SimpleNamespace(nbytes=4096, fileno=lambda: 0)
        layout = SimpleNamespace(
            digest=LAYOUT_OF_ALL.digest, begins=LAYOUT_OF_ALL.begins, entries=LAYOUT_OF_ALL.entries
        )
        tier = SimpleNamespace(slots=slots, layout=layout, key=1, segment=segment, stride=4096)
        self.berth = SimpleNamespace(rank=0, client=object(), current=tier, send=self.told.append)
        self.passed: list[str] = []
        self.number = 0
        quay = Quay(
            seal=lambda slot, record, wish: self.sealed.append(record.step),
            passed=lambda save, reason: self.passed.append(reason),
            promise=lambda past, where: None,
            idle=lambda: None,
            advance=lambda: None,
        )
        vaults = SimpleNamespace(
            lend=self._lend,
            take_back=lambda gpu, key: self.asked.append("taken back"),
            show=lambda gpu, message, fd: None,
            order=self._order,
            next_order=self._next,
            end=lambda gpu, reason: self.ended.append(reason),
        )
        self.stowage = Stowage(Path("run"), self.berth, quay, vaults)  # type: ignore[arg-type]
        self.stowage.rent(w.Rent(gpu="GPU-1", nbytes=NBYTES, mirror=mirror))

    def _lend(self, gpu: str, request: w.Lend, renter: Any) -> None:
        self.asked.append(request)
        self.renters[gpu] = renter
        renter.opened(w.Opened(key=request.key, handle=gpu.encode(), places=2))

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _order(self, gpu: str, order: Any, renter: Any) -> None:
        self.asked.append(order)
        self.orders[order.id] = gpu, order, renter

    @property
    def spoiled(self) -> list[int]:
        return [told.step for told in self.told if isinstance(told, m.Spoiled)]

    def stow(self, step: int) -> bool:
        granted = self.stowage.reserve()
        if granted is None or not granted[0]:
            return False
        record = record_of(LAYOUT_OF_ALL, DATA, step, created=float(step))
        stowed = w.Stowed(*granted, runs=((0, NBYTES),))
        self.stowage.stow(0, record, SimpleNamespace(save=None), stowed)  # type: ignore[arg-type]
        return True

    def answer(self, order: int, *, right: bool = True, ghosts: tuple[int, ...] = ()) -> None:
        """A vault has done what it was told, or could not; what it drained was what the device held but for ghosts."""
        _, asked, renter = self.orders.pop(order)
        if not right:
            renter.stuck(order, "broken")
        elif isinstance(asked, w.Mirror):
            renter.mirrored(order)
        else:
            renter.emptied(w.Emptied(id=order, checksums=tuple(SUMS), seconds=0.0, ghosts=ghosts))

    def lose(self, gpu: str) -> None:
        """A vault ends. What it was doing is answered by nobody."""
        self.orders = {order: rest for order, rest in self.orders.items() if rest[0] != gpu}
        self.renters[gpu].lost("killed")

    def come_back(self) -> None:
        self.stowage.advance(time.monotonic() + 100)


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
    bench.renters["GPU-1"].lost(reason)
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
    assert bench.stowage.nbytes() == 2 * -(-NBYTES // 4096) * 4096


def kinds(bench: Bench) -> list[str]:
    return [f"{type(order).__name__} {gpu}" for gpu, order, _ in bench.orders.values()]


def number(bench: Bench, kind: type) -> int:
    return next(number for number, (_, order, _) in bench.orders.items() if isinstance(order, kind))


def test_an_image_is_drained_from_its_mirror_when_the_first_vault_is_gone() -> None:
    bench = Bench("GPU-2")
    bench.stow(1)
    assert kinds(bench) == ["Mirror GPU-2", "Drain GPU-1"]
    bench.answer(number(bench, w.Mirror))
    bench.lose("GPU-1")
    assert kinds(bench) == ["Drain GPU-2"] and not bench.spoiled
    bench.answer(number(bench, w.Drain))
    assert bench.sealed == [1]
    (kept,), release = bench.stowage.lend(past(1))
    assert kept.gpu == "GPU-2" and kept.handle == b"GPU-2"
    release()


def test_a_mirror_that_was_not_whole_when_the_first_vault_went_counts_for_nothing() -> None:
    bench = Bench("GPU-2")
    bench.stow(1)
    bench.lose("GPU-1")
    assert bench.spoiled == [1]
    bench.answer(number(bench, w.Mirror))
    assert not bench.sealed and not bench.stowage.lend(past(1))[0]


def test_a_drain_that_fails_waits_for_the_mirror_and_goes_on_from_there() -> None:
    bench = Bench("GPU-2")
    bench.stow(1)
    bench.answer(number(bench, w.Drain), right=False)
    assert kinds(bench) == ["Mirror GPU-2"] and bench.stowage.draining()
    bench.answer(number(bench, w.Mirror))
    assert kinds(bench) == ["Drain GPU-2"]
    bench.answer(number(bench, w.Drain))
    assert bench.sealed == [1] and not bench.spoiled


def test_bytes_that_only_the_first_copy_has_wrong_are_taken_from_the_mirror() -> None:
    bench = Bench("GPU-2")
    bench.stow(1)
    bench.answer(number(bench, w.Mirror))
    bench.answer(number(bench, w.Drain), ghosts=(0,))
    assert kinds(bench) == ["Drain GPU-2"]
    bench.answer(number(bench, w.Drain))
    assert bench.sealed == [1] and [kept.gpu for kept in bench.stowage.lend(past(1))[0]] == ["GPU-2"]


def test_where_both_copies_are_of_no_use_the_step_is_dirty() -> None:
    bench = Bench("GPU-2")
    bench.stow(1)
    bench.answer(number(bench, w.Mirror))
    for _ in range(2):
        bench.answer(number(bench, w.Drain), right=False)
    assert bench.spoiled == [1] and "could not be drained: broken" in bench.passed[0]


def test_a_place_is_not_granted_again_while_its_image_is_copied() -> None:
    bench = Bench("GPU-2")
    for step in (1, 2):
        bench.stow(step)
        bench.answer(number(bench, w.Drain))
    assert bench.sealed == [1, 2] and not bench.stow(3)
    bench.answer(number(bench, w.Mirror))
    assert bench.stow(3)


def past(step: int) -> Past:
    return Past(step, float(step))


KINDS = ["stow", "stow", "answer", "answer", "answer", "fail", "ghost", "lose", "come back"]


@given(st.data())
def test_whatever_comes_in_whatever_order_each_image_is_sealed_or_dirty(data: st.DataObject) -> None:
    bench = Bench("GPU-2")
    steps = 0
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(KINDS))
        if what == "stow":
            steps += bench.stow(steps + 1)
        elif what in ("answer", "fail", "ghost") and bench.orders:
            order = data.draw(st.sampled_from(sorted(bench.orders)))
            bench.answer(order, right=what != "fail", ghosts=(0,) if what == "ghost" else ())
        elif what == "lose":
            gpu = data.draw(st.sampled_from(["GPU-1", "GPU-2"]))
            if bench.renters[gpu].key:
                bench.lose(gpu)
        elif what == "come back":
            bench.come_back()
    while bench.orders:
        bench.answer(min(bench.orders))
    assert not bench.stowage.draining()
    assert sorted(bench.sealed + bench.spoiled) == list(range(1, steps + 1))
    assert bench.slots == ["discarded"] * len(bench.spoiled)
    for step in bench.spoiled:
        assert not bench.stowage.lend(past(step))[0]
    bench.come_back()
    granted = [bench.stow(steps + number) for number in (1, 2)]  # no place is lost
    assert granted == [True, True]
    assert sum(isinstance(order, w.Mirror) for _, order, _ in bench.orders.values()) == 2
