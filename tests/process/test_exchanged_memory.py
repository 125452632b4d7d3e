"""Memory that torch exchanges in place, behind a storage that stays, while a snapshot reads it."""

from __future__ import annotations

import multiprocessing.reduction
import multiprocessing.resource_sharer
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zerostall
from zerostall import native

pytestmark = pytest.mark.usefixtures("own_agent")

WIDTH = 2000  # a parameter's memory is mapped for it alone: once it has left, to read it ends the process


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy threads never begin: whatever has been read was read by a guard."""
    monkeypatch.setattr(native.Capture, "start", lambda self: None)


def pickled(tensor: torch.Tensor) -> None:
    multiprocessing.reduction.ForkingPickler.dumps(tensor)
    multiprocessing.resource_sharer.stop(30)  # nobody comes for it


def pickled_by_name(tensor: torch.Tensor) -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        pickled(tensor)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


EXCHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "shared": lambda tensor: tensor.share_memory_(),
    "pickled": pickled,
    "pickled by name": pickled_by_name,
    "a larger storage": lambda tensor: tensor.untyped_storage().resize_(8 * tensor.nbytes),
    "a smaller storage": lambda tensor: tensor.untyped_storage().resize_(tensor.nbytes // 2),
    "no storage": lambda tensor: tensor.untyped_storage().resize_(0),
    "a larger tensor": lambda tensor: tensor.data.resize_(4 * WIDTH, WIDTH),
    "as large as another": lambda tensor: tensor.data.resize_as_(torch.empty(4 * WIDTH, WIDTH)),
    "other data": lambda tensor: setattr(tensor, "data", torch.zeros(WIDTH, WIDTH)),
}


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False)


@pytest.mark.parametrize("way", list(EXCHANGES))
@pytest.mark.usefixtures("idle")
def test_what_is_exchanged_has_been_read(tmp_path: Path, model: nn.Linear, way: str) -> None:
    before = model.weight.detach().clone()
    with zerostall.Checkpointer(tmp_path / "run", guard="manual", model=model) as ckpt:
        ckpt.restore()
        saving = ckpt.save(1)
        EXCHANGES[way](model.weight)
        with ckpt.guard():
            pass
        saving.wait("disk")
    assert torch.equal(zerostall.load(tmp_path / "run", 1)["model"]["weight"], before)


@pytest.mark.parametrize("way", ["shared", "no storage"])
def test_another_thread_exchanges_memory(tmp_path: Path, model: nn.Linear, way: str) -> None:
    """As the feeder of a `multiprocessing.Queue` does: it waits for the copy and leaves the guard to training."""
    before = model.weight.detach().clone()
    with zerostall.Checkpointer(tmp_path / "run", guard="manual", model=model) as ckpt:
        ckpt.restore()
        saving = ckpt.save(1)
        thread = threading.Thread(target=EXCHANGES[way], args=(model.weight,))
        thread.start()
        thread.join()
        saving.wait("disk")
    assert torch.equal(zerostall.load(tmp_path / "run", 1)["model"]["weight"], before)


@pytest.mark.usefixtures("idle")
def test_each_checkpointer_that_reads_it_is_asked(tmp_path: Path, model: nn.Linear) -> None:
    before = model.weight.detach().clone()
    whole = zerostall.Checkpointer(tmp_path / "whole", guard="manual", model=model)
    other = zerostall.Checkpointer(tmp_path / "other", guard="manual", net=model)
    with whole, other:
        for ckpt in (whole, other):
            ckpt.restore()
        savings = [ckpt.save(1) for ckpt in (whole, other)]
        model.share_memory()
        for saving in savings:
            saving.wait("disk")
    assert torch.equal(zerostall.load(tmp_path / "whole", 1)["model"]["weight"], before)
    assert torch.equal(zerostall.load(tmp_path / "other", 1)["net"]["weight"], before)


@pytest.mark.usefixtures("idle")
def test_memory_of_others_is_nobodys_business(tmp_path: Path, model: nn.Linear) -> None:
    with zerostall.Checkpointer(tmp_path / "run", guard="manual", model=model) as ckpt:
        ckpt.restore()
        saving = ckpt.save(1)
        for exchange in EXCHANGES.values():
            exchange(torch.zeros(WIDTH, WIDTH))
        torch.zeros(3, device="meta").untyped_storage().resize_(0)
        assert not saving.tiers
        assert ckpt.stats.guard_seconds == []
        with ckpt.guard():
            pass


def test_torch_is_as_it_was_once_nobody_saves(tmp_path: Path, model: nn.Linear) -> None:
    def methods() -> list[object]:
        names = ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_", "resize_", "resize_as_")
        return [vars(kind).get(name) for kind in (torch.Tensor, torch.UntypedStorage) for name in names]

    before = methods()
    first = zerostall.Checkpointer(tmp_path / "first", model=model)
    second = zerostall.Checkpointer(tmp_path / "second", model=model)
    first.close()
    assert methods() != before
    second.close()
    assert methods() == before
