"""Snapshots in the midst of each way to train, bit for bit; tests/gpu/test_ways.py has the same on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ways import ANYWHERE, save_in_the_midst
from zerostall.config import Policy

pytestmark = [
    pytest.mark.usefixtures("own_agent"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "error:Dynamo"),  # torch's own, while it compiles
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small for more, which would wait for one another where the machine has other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "overlap") for name in ANYWHERE), ("compiled", "flip"), ("compiled step", "flip")]
)
def test_snapshots_are_exact(tmp_path: Path, name: str, policy: Policy) -> None:
    torch.compiler.reset()
    save_in_the_midst(ANYWHERE[name], "cpu", tmp_path / "run", policy)
