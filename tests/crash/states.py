"""A training state every bit of which follows from the number of finished steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

SIZES = ((10, 1000), (333,), (64, 3, 7), ())


def expected(step: int, index: int, shape: tuple[int, ...]) -> torch.Tensor:
    """What tensor number `index` is after `step` steps: exact in float32."""
    count = int(torch.Size(shape).numel())
    mixed = torch.arange(count, dtype=torch.int64) * 2654435761 + step * 40503 + index * 97
    return (mixed & 0x7FFFFF).to(torch.float32).reshape(shape)


class Exact(torch.optim.Optimizer):
    """An optimizer whose every step writes what `expected` says, parameters and their moments."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for index, parameter in enumerate(self.parameters()):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state.setdefault("moment", torch.zeros_like(parameter))
            parameter.copy_(expected(state["step"], index, tuple(parameter.shape)))
            state["moment"].copy_(-parameter)

    def parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]


class Job:
    """A model, its optimizer, a buffer and a few plain values, all of one step."""

    def __init__(self, scale: int = 1) -> None:
        self.model = nn.Module()
        for index, shape in enumerate(SIZES):
            wide = (shape[0] * scale, *shape[1:]) if shape else shape
            setattr(self.model, f"p{index}", nn.Parameter(torch.zeros(wide)))
        self.model.register_buffer("seen", torch.zeros(500))
        self.optimizer = Exact(self.model.parameters())
        self.clock = {"step": 0, "history": [0]}

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "clock": self.clock}

    def train_one_step(self) -> int:
        """Returns the number of finished steps."""
        self.optimizer.step()
        step = self.clock["step"] + 1
        self.model.get_buffer("seen").copy_(expected(step, 99, (500,)))
        self.clock["step"] = step
        self.clock["history"] = [*self.clock["history"][-5:], step]
        return step

    def difference(self, step: int) -> str:
        """In words, the first thing that is not as it is after `step` steps; "" when all is."""
        if self.clock["step"] != step or self.clock["history"][-1] != step:
            return f"the clock says {self.clock}, not {step}"
        for index, parameter in enumerate(self.model.parameters()):
            want = expected(step, index, tuple(parameter.shape)) if step else torch.zeros_like(parameter)
            if not torch.equal(parameter.detach(), want):
                return f"parameter {index} is not that of step {step}"
            state = self.optimizer.state[parameter] if parameter in self.optimizer.state else {}
            if state.get("step", 0) != step or (step and not torch.equal(state["moment"], -want)):
                return f"the optimizer's state of parameter {index} is not that of step {step}"
        seen = self.model.get_buffer("seen")
        return (
            "" if torch.equal(seen, expected(step, 99, (500,)) if step else seen) else "the buffer is of another step"
        )
