"""What `zerostall doctor` says of GPUs and who lends memory to whom, on the stand-in driver."""

from __future__ import annotations

import pytest

from standin.cuda import FakeCuda
from zerostall.cli.doctor import gpu_neighbours


def test_each_gpu_and_its_lender(fake: FakeCuda) -> None:
    first, second, multicast = gpu_neighbours()
    assert (first.name, first.verdict) == ("GPU 0", "yes")
    assert "stand-in 0" in first.detail and "peer=True saves to GPU 1 over NVLink" in first.detail
    assert "saves to GPU 0" in second.detail
    assert (multicast.name, multicast.verdict) == ("NVLink multicast", "limited")
    assert "nothing here would use it" in multicast.detail


def test_gpus_that_do_not_reach_each_other(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_LINKS", "")
    first, second, _ = gpu_neighbours()
    assert {first.verdict, second.verdict} == {"limited"}
    assert "saves to host memory: it reaches no other GPU's memory" in first.detail


def test_a_driver_that_does_not_say(fake: FakeCuda) -> None:
    fake.fail("cuDeviceGetCount", 1, 999)
    (finding,) = gpu_neighbours()
    assert finding.verdict == "limited" and "CUDA_ERROR_999" in finding.detail
