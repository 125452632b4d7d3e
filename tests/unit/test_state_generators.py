"""The process's generators are read anew whenever they have moved on, and only then."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from zerostall.trainer.state.parts.rng import GeneratorStates


def check() -> GeneratorStates:
    seen = GeneratorStates.read()
    assert seen.python == random.getstate()
    expected = np.random.get_state(legacy=False)
    assert repr(seen.numpy) == repr(expected)
    assert torch.equal(seen.torch, torch.get_rng_state())
    return seen


def test_what_is_read_is_what_the_generators_say() -> None:
    first = check()
    assert GeneratorStates.read().python is first.python
    assert GeneratorStates.read().numpy is first.numpy
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
        lambda: torch.manual_seed(3),
    ):
        before = check()
        use()
        after = check()
        assert check().python == after.python
        assert before is not after


def test_numpy_may_be_given_another_generator() -> None:
    old = np.random.get_bit_generator()
    try:
        check()
        np.random.set_bit_generator(np.random.MT19937(9))
        check()
        np.random.rand()
        check()
        np.random.set_bit_generator(np.random.PCG64(9))
        assert GeneratorStates.read().numpy["bit_generator"] == "PCG64"  # pyright: ignore
        np.random.rand()
        assert repr(GeneratorStates.read().numpy) == repr(np.random.get_state(legacy=False))
    finally:
        np.random.set_bit_generator(old)


@pytest.fixture(autouse=True)
def _put_back():
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
