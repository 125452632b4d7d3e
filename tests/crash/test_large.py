"""Case G8: single tensors over 2 and 4 GiB, through memory and disk and back."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

import zerostall
from crash.conftest import StartAgent
from shim.faults import Faults, Shim
from zerostall import native

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("nbytes", [2**31 - 1, 2**31, 2**31 + 4097, 2**32 - 1, 2**32 + 5])
def test_a_tensor_over_the_old_limits(start_agent: StartAgent, faulty: Shim, where: Path, nbytes: int) -> None:
    needed = 3 * nbytes + (1 << 30)  # the tensor and two slots
    if (available := psutil.virtual_memory().available) < needed:
        pytest.skip(f"needs {needed} bytes of memory, and {available} are available")
    agent = start_agent(ZEROSTALL_HOST_BUDGET="40G")
    big = torch.empty(nbytes, dtype=torch.uint8)
    for at in range(0, nbytes, 1 << 28):
        part = big[at : at + (1 << 28)]
        part.copy_(torch.arange(len(part), dtype=torch.int32) * 31 + at // (1 << 28))
    want = int(native.crc32c_memory(big.data_ptr(), nbytes))
    state = {"big": big, "after": torch.tensor(1)}
    # The kernel moves less than 2 GiB a call, and file systems may move less.
    with Faults(faulty, op="write", match="*.safetensors", short=(1 << 30) - 4096):
        with zerostall.Checkpointer(where, slots=2, state=state) as ckpt:
            ckpt.save(1).wait(timeout=1500)
    agent.kill()
    start_agent(ZEROSTALL_HOST_BUDGET="40G")
    big.zero_()
    state["after"].zero_()
    with zerostall.Checkpointer(where, slots=2, state=state) as ckpt:
        assert ckpt.restore() == 1
    assert int(native.crc32c_memory(big.data_ptr(), nbytes)) == want
    assert state["after"] == 1
