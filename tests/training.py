"""A small state and a small training for tests, and what is saved of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zerostall


def tensors(step: int, size: int = 5000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), float(step)), "n": torch.tensor(step)}


def training(size: int = 512) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    width = model[0].in_features
    x = torch.randn(8, width)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(where: Path) -> list[int]:
    return [snapshot.step for snapshot in zerostall.snapshots(where)]


def change(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


SCRIPT = """
import os, sys, threading, torch, zerostall
state = {"w": torch.full((2_000_000,), 9.0)}
ckpt = zerostall.Checkpointer(sys.argv[1], state=state)
ckpt.restore()
ckpt.save(9)
"""
