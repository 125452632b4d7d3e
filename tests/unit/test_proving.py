"""The proof that ranks hold alike what they share: what is read when, who waits, and what is said."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from zerostall.core.partition import Shared
from zerostall.errors import StateError
from zerostall.trainer.devices import Devices
from zerostall.trainer.state import proving
from zerostall.trainer.state.proving import Proof


class Table:
    """In the place of a world: where two ranks meet, each on a thread of its own."""

    def __init__(self) -> None:
        self._all_here = threading.Barrier(2, timeout=60)
        self._said = [b"", b""]

    def rank(self, number: int) -> Table._Rank:
        return Table._Rank(self, number)

    class _Rank:
        def __init__(self, table: Table, number: int) -> None:
            self._table, self._number = table, number

        def gather(self, data: bytes, *, what: str) -> list[bytes]:
            self._table._said[self._number] = data
            self._table._all_here.wait()
            said = list(self._table._said)
            self._table._all_here.wait()
            return said


def proofs(
    *states: dict[str, torch.Tensor], guarded: tuple[str, ...], before: tuple[Proof | None, ...] = (None, None)
) -> list[Proof]:
    """One of each of two ranks."""
    table = Table()
    names = tuple(states[0])
    groups = [(Shared((0, 1), names), names)]
    return [
        Proof(table.rank(number), groups, state, guarded, before[number])  # pyright: ignore[reportArgumentType]
        for number, state in enumerate(states)
    ]


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100,), value), "b": torch.ones(7)}


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, a thread that would read waits."""
    real: Callable[[torch.Tensor], int] = proving.checksum
    go = threading.Event()
    training = threading.current_thread()

    def checksum(bits: torch.Tensor) -> int:
        if threading.current_thread() is not training:
            assert go.wait(60)
        return real(bits)

    monkeypatch.setattr(proving, "checksum", checksum)
    return go


def test_what_an_optimizer_guards_is_read_in_the_background(reading: threading.Event) -> None:
    both = proofs(state(1.0), state(1.0), guarded=("w", "b"))
    for proof in both:
        proof.begin(Devices())  # returns, though nothing can be read yet
        assert not proof.settled and proof.error is None
    reading.set()
    for proof in both:
        proof.await_read()
        proof.verdict()
        assert proof.settled


def test_what_others_may_change_is_read_at_once(reading: threading.Event) -> None:
    states = state(1.0), state(1.0)
    both = proofs(*states, guarded=())
    for proof in both:
        proof.begin(Devices())
    states[0]["w"].fill_(3.0)
    reading.set()
    for proof in both:
        proof.verdict()


def test_what_is_put_in_the_place_of_a_tensor_later_does_not_count(reading: threading.Event) -> None:
    parameter = torch.nn.Parameter(torch.full((100,), 1.0))
    both = proofs({"w": parameter}, {"w": torch.full((100,), 1.0)}, guarded=("w",))
    for proof in both:
        proof.begin(Devices())
    parameter.data = torch.zeros(100)
    reading.set()
    for proof in both:
        proof.verdict()


def test_both_are_told_what_differs_and_on_whom(reading: threading.Event) -> None:
    reading.set()
    both = proofs(state(1.0), state(2.0), guarded=("w",))
    for proof in both:
        proof.begin(Devices())
        proof.begin(Devices())  # the same state is looked at again: once is enough
    for proof in both:
        with pytest.raises(StateError, match=r"do not:\n  w: rank 0, others on rank 1\n  hint"):
            proof.verdict()
        assert isinstance(proof.error, StateError)


def test_what_one_found_holds_for_those_after_it(reading: threading.Event) -> None:
    """The state has changed before it was known: what is not proved again is not taken for proved."""
    first = proofs(state(1.0), state(2.0), guarded=("w", "b"))
    second = proofs({"more": torch.ones(3)}, {"more": torch.ones(3)}, guarded=("more",), before=tuple(first))
    for proof in (*first, *second):
        proof.begin(Devices())
    reading.set()
    for proof in second:
        with pytest.raises(StateError, match="w: rank 0, others on rank 1"):
            proof.verdict()
