"""zerostall.optim.AdamW against torch's: same results, same states. `test_interpreted.py` runs this with the kernel."""

from __future__ import annotations

import copy
import io
import os
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from zerostall import optim
from zerostall.errors import CapabilityError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = [(37, 19), (4097,), (), (0,)] if INTERPRETED else [(37, 19), (3,), (4096,), (4097,), (), (0,)]
STEPS = 2 if INTERPRETED else 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"amsgrad": True, "weight_decay": 0.1},
    {"maximize": True, "lr": 0.02},
    {"weight_decay": 0.0, "betas": (0.5, 0.7), "eps": 1e-3},
    {"lr": torch.tensor(0.01)},
    {"capturable": True},
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CASES = [(options, dtype) for options in OPTIONS for dtype in DTYPES]
if INTERPRETED:
    CASES = [(options, torch.float32) for options in OPTIONS] + [(OPTIONS[0], dtype) for dtype in DTYPES[1:]]


def parameters(dtype: torch.dtype = torch.float32, shapes=SHAPES) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, steps: int = STEPS, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for _ in range(steps):
        for parameter in trained:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        optimizer.step()
    return [parameter.detach() for parameter in trained]


def everything(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = [parameter.detach() for parameter in trained]
    for parameter in trained:
        state = optimizer.state[parameter]
        found += [state[key] for key in sorted(state)]
    return found


def clones(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [Parameter(parameter.detach().clone()) for parameter in optimizer.param_groups[0]["params"]]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bit for bit; but the interpreter rounds twice where the kernel fuses, and torch's CPU kernel fuses elsewhere."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if INTERPRETED:
            ulps = 16 * torch.finfo(one.dtype).eps
            torch.testing.assert_close(one, other, rtol=ulps, atol=ulps)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize(("options", "dtype"), CASES, ids=str)
def test_results_are_those_of_torchs_fused_one(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = (
        optim.AdamW(parameters(dtype), **options),
        torch.optim.AdamW(parameters(dtype), fused=True, **options),
    )
    train(ours)
    train(theirs)
    assert_same(everything(ours), everything(theirs))


def test_groups_have_their_own_options_and_types() -> None:
    def groups() -> list[dict[str, Any]]:
        return [
            {"params": parameters(), "lr": 0.1},
            {
                "params": parameters(torch.bfloat16, SHAPES[:2]) + parameters(torch.float32, SHAPES[:2]),
                "weight_decay": 0,
            },
            {"params": parameters(torch.float64, SHAPES[2:]), "betas": (0.8, 0.9), "maximize": True},
        ]

    ours, theirs = optim.AdamW(groups()), torch.optim.AdamW(groups(), fused=True)
    train(ours)
    train(theirs)
    assert_same(everything(ours), everything(theirs))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": False}], ids=str)
def test_torchs_other_implementations_on_demand(options: dict[str, Any]) -> None:
    ours, theirs = optim.AdamW(parameters(), **options), torch.optim.AdamW(parameters(), **options)
    train(ours)
    train(theirs)
    for one, other in zip(everything(ours), everything(theirs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fused", [True, False])
def test_states_go_both_ways(fused: bool) -> None:
    theirs = torch.optim.AdamW(parameters(), amsgrad=True, fused=fused)
    train(theirs)
    blob = io.BytesIO()
    torch.save(theirs.state_dict(), blob)
    blob.seek(0)
    ours = optim.AdamW(clones(theirs))
    ours.load_state_dict(torch.load(blob))
    reference = torch.optim.AdamW(clones(theirs), fused=True)
    state = copy.deepcopy(theirs.state_dict())
    state["param_groups"][0]["fused"] = True
    reference.load_state_dict(state)
    assert ours.param_groups[0]["fused"], "a loaded state does not change how steps are computed"
    assert ours.param_groups[0]["amsgrad"]
    assert_same(everything(ours), everything(reference))
    train(ours, seed=2)
    train(reference, seed=2)
    assert_same(everything(ours), everything(reference))

    back = torch.optim.AdamW(clones(ours))
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert set(back.state_dict()["param_groups"][0]) == set(theirs.state_dict()["param_groups"][0])
    assert_same(everything(back), everything(ours))
    train(back, seed=3)
    train(ours, seed=3)
    assert_same(everything(back), everything(ours))


def test_copies_and_pickles_go_on_by_themselves() -> None:
    ours = optim.AdamW(parameters())
    train(ours)
    twin = copy.deepcopy(ours)
    train(ours, seed=2)
    train(twin, seed=2)
    assert_same(everything(twin), everything(ours))


def test_parameters_without_gradients_stay_as_they_are() -> None:
    mine = parameters()
    ours = optim.AdamW(mine)
    mine[0].grad = torch.ones_like(mine[0])
    before = [parameter.detach().clone() for parameter in mine]
    ours.step()
    assert not torch.equal(mine[0], before[0])
    assert all(torch.equal(one, other) for one, other in zip(mine[1:], before[1:], strict=True))
    assert list(ours.state) == [mine[0]]
    ours.zero_grad()
    ours.step()


def test_a_closure_gives_the_loss() -> None:
    mine = parameters(shapes=[(5,)])
    ours = optim.AdamW(mine, lr=0.1)

    def closure() -> torch.Tensor:
        ours.zero_grad()
        loss = mine[0].square().sum()
        loss.backward()
        return loss

    losses = [ours.step(closure).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[2]


@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_scaled_gradients(overflow: float) -> None:
    """What a GradScaler hands to optimizers that unscale by themselves."""
    optimizers = [optim.AdamW(parameters()), torch.optim.AdamW(parameters(), fused=True)]
    gradients = []
    for optimizer in optimizers:
        assert optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
        train(optimizer)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.tensor(overflow)  # type: ignore[attr-defined]
        train(optimizer, steps=1, seed=2)
        gradients.append([parameter.grad for parameter in optimizer.param_groups[0]["params"]])
    assert_same(everything(optimizers[0]), everything(optimizers[1]))
    assert_same(gradients[0], gradients[1])


def test_memory_in_another_order_is_matched_element_by_element() -> None:
    """torch's fused CPU kernel walks each tensor as it lies in memory; ours does not mistake one order for another."""

    def odd() -> list[Parameter]:
        last = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        return [
            Parameter(last.to(memory_format=torch.channels_last)),
            Parameter(last.clone()),
            Parameter(torch.arange(40.0).view(4, 10)[:, ::2]),
            Parameter(torch.arange(12.0).view(4, 3).t()),
        ]

    optimizers = [optim.AdamW(odd()), torch.optim.AdamW(odd(), foreach=False)]
    for optimizer in optimizers:
        for _ in range(3):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
            optimizer.step()
    for one, other in zip(everything(optimizers[0]), everything(optimizers[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_torch_hears_of_every_change() -> None:
    ours = optim.AdamW(mine := parameters(shapes=[(10,)]))
    train(ours, steps=1)
    versions = [mine[0]._version, ours.state[mine[0]]["exp_avg"]._version]
    train(ours, steps=1)
    assert mine[0]._version > versions[0]
    assert ours.state[mine[0]]["exp_avg"]._version > versions[1]


def test_a_differentiable_one_is_refused() -> None:
    with pytest.raises(CapabilityError, match="differentiable"):
        optim.AdamW(parameters(), differentiable=True)
    with pytest.raises(RuntimeError):
        optim.AdamW(parameters(), foreach=True, fused=True)


@pytest.mark.skipif(INTERPRETED, reason="1 000 steps take the interpreter too long")
def test_a_thousand_steps() -> None:
    few = SHAPES[:2]
    ours, theirs = optim.AdamW(parameters(shapes=few)), torch.optim.AdamW(parameters(shapes=few), fused=True)
    train(ours, steps=1000)
    train(theirs, steps=1000)
    assert_same(everything(ours), everything(theirs))
