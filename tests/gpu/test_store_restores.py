"""A restore from a store into a device's memory, chunk by chunk as it comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zerostall
from conftest import stop_agent
from stores.google import Google

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("apart", [False, True], ids=["as-saved", "aliases-apart"])
def test_a_device_is_filled_from_a_store(
    google: Google, agent_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    for name, value in google.environment().items():
        monkeypatch.setenv(name, value)
    url = f"gs://{google.new_bucket()}/run"
    device = torch.device("cuda")
    saved = {
        "w": torch.arange(12_000_000.0, device=device),
        "strided": torch.arange(6000.0, device=device).view(60, 100).t(),
        "host": torch.arange(1001.0),
    }
    if apart:  # of one memory where they are saved, and of another each where they are restored
        matrix = saved["w"].view(3_000_000, 4)
        saved |= {"column": matrix[:, 1], "turned": matrix.t()[2:], "every": saved["host"][::3]}
    with zerostall.Checkpointer(url, s=saved) as ckpt:
        ckpt.save(1).wait("remote", timeout=120)
    stop_agent(Path(agent_environment["ZEROSTALL_RUNTIME_DIR"]))
    found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    with zerostall.Checkpointer(url, s=found) as ckpt:
        assert ckpt.restore() == 1 and ckpt.stats.restored_from == "remote"
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    assert found["w"].device == saved["w"].device
