"""Tensors that share memory at one save and are given memory of their own before the next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zerostall

pytestmark = pytest.mark.usefixtures("own_agent")


class Tied(nn.Module):
    """Two names of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1000))
        self.b = nn.Parameter(self.a.detach())


class Flat(nn.Module):
    """Two halves of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.ones(2000)
        self.register_buffer("flat", flat)
        self.a = nn.Parameter(flat[:1000])
        self.b = nn.Parameter(flat[1000:])


class Expanded(nn.Module):
    """One row that is seen fifty times."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(1, 1000).expand(50, 1000))


def new_memory(tensor: torch.Tensor, value: float) -> torch.Tensor:
    row = torch.full((1000,), value)
    return row.expand(50, 1000) if tensor.dim() == 2 else row


def by_data(tensor: torch.Tensor, value: float) -> None:
    tensor.data = new_memory(tensor, value)


def by_set(tensor: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.set_(new_memory(tensor, value))


@pytest.mark.parametrize("kind", [Tied, Flat, Expanded])
@pytest.mark.parametrize("move", [by_data, by_set])
def test_what_left_shared_memory_is_saved_from_where_it_is(tmp_path: Path, kind, move) -> None:
    model = kind()
    with zerostall.Checkpointer(tmp_path / "run", model=model, rng=False) as ckpt:
        ckpt.restore()
        ckpt.save(1, when_busy="wait").wait("host")
        move(model.b, 7.0)
        ckpt.save(2, when_busy="wait").wait("disk")
        move(model.b, 0.0)
        assert ckpt.restore(2) == 2
        assert torch.equal(model.b, torch.full_like(model.b, 7.0))
    loaded = zerostall.load(tmp_path / "run", 2)["model"]
    assert torch.equal(loaded["b"], torch.full(model.b.shape, 7.0))
    if kind is not Expanded:
        assert torch.equal(loaded["a"], torch.ones(1000))


def test_the_stored_name_leaves_and_the_view_stays(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    average = nn.Linear(20, 20)
    average.weight.data = model[1].weight.data
    bag = {"v": model[0].weight.detach()[2:]}
    optimizer = torch.optim.AdamW(model.parameters())
    wanted = {}
    with zerostall.Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizer, bag=bag, average=average, keep=10, when_busy="wait"
    ) as ckpt:
        for step in range(1, 5):
            if step == 3:
                model[0].weight.data, model[1].weight.data = model[1].weight.data, model[0].weight.data.clone() + 1
            if step == 4:
                model[0].weight.data = model[0].weight.data * 2
            tensors = (model[0].weight, model[1].weight, bag["v"], average.weight)
            wanted[step] = [tensor.detach().clone() for tensor in tensors]
            ckpt.save(step).wait("disk")
    for step, tensors in wanted.items():
        loaded = zerostall.load(tmp_path / "run", step)
        layers = loaded["model"]
        stored = [layers["0.weight"], layers["1.weight"], loaded["bag"]["v"], loaded["average"]["weight"]]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(stored, tensors, strict=True)), step
