"""Targets that a snapshot cannot be written into are refused by name, before anything is written."""

from __future__ import annotations

import gc
import mmap
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from state_trip import Saved, load, restore, same, save
from zerostall.errors import MismatchError
from zerostall.trainer.state import RestoreReport, State, pages, tensors, writes
from zerostall.trainer.state.parts.optimizer_record import Slots
from zerostall.trainer.state.refs import Resolver
from zerostall.trainer.state.stored_step import Images


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_memory_that_can_only_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    np.zeros(8, dtype=np.float32).tofile(file)
    mapped = torch.from_numpy(np.memmap(file, dtype=np.float32, mode="r"))
    state = {"w": torch.ones(8), "other": torch.ones(3)}
    saved = save(s=state)
    target = {"w": mapped, "other": torch.zeros(3)}
    with pytest.raises(MismatchError, match=r"s\.w: .*can only be read"):
        restore(saved, s=target)
    assert not target["other"].any()
    target["w"] = torch.from_file(str(file), shared=True, size=8)
    restore(saved, s=target)
    assert same(target, state)


@pytest.mark.parametrize("made", ["by torch", "by numpy", "from a read-only buffer", "by torch.load"])
def test_whose_memory_is_looked_up(made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is asked only where memory is not torch's own, and there however the tensor came to it."""
    saved = save(s={"w": torch.ones(1024, dtype=torch.uint8)})
    if made == "by torch":
        target = torch.zeros(1024, dtype=torch.uint8)
        monkeypatch.setattr(pages, "_read_only_stretches", lambda: pytest.fail("the kernel was asked"))
    elif made == "by numpy":
        target = torch.from_numpy(np.zeros(1024, dtype=np.uint8))
    elif made == "by torch.load":
        torch.save(torch.zeros(1024, dtype=torch.uint8), tmp_path / "w.pt")
        target = torch.load(tmp_path / "w.pt", mmap=True)
    else:
        (tmp_path / "w").write_bytes(bytes(1024))
        with (tmp_path / "w").open("rb") as file:
            memory = mmap.mmap(file.fileno(), 1024, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = torch.frombuffer(memory, dtype=torch.uint8)
        with pytest.raises(MismatchError, match=r"s\.w: .*can only be read"):
            restore(saved, s={"w": target})
        return
    restore(saved, s={"w": target})
    assert target.all()


def test_targets_with_elements_in_one_place_are_refused() -> None:
    rows = torch.zeros(20)
    for windows in (rows.unfold(0, 5, 1), torch.zeros(4).expand(3, 4), rows.as_strided((3, 4), (2, 1))):
        saved = save(s={"w": torch.rand(tuple(windows.shape))})
        with pytest.raises(MismatchError, match=r"s\.w: .*several of its elements share one place"):
            restore(saved, s={"w": windows})
        assert not windows.any()


def test_strides_that_are_not_nested_and_meet_nowhere() -> None:
    state = {"w": torch.rand(2, 2)}
    target = {"w": torch.zeros(6).as_strided((2, 2), (3, 2))}
    restore(save(s=state), s=target)
    assert torch.equal(target["w"], state["w"])


def test_windows_of_a_buffer_that_is_stored_too() -> None:
    def windows(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"all": buffer, "some": buffer.unfold(0, 5, 1)}

    state, target = windows(torch.rand(20)), windows(torch.zeros(20))
    restore(save(s=state), s=target)
    assert same(target, state)


def test_an_array_that_repeats_itself_is_stored_once() -> None:
    state = {"a": np.broadcast_to(np.arange(3.0), (500, 3))}
    saved = save(s=state)
    assert len(saved.image) < 8192
    assert np.array_equal(load(saved)["s"]["a"], state["a"])
    target = {"a": np.zeros((500, 3))}
    restore(saved, s=target)
    assert np.array_equal(target["a"], state["a"])


def gathered(saved: Saved, **roots: object) -> RestoreReport:
    """Restore as of several ranks, each tensor's bytes in any order."""
    state = State(roots, rng=False)
    met = state.meet(Images.of([saved.stored]))
    landings = state.landings(met, met.match.unexpected)
    image = torch.frombuffer(saved.image, dtype=torch.uint8)
    for share in landings.gathering.shares.values():
        for offset, nbytes, target in reversed(share.runs):
            assert isinstance(target, torch.Tensor)
            data = image[offset : offset + nbytes].clone()
            writes.copy_into(target, data.view(target.dtype).view(target.shape))
        share.pour(image)
    return state.finish(landings)


@pytest.mark.parametrize("how", [restore, gathered], ids=["of one rank", "of several"])
def test_targets_that_share_memory_and_were_stored_apart_are_told(how: Callable[..., RestoreReport]) -> None:
    """The one that covers the others decides; of two that overlap, the one behind."""
    state = {"x": torch.arange(10.0), "y": torch.arange(4.0), "z": torch.arange(8.0), "u": torch.arange(6.0) - 30}
    memory = torch.zeros(14)
    target = {"x": memory[:10], "y": memory[2:6], "z": memory[:8], "u": memory[8:14]}
    report = how(save(s=state), s=target)
    assert report.warnings == ("s.y was stored with other bytes than the tensor whose memory it shares here",)
    assert torch.equal(memory[:8], state["x"][:8]) and torch.equal(memory[8:], state["u"])


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:Lazy modules", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_is_ordinary_is_described_as_all_else_is_and_can_be_stored() -> None:
    freed, placeholder = torch.rand(4), nn.Parameter(torch.empty(0))
    freed.untyped_storage().resize_(0)
    placeholder.ds_shape = (8, 8)  # type: ignore[attr-defined]
    flat = nn.Parameter(torch.rand(4))
    flat._is_flat_param = True  # type: ignore[attr-defined]
    complex_one = torch.rand(2, 3, dtype=torch.complex64)
    ordinary = [
        torch.rand(3, 4),
        nn.Parameter(torch.rand(3, 4).t()),
        torch.rand(6, 6)[1:3, ::2],
        torch.rand(1, 3).expand(4, 3),
        torch.tensor(3.0, dtype=torch.bfloat16),
        complex_one,
        torch.zeros(5, dtype=torch.bool),
    ]
    for tensor in ordinary:
        assert tensors.ordinary(tensor) == tensors.geometry(tensor)
        assert tensors.problem(tensor) is None
    others = [
        torch.empty(0, 3),
        torch.rand(3, 3).to_sparse(),
        torch.rand(3, 3).to_sparse_csr(),
        torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8),
        torch.empty(3, device="meta"),
        nn.LazyLinear(3).weight,
        complex_one.conj(),
        complex_one.conj().imag,
        torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]),
        torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.jagged),
        placeholder,
        freed,
        flat,
        np.zeros(3),
    ]
    assert [tensors.ordinary(other) for other in others] == [None] * len(others)


def test_a_second_restore_goes_where_the_tensors_are_by_then() -> None:
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = save(m=module, o=optimizer)
    state = State({"m": module, "o": optimizer}, rng=False)
    stored = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    moment = optimizer.state[module.weight]["exp_avg"].clone()
    for _ in range(2):
        targets = state.targets(saved.stored)
        state.about_to_write(targets)
        where = {tensors.geometry(target).start for target in targets.tensors}
        assert {module.weight.data_ptr(), optimizer.state[module.weight]["exp_avg"].data_ptr()} <= where
        for parameter in module.parameters():
            parameter.data = torch.zeros_like(parameter)  # memory of its own
            optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
    restore(saved, m=module, o=optimizer)
    assert same(dict(module.state_dict()), stored)
    assert torch.equal(optimizer.state[module.weight]["exp_avg"], moment)


@pytest.mark.parametrize("on", [True, False])
def test_garbage_is_collected_after_a_look_as_before_it(on: bool) -> None:
    state = State({"s": {"w": torch.zeros(3)}}, rng=False)
    fitting, other = save(s={"w": torch.ones(3)}), save(s={"w": torch.ones(4)})
    was_on = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        state.targets(fitting.stored)
        assert gc.isenabled() is on
        with pytest.raises(MismatchError):
            state.targets(other.stored)
        assert gc.isenabled() is on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_an_optimizers_state_has_its_keys_in_the_order_in_which_it_made_them() -> None:
    holders = {name: torch.zeros(1) for name in "abc"}
    found = Resolver(holders.__getitem__)
    slots = Slots("w", {"step": "c", "exp_avg": "a", "exp_avg_sq": "b"})
    assert list(slots.state(found, ["exp_avg", "more", "exp_avg_sq", "step"])) == ["exp_avg", "exp_avg_sq", "step"]
    assert list(slots.state(found, ["exp_avg"])) == ["exp_avg", "step", "exp_avg_sq"]
    slots.values = {"count": 3}
    assert list(slots.state(found, ["count", "step"])) == ["count", "step", "exp_avg", "exp_avg_sq"]
