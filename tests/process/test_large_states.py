"""States of very many tensors, and of large ones: all of it comes back, in place, with no second copy of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import zerostall
from conftest import stop_agent
from hand import close_all
from zerostall.flow import inspection

MANY = 100_000


def test_a_hundred_thousand_small_tensors(where: Path, own_agent: Path) -> None:
    state = {f"t{k}": torch.full((1 + k % 3,), float(k)) for k in range(MANY)}
    with zerostall.Checkpointer(where, state=state, rng=False) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()
        for tensor in state.values():
            tensor.zero_()
        assert ckpt.restore() == 1
    assert all((tensor == k).all() for k, tensor in enumerate(state.values()))
    (rank,) = inspection.inspect(where, 1).ranks
    assert len(rank.tensors) == MANY


class Peak:
    """The most memory that this process has of its own in the block, beyond what it had before."""

    def __enter__(self) -> Peak:
        self._process, self._over = psutil.Process(), threading.Event()
        self._before = self.most = self._own()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.most = max(self.most, self._own()) - self._before

    def _own(self) -> int:
        facts = self._process.memory_info()
        return facts.rss - facts.shared  # segments are the agent's

    def _watch(self) -> None:
        while not self._over.is_set():
            self.most = max(self.most, self._own())
            time.sleep(0.0005)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_restore_makes_no_second_copy_of_the_state(where: Path, own_agent: Path, tier: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6)))  # 96 MiB, and twice that of moments
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    nbytes = sum(tensor.nbytes for tensor in model.parameters()) * 3
    with zerostall.Checkpointer(where, model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()
    if tier == "disk":
        close_all()
        stop_agent(own_agent)
    kept = [parameter.clone() for parameter in model.parameters()]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    moments = [slots["exp_avg"].data_ptr() for slots in optimizer.state.values()]
    for parameter in model.parameters():
        parameter.data.zero_()
    with zerostall.Checkpointer(where, model=model, optimizer=optimizer) as ckpt:
        with Peak() as peak:
            assert ckpt.restore() == 1
        assert ckpt.stats.restored_from == tier
    assert peak.most < nbytes / 4
    assert all(torch.equal(one, other) for one, other in zip(kept, model.parameters(), strict=True))
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    assert moments == [slots["exp_avg"].data_ptr() for slots in optimizer.state.values()]
