"""Snapshots in the midst of each way to train on a GPU: compiled, CUDA graphs, micro-batches, offloaded, freed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerostall
from ways import WAYS, Way, save_in_the_midst
from zerostall.config import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default", "error:Dynamo"),  # what torch says while it compiles is its own affair
]

POLICIES: list[Policy] = ["overlap", "freeze", "flip"]
WIDTH = 2048  # 200 MB with AdamW: read in 4 ms, while the next step is a matter of one


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", WAYS)
def test_snapshots_are_exact(tmp_path: Path, name: str, policy: Policy) -> None:
    torch.compiler.reset()
    save_in_the_midst(WAYS[name], "cuda", tmp_path / "run", policy, width=WIDTH)


@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("name", ["plain", "graphed", "offloaded"])
def test_a_stream_of_its_own(tmp_path: Path, name: str, policy: Policy) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        save_in_the_midst(WAYS[name], "cuda", tmp_path / "run", policy, width=WIDTH)


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_what_is_freed_and_allocated_anew_right_after_save(tmp_path: Path, policy: Policy) -> None:
    way = Way("cuda", torch.optim.AdamW, width=WIDTH)
    way.step(0)
    with zerostall.Checkpointer(
        tmp_path / "run", policy=policy, source_checks=1, model=way.model, optimizer=way.optimizer
    ) as ckpt:
        for number in range(1, 4):
            torch.cuda._sleep(20_000_000)
            way.step(number)
            kept = way.clones()
            saving = ckpt.save(number, when_busy="wait")
            way.optimizer.state.clear()
            for parameter in way.model.parameters():
                parameter.data = torch.zeros_like(parameter)
            gc.collect()
            torch.cuda.empty_cache()  # to the driver, what of it may go there
            litter = [torch.full((WIDTH, WIDTH), 9.0, device="cuda") for _ in range(16)]
            saving.wait("host")
            del litter
            assert ckpt.restore(number) == number
            assert not way.differing(kept)


ELSEWHERE = {
    "test_ways.py": "graphed or micro or freed",
    "test_flip.py": "without_snapshots or do_not_wait",
    "test_peer.py": "queued",
    "test_ghosts.py": "whatever",
}


@pytest.mark.skipif("PYTORCH_CUDA_ALLOC_CONF" in os.environ, reason="this is that process")
@pytest.mark.parametrize("file", ELSEWHERE)
def test_expandable_segments(file: str) -> None:
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here.with_name(file))]
    done = subprocess.run(
        [*command, "-k", f"({ELSEWHERE[file]}) and not expandable"],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        cwd=here.parents[2],
    )
    assert done.returncode == 0, done.stdout[-5000:]
