"""Saves that go from another GPU's memory straight to disk, where cuFile lets them. Two GPUs that reach each other."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
import torch

import zerostall
from benchmarks.gds import told_by_udev
from hand import agent_report
from zerostall import config
from zerostall.errors import ZerostallError
from zerostall.native.topology import topology

pytestmark = pytest.mark.gpu

NBYTES = 2 << 30
PIECES = 8


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2 or not topology()[1]:
        pytest.skip("two GPUs that reach each other's memory are needed")


def peer_is() -> str:
    (rank,) = agent_report(config.runtime_dir()).ranks
    return next((tier.where for tier in rank.tiers if tier.tier == "peer"), "")


@pytest.mark.parametrize("gds", ["off", "auto", "on"])
def test_saves_reach_the_disk_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gds: str) -> None:
    monkeypatch.setenv("ZEROSTALL_GDS", gds)
    tensors = {f"t{k}": torch.randn(NBYTES // PIECES // 4, device="cuda") for k in range(PIECES)}
    tensors["on the host"] = torch.randn(1001)
    with (
        told_by_udev({"here": str(tmp_path)}),
        zerostall.Checkpointer(tmp_path / "run", peer=True, disk_interval=0.0, tensors=tensors) as ckpt,
    ):
        number, deadline = 0, time.monotonic() + 60
        while ckpt.stats.stowed < 2:
            assert time.monotonic() < deadline, "nothing was stowed"
            with contextlib.suppress(ZerostallError):
                ckpt.save(number := number + 1, when_busy="wait").wait("disk")
        for tensor in tensors.values():
            tensor.mul_(1.5)
        start = time.monotonic()
        saving = ckpt.save(number := number + 1, when_busy="wait")
        saving.wait("host")
        sealed = time.monotonic() - start
        saving.wait("disk")
        seconds = time.monotonic() - start
        print(f"\n{gds}: {NBYTES / 1e9:.2f} GB sealed after {sealed:.2f} s, on disk after {seconds:.2f} s; {peer_is()}")
        assert ("went straight to disk" in peer_is()) != ("to disk through host memory" in peer_is())
        if gds == "off":
            assert "switched off" in peer_is()
    verdicts = zerostall.verify(tmp_path / "run", number)
    assert all(verdict.clean for verdict in verdicts)
    found = zerostall.load(tmp_path / "run", number)["tensors"]
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.cpu()), name  # type: ignore[index]
