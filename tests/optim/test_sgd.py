"""zerostall.optim.SGD against torch's: results, states, flips. `test_interpreted.py` runs this with the kernel."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

from optim.test_adamw import INTERPRETED, SHAPES, assert_same, clones, everything, parameters, train
from optim.test_flips import assert_nothing_but_memory_changes
from zerostall import optim
from zerostall.errors import CapabilityError

OPTIONS: list[dict[str, Any]] = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.8, "dampening": 0.3, "maximize": True, "lr": 0.02},
    {"momentum": 0.9, "lr": torch.tensor(0.01)},
    {"weight_decay": 0.01},
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_are_those_of_torchs(options: dict[str, Any], dtype: torch.dtype) -> None:
    fused = dtype != torch.bfloat16  # torch's fused one mistakes momenta of half types on the CPU
    ours, theirs = optim.SGD(parameters(dtype), **options), torch.optim.SGD(parameters(dtype), fused=fused, **options)
    train(ours, 3)
    train(theirs, 3)
    assert_same(everything(ours), everything(theirs))


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_momentum_is_left_parameters_kept_and_results_the_same(options: dict[str, Any]) -> None:
    assert_nothing_but_memory_changes(partial(optim.SGD, **options), "momentum_buffer")


def test_states_go_both_ways() -> None:
    theirs = torch.optim.SGD(parameters(), momentum=0.9)
    train(theirs)
    ours, reference = optim.SGD(clones(theirs), momentum=0.9), torch.optim.SGD(clones(theirs), momentum=0.9)
    for optimizer in (ours, reference):
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
        train(optimizer, seed=2)
    for one, other in zip(everything(ours), everything(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    reference.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert_same(everything(ours)[len(SHAPES) :], everything(reference)[len(SHAPES) :])


def test_an_overflow_at_the_first_step_changes_nothing() -> None:
    optimizer = optim.SGD(mine := parameters(), momentum=0.9)
    before = [parameter.detach().clone() for parameter in mine]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)  # type: ignore[attr-defined]
    train(optimizer, steps=1)
    assert all(torch.equal(one, other) for one, other in zip(mine, before, strict=True))
    assert not any(state["momentum_buffer"].count_nonzero() for state in optimizer.state.values())


def test_a_differentiable_one_is_refused() -> None:
    with pytest.raises(CapabilityError, match="SGD cannot be differentiated"):
        optim.SGD(parameters(), differentiable=True)
