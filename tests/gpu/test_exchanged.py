"""Memory of a CUDA device that its storage gives back while a snapshot reads it, on any thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import zerostall
from zerostall.config import Policy

pytestmark = pytest.mark.gpu

WIDTH = 8192  # 256 MiB a parameter: its drain takes a few milliseconds


@pytest.mark.parametrize("policy", ["overlap", "freeze"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_memory_that_is_given_back_has_been_read(tmp_path: Path, policy: Policy, elsewhere: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))).cuda()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def give_back() -> None:
        for parameter in model.parameters():
            parameter.untyped_storage().resize_(0)

    with zerostall.Checkpointer(tmp_path / "run", policy=policy, guard="manual", rng=False, model=model) as ckpt:
        ckpt.restore()
        saving = ckpt.save(1)
        if elsewhere:
            thread = threading.Thread(target=give_back)
            thread.start()
            thread.join()
        else:
            give_back()
        others = [torch.full((WIDTH, WIDTH), 7.0, device="cuda") for _ in before]  # lie where the parameters lay
        saving.wait("disk")
    loaded = zerostall.load(tmp_path / "run", 1)["model"]
    assert all(torch.equal(loaded[f"{index}.weight"], one.cpu()) for index, one in enumerate(before))
    assert all(bool((one == 7.0).all()) for one in others)
