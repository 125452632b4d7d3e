"""Whatever is exchanged between two steps is seen by the next. `test_interpreted.py` runs this with the kernel."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from optim.test_adamw import assert_same, everything, parameters, train
from zerostall import optim

SHAPES = [(37, 19), (5, 3), (30,)]


def another_moment(optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["exp_avg"] = state["exp_avg"] + 1


def another_state(optimizer: torch.optim.Optimizer) -> None:
    parameter = optimizer.param_groups[0]["params"][1]
    optimizer.state[parameter] = {key: value * 2 for key, value in optimizer.state[parameter].items()}


def fewer_parameters(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def more_parameters(optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [Parameter(torch.ones(50))], "lr": 0.1})


def other_memory(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data = parameter.data * 3


def another_order(optimizer: torch.optim.Optimizer) -> None:
    """The moments stay as they were; elements must still meet their own."""
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.data = parameter.data.t().contiguous().t()


def no_gradient(optimizer: torch.optim.Optimizer) -> None:
    first, second, _ = optimizer.param_groups[0]["params"]
    first.requires_grad_(False).grad = None
    second.grad = torch.ones_like(second)


def other_options(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0].update(lr=0.05, betas=(0.5, 0.6), maximize=True, weight_decay=0.0)


@pytest.mark.parametrize(
    "change",
    [
        another_moment,
        another_state,
        fewer_parameters,
        more_parameters,
        other_memory,
        another_order,
        no_gradient,
        other_options,
    ],
)
def test_a_change_between_steps(change: Callable[[torch.optim.Optimizer], None]) -> None:
    ours, theirs = optim.AdamW(parameters(shapes=SHAPES)), torch.optim.AdamW(parameters(shapes=SHAPES), foreach=False)
    kept = []
    for optimizer in (ours, theirs):
        train(optimizer, steps=1)
        kept.append(list(optimizer.param_groups[0]["params"]))
        change(optimizer)
        for number in range(2):
            generator = torch.Generator().manual_seed(number)
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter.requires_grad:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    torch.testing.assert_close(kept[0], kept[1], rtol=1e-4, atol=1e-5)
    for one, other in zip(everything(ours), everything(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_that_come_and_go() -> None:
    """As with experts that see no token in some steps."""
    ours, theirs = optim.AdamW(parameters(shapes=SHAPES)), torch.optim.AdamW(parameters(shapes=SHAPES), fused=True)
    for optimizer in (ours, theirs):
        generator = torch.Generator().manual_seed(0)
        for present in ([0, 1, 2], [0, 2], [1], [0, 2], [], [0, 1, 2]):
            for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
                parameter.grad = torch.randn(parameter.shape, generator=generator) if number in present else None
            optimizer.step()
    assert_same(everything(ours), everything(theirs))


def test_gradients_are_not_kept() -> None:
    mine = parameters(shapes=SHAPES)
    optimizer = optim.AdamW(mine)
    for _ in range(2):
        train(optimizer, steps=1)
        gradients = [weakref.ref(parameter.grad) for parameter in mine]
        optimizer.zero_grad()
        assert all(gradient() is None for gradient in gradients)
