"""A tiny training, for tests of what is saved of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Make = Callable[[list], torch.optim.Optimizer]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "sgd plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, history_size=3),
}


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2))


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        batch = torch.randn(6, 5, generator=generator)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch.to(next(model.parameters()).dtype)).float().square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def state_by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, object]:
    label = {parameter: name for name, parameter in model.named_parameters()}
    return dict(sorted((label[parameter], state) for parameter, state in optimizer.state.items()))


def twin(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, make(list(model.parameters()))
