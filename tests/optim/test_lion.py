"""zerostall.optim.Lion against the rule as it was published. `test_interpreted.py` runs this with the kernel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from optim.test_adamw import INTERPRETED, SHAPES, clones, everything, parameters, train
from optim.test_flips import assert_nothing_but_memory_changes
from zerostall import optim
from zerostall.errors import CapabilityError

OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "lr": 0.01},
    {"betas": (0.5, 0.7), "maximize": True},
    {"lr": torch.tensor(0.01), "weight_decay": 0.01},
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


class Published(torch.optim.Optimizer):
    """A few lines, as they are in everybody's repository."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                parameter.mul_(1 - lr * group["weight_decay"])
                blend = state["exp_avg"] * beta1 + parameter.grad * (1 - beta1)
                parameter.add_(blend.sign_(), alpha=-lr)
                state["exp_avg"].mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


def assert_a_step_of(
    before: list[tuple[torch.Tensor, torch.Tensor]], mine: list[nn.Parameter], optimizer: optim.Lion
) -> None:
    """Within two units in the last place of what float64 finds; where it is undecided, either sign."""
    group = optimizer.param_groups[0]
    lr, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
    for (p_old, m_old), parameter in zip(before, mine, strict=True):
        assert parameter.grad is not None
        p, m, g = p_old.double(), m_old.double(), parameter.grad.double() * (-1 if group["maximize"] else 1)
        eps = torch.finfo(parameter.dtype).eps
        size = torch.maximum(m.abs(), g.abs())
        moment = optimizer.state[parameter]["exp_avg"].double()
        assert ((moment - (beta2 * m + (1 - beta2) * g)).abs() <= 2 * eps * size).all()
        blend = beta1 * m + (1 - beta1) * g
        shrunk = p * (1 - lr * decay)
        off = [(parameter.double() - (shrunk - sign * lr)).abs() for sign in (-1.0, 0.0, 1.0)]
        right = torch.where(blend > 0, off[2], torch.where(blend < 0, off[0], off[1]))
        undecided = blend.abs() <= 4 * eps * size
        least = torch.where(undecided, torch.stack(off).amin(0), right)
        assert (least <= 2 * eps * torch.maximum(p.abs(), torch.full_like(p, lr))).all()


@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("way", [{}] if INTERPRETED else [{}, {"foreach": True}, {"foreach": False, "fused": False}])
def test_every_step_is_that_of_the_rule(options: dict[str, Any], dtype: torch.dtype, way: dict[str, Any]) -> None:
    optimizer = optim.Lion(mine := parameters(dtype), **options, **way)
    train(optimizer, steps=1, seed=7)
    for seed in range(3):
        before = [(p.detach().clone(), optimizer.state[p]["exp_avg"].clone()) for p in mine]
        train(optimizer, steps=1, seed=seed)
        assert_a_step_of(before, mine, optimizer)


def test_many_steps_are_those_that_everybody_takes() -> None:
    steps, shapes = (3, SHAPES[:2]) if INTERPRETED else (1000, SHAPES[:2])
    ours, theirs = (
        optim.Lion(parameters(shapes=shapes), weight_decay=0.1),
        Published(parameters(shapes=shapes), weight_decay=0.1),
    )
    train(ours, steps)
    train(theirs, steps)
    mine, others = everything(ours), everything(theirs)
    for one, other in zip(mine[len(shapes) :], others[len(shapes) :], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=64 * torch.finfo(one.dtype).eps)
    differing = sum(
        int(((one - other).abs() > 1e-5).sum()) for one, other in zip(mine[: len(shapes)], others, strict=False)
    )
    assert differing <= 5  # a sign that rounding alone decides moves an element by twice the rate


def test_momentum_is_left_parameters_kept_and_results_the_same() -> None:
    assert_nothing_but_memory_changes(optim.Lion, "exp_avg")


def test_states_go_both_ways() -> None:
    theirs = Published(parameters(), lr=0.01, weight_decay=0.1)
    train(theirs)
    ours = optim.Lion(clones(theirs), lr=1.0)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    group = ours.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["fused"], group["maximize"]) == (0.01, 0.1, True, False)
    reference = Published(clones(theirs))
    reference.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert set(ours.state_dict()["state"][0]) == {"exp_avg"}
    for optimizer in (ours, reference):
        train(optimizer, steps=1, seed=2)
    for one, other in zip(everything(ours), everything(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("infinite", [0.0, 1.0])
def test_a_scaler_divides_and_an_overflow_changes_nothing(infinite: float) -> None:
    optimizer, plain = optim.Lion(mine := parameters()), optim.Lion(parameters())
    before = [parameter.detach().clone() for parameter in mine]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(infinite)  # type: ignore[attr-defined]
    train(optimizer, steps=1)
    train(plain, steps=1)
    if infinite:
        assert all(torch.equal(one, other) for one, other in zip(mine, before, strict=True))
    else:
        moments = [state["exp_avg"] * 2 for state in optimizer.state.values()]
        for moment, state in zip(moments, plain.state.values(), strict=True):
            torch.testing.assert_close(moment, state["exp_avg"])


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}, {"foreach": True, "fused": True}):
        with pytest.raises(ValueError, match="="):
            optim.Lion(parameters(), **wrong)  # type: ignore[arg-type]
    optimizer = optim.Lion([complex_one := nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    complex_one.grad = torch.ones_like(complex_one)
    with pytest.raises(CapabilityError, match="complex"):
        optimizer.step()
