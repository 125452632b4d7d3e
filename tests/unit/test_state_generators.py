"""Random generators go on where they were; the process's are read anew whenever they have moved on, and only then."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest
import torch

from state_trip import restore, restore_state, save, save_state
from zerostall import native
from zerostall.trainer.state import State
from zerostall.trainer.state.parts import rng
from zerostall.trainer.state.parts.rng import Generators, GeneratorStates

READER = Generators()


def check(reader: Generators = READER) -> GeneratorStates:
    seen = reader.read()
    assert seen.python == random.getstate()
    expected = np.random.get_state(legacy=False)
    assert repr(seen.numpy) == repr(expected)
    assert torch.equal(seen.torch, torch.get_rng_state())
    return seen


def test_what_is_read_is_what_the_generators_say() -> None:
    first = check()
    assert READER.read().python is first.python
    assert READER.read().numpy is first.numpy
    assert READER.read().torch is first.torch
    for use in (
        random.random,
        lambda: random.gauss(0, 1),  # leaves a second number in stock
        lambda: random.gauss(0, 1),
        lambda: random.seed(5),
        lambda: random.setstate(first.python),  # pyright: ignore[reportArgumentType]
        np.random.rand,
        np.random.standard_normal,
        np.random.randn,
        lambda: np.random.seed(7),
        lambda: np.random.set_state(first.numpy),  # pyright: ignore[reportArgumentType]
        lambda: torch.rand(1),
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.nn.functional.dropout(torch.ones(2)),
        lambda: torch.manual_seed(3),
        lambda: torch.set_rng_state(first.torch),
    ):
        before = check()
        use()
        after = check()
        assert check().python == after.python
        assert before is not after


def test_generators_that_nobody_uses_are_told_all_at_once() -> None:
    random.gauss(0, 1)
    random.gauss(0, 1)  # none is left in stock
    np.random.seed(3)
    check()
    if isinstance(READER._torch.block, native.Block):
        assert READER._still.same()
    np.random.rand()
    assert not READER._still.same()


def draw_one() -> None:
    torch.rand(1)
    random.random()
    np.random.rand()


def test_a_state_that_is_read_in_the_middle_of_anothers_read_is_that_of_now_and_so_is_each_after_it() -> None:
    """As another thread would, which saves another state: between any two steps of the interpreter."""
    READER.read()
    place, found = 0, True
    while found:
        place += 1
        one, other = Generators(), Generators()
        for reader in (one, other):
            check(reader)
        draw_one()
        left, found = place, False

        def step(frame: FrameType, event: str, arg: object, other: Generators = other) -> Callable[..., object]:
            nonlocal left, found
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if event == "opcode" and left == 0:
                found = True
                draw_one()
                check(other)
            return step

        before = sys.gettrace()
        sys.settrace(lambda frame, *_, step=step: step if frame.f_code.co_filename == rng.__file__ else None)
        try:
            one.read()
        finally:
            sys.settrace(before)
        check(other)
        check(one)
    assert place > 100


def test_numpy_may_be_given_another_generator() -> None:
    old = np.random.get_bit_generator()
    try:
        check()
        np.random.set_bit_generator(np.random.MT19937(9))
        check()
        np.random.rand()
        check()
        np.random.set_bit_generator(np.random.PCG64(9))
        assert READER.read().numpy["bit_generator"] == "PCG64"  # pyright: ignore
        np.random.rand()
        assert repr(READER.read().numpy) == repr(np.random.get_state(legacy=False))
    finally:
        np.random.set_bit_generator(old)


class Deaf(native.Block):
    """A block in which no change is ever seen."""

    def same(self) -> bool:
        return True


class Restless(native.Block):
    """One that is never seen to lie still."""

    def same(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("kind", "why"), [(Deaf, "does not tell each change"), (Restless, "does not lie still")], ids=["deaf", "restless"]
)
def test_a_block_that_tells_nothing_is_not_trusted_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, kind: type[native.Block], why: str
) -> None:
    assert rng.block_tells()
    said: list[str] = []
    monkeypatch.setattr(rng.native, "Block", kind)
    monkeypatch.setattr(rng, "say_once", lambda key, text, *values: said.append(text % values))
    torch_ = rng._Torch()
    torch_.read()
    assert said == [f"torch's CPU generator is read in full at each save, 10 us: its memory {why}"]
    assert torch.equal(torch_.state, torch.get_rng_state())
    assert not torch_.block.same()
    torch.rand(1)
    torch_.read()
    assert torch.equal(torch_.state, torch.get_rng_state())
    assert len(said) == 1


@pytest.fixture(autouse=True)
def _put_back():
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw() -> list[object]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
    ]


@pytest.mark.parametrize("drawn", range(4))
def test_generators_of_the_process(drawn: int) -> None:
    random.seed(100)
    np.random.seed(100)
    torch.manual_seed(100)
    for _ in range(drawn):
        draw()
        np.random.randn()
    state = State({})
    survey = state.survey()
    state.values(survey)
    np.random.randn()
    saved = save_state(state)
    reference = [draw() for _ in range(5)]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    restore_state(saved, State({}))
    assert [draw() for _ in range(5)] == reference
    kept = torch.get_rng_state()
    restore_state(saved, State({}, rng=False))
    assert torch.equal(torch.get_rng_state(), kept)


def test_numpys_normal_number_in_stock_is_seen() -> None:
    np.random.seed(4)
    state = State({})
    survey = state.survey()
    np.random.randn()
    one = np.random.get_state(legacy=False)["has_gauss"]
    state.values(survey)
    np.random.randn()
    two = np.random.get_state(legacy=False)["has_gauss"]
    assert (one, two) == (1, 0), "the second number came out of the stock: the generator's words did not change"
    saved = save_state(state)
    reference = np.random.randn(3).tolist()
    restore_state(saved, State({}))
    assert np.random.randn(3).tolist() == reference


def test_generators_the_user_hands_over() -> None:
    def made() -> dict[str, object]:
        return {
            "torch": torch.Generator(),
            "python": random.Random(1),
            "numpy": np.random.default_rng(1),
            "legacy": np.random.RandomState(1),
            "philox": np.random.Generator(np.random.Philox(1)),
        }

    def use(g: dict) -> list[float]:
        return [
            torch.rand(1, generator=g["torch"]).item(),
            g["python"].random(),
            g["numpy"].random(),
            g["legacy"].randn(),
            g["philox"].random(),
        ]

    source = made()
    use(source)
    saved = save(g=source, alone=source["torch"])
    reference = use(source)
    target = made()
    restore(saved, g=target, alone=target["torch"])
    assert use(target) == reference
