"""Ways to train one small model, for tests that save in the midst of each.

way = WAYS["offloaded"]("cuda", optim.AdamW)
way.step(1)                         # forward, backward, update
way.tensors()                       # all that a snapshot of it holds
save_in_the_midst(WAYS["offloaded"], "cuda", folder, "freeze")
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerostall
from zerostall import optim
from zerostall.config import Policy

MICRO_BATCHES = 3
SAVES = 4
Optimizer = Callable[..., torch.optim.Optimizer]


class Way:
    """The model and its steps as most people write them; the other ways differ in one thing."""

    capturable = False
    hooked = True

    def __init__(self, device: str, optimizer: Optimizer, *, width: int = 160) -> None:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU()) for _ in range(4))
        self.model = nn.Sequential(*layers).to(device)
        options = {"capturable": True} if self.capturable else {}
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3, **options)
        self.batch = torch.randn(MICRO_BATCHES, 16, width, device=device)
        self.begin()

    def begin(self) -> None:
        """What a way has to do once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def backward(self, x: torch.Tensor) -> None:
        self.forward(x).square().mean().backward()

    def step(self, number: int) -> None:
        self.backward(self.batch[number % MICRO_BATCHES])
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}/{key}"] = value
        return found

    def clones(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def differing(self, expected: dict[str, torch.Tensor]) -> list[str]:
        """Names whose bytes are others than these."""
        now = self.tensors()
        flat = {name: (one.reshape(-1).view(torch.uint8), now[name].reshape(-1).view(torch.uint8))
                for name, one in expected.items()}  # fmt: skip
        return [name for name, (one, other) in flat.items() if not torch.equal(one, other)]


class Compiled(Way):
    """The model is compiled: by Inductor on a GPU, elsewhere without a compiler of C++."""

    def begin(self) -> None:
        backend = "inductor" if self.batch.is_cuda else "aot_eager"
        self._compiled = torch.compile(self.model, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._compiled(x)


class CompiledStep(Way):
    """The optimizer's step is compiled, and whatever hooks it has are traced with it."""

    capturable = True

    def begin(self) -> None:
        backend = "inductor" if self.batch.is_cuda else "aot_eager"
        self._step = torch.compile(self.optimizer.step, backend=backend)

    def update(self) -> None:
        self._step()
        self.optimizer.zero_grad()


class InMicroBatches(Way):
    """Gradients are summed up over several backward passes."""

    def step(self, number: int) -> None:
        for x in self.batch:
            self.backward(x)
        self.update()


class Offloaded(Way):
    """Activations wait for the backward pass in host memory, so the copy engines have other work, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=self.batch.is_cuda):
            return self.model(x)


class Recomputed(Way):
    """Activations are computed again in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.model, x, use_reentrant=False)


class GraphedLayers(Way):
    """Forward and backward are CUDA graphs, the update is not."""

    def begin(self) -> None:
        self._graphed = torch.cuda.make_graphed_callables(self.model, (self.batch[0].clone(),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._graphed(x)


class Graphed(Way):
    """All of a step is one CUDA graph; its replay calls no hooks."""

    capturable, hooked = True, False

    def begin(self) -> None:
        self._x = self.batch[0].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._all()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._all()

    def _all(self) -> None:
        self.optimizer.zero_grad()
        self.backward(self._x)
        self.optimizer.step()

    def step(self, number: int) -> None:
        self._x.copy_(self.batch[number % MICRO_BATCHES])
        self._graph.replay()


ANYWHERE: dict[str, type[Way]] = {
    "plain": Way,
    "compiled": Compiled,
    "compiled step": CompiledStep,
    "micro-batches": InMicroBatches,
    "offloaded": Offloaded,
    "recomputed": Recomputed,
}
WAYS = {**ANYWHERE, "graphed layers": GraphedLayers, "graphed": Graphed}


def save_in_the_midst(kind: type[Way], device: str, where: Path, policy: Policy, *, width: int = 160) -> None:
    """Train and save at every step, the next step right behind; each snapshot must be what there was at its save."""
    way = kind(device, optim.AdamW if policy == "flip" else torch.optim.AdamW, width=width)
    way.step(0)
    with zerostall.Checkpointer(
        where, policy=policy, keep=SAVES, when_busy="wait", guard="hooks" if way.hooked else "manual",
        model=way.model, optimizer=way.optimizer,
    ) as ckpt:  # fmt: skip

        def guarded() -> AbstractContextManager[None]:
            return contextlib.nullcontext() if way.hooked else ckpt.guard()

        kept = {}
        for number in range(1, SAVES + 1):
            with guarded():
                way.step(number)
            kept[number] = way.clones()
            guards = len(ckpt.stats.guard_seconds)
            ckpt.save(number)
            with guarded():
                way.step(number + 1)  # changes all of it
            assert len(ckpt.stats.guard_seconds) == guards + 1
        assert not ckpt.stats.dirty
        for number, expected in kept.items():
            assert ckpt.restore(number) == number
            assert not way.differing(expected)
            with guarded():
                way.step(number)  # what is compiled or a graph goes on with what was restored
            after = way.clones()
            assert ckpt.restore(number) == number
            with guarded():
                way.step(number)
            assert not way.differing(after)
