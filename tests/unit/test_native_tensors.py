"""Tensors: what refresh() notices, what moved() notices, and what is refused by name."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from zerostall.native import Tensors

both_ways = pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "calls"])


@both_ways
def test_refresh_reads_pointers_afresh(exchange: bool) -> None:
    tensors = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2, 2)), torch.zeros(4, 4)[1:, 2:]]
    seen = Tensors(tensors, [False] * 3, exchange=exchange)
    assert len(seen) == 3
    assert seen.pointers == [tensor.data_ptr() for tensor in tensors]
    tensors[1].data = torch.ones(2, 2)
    assert seen.refresh() == []
    assert seen.pointers == [tensor.data_ptr() for tensor in tensors]


@both_ways
def test_refresh_tells_what_no_longer_fits(exchange: bool) -> None:
    tensors = [torch.zeros(4, 6) for _ in range(7)]
    seen = Tensors(tensors, [False] * 7, exchange=exchange)
    tensors[1].data = torch.zeros(4, 6, dtype=torch.int32)
    tensors[2].data = torch.zeros(6, 4)
    tensors[3].t_()
    tensors[4].resize_(4, 6, 1)
    tensors[5].data = torch.zeros(6, 4).t()
    tensors[6].untyped_storage().resize_(0)
    assert seen.refresh() == [1, 2, 3, 4, 5, 6]
    assert seen.refresh() == [1, 2, 3, 4, 5, 6]


@both_ways
def test_moved_names_what_was_written_since(exchange: bool) -> None:
    tensors = [torch.zeros(3), torch.nn.Parameter(torch.zeros(3)), torch.zeros(3)]
    seen = Tensors(tensors, [True, True, False], exchange=exchange)
    seen.refresh()
    assert seen.moved() == []
    tensors[2].add_(1)
    assert seen.moved() == []
    with torch.no_grad():
        tensors[1].add_(1)
    assert seen.moved() == [1]
    tensors[0][1] = 5
    assert seen.moved() == [0, 1]
    assert seen.refresh() == []
    assert seen.moved() == []


@both_ways
def test_memory_that_a_tracked_tensor_leaves_is_held_until_it_is_let_go(exchange: bool) -> None:
    """Read after it was unmapped, it would end the process."""
    tensors = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    left = []
    for tensor in tensors:
        array = np.ones(1000, dtype=np.float32)
        left.append(weakref.ref(array))
        tensor.data = torch.from_numpy(array)
        del array
    seen = Tensors(tensors, [True, False], exchange=exchange)
    assert seen.refresh() == []
    for tensor in tensors:
        tensor.data = torch.zeros(1000)
    gc.collect()
    assert left[0]() is not None
    assert left[1]() is None  # nobody reads it after `save`
    seen.let_go()
    assert left[0]() is None
    assert seen.refresh() == []
    assert seen.pointers == [tensor.data_ptr() for tensor in tensors]


EXCHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "shared": lambda tensor: tensor.share_memory_(),
    "larger": lambda tensor: tensor.untyped_storage().resize_(1 << 20),
    "smaller": lambda tensor: tensor.untyped_storage().resize_(8),
    "gone": lambda tensor: tensor.untyped_storage().resize_(0),
    "after it has been left": lambda tensor: leave(tensor).resize_(0),
}


def leave(tensor: torch.Tensor) -> torch.UntypedStorage:
    before = tensor.untyped_storage()
    tensor.data = torch.zeros(4, 6)
    return before


@both_ways
@pytest.mark.parametrize("way", list(EXCHANGES))
def test_moved_names_what_was_exchanged_behind_its_storage(exchange: bool, way: str) -> None:
    tensors = [torch.zeros(4, 6) for _ in range(4)]
    seen = Tensors(tensors, [True, True, False, True], exchange=exchange)
    EXCHANGES[way](tensors[1])
    EXCHANGES[way](tensors[2])  # nobody reads it after `save`
    leave(tensors[3])
    assert seen.moved() == [1]


def test_where_tensors_lay_at_the_last_look() -> None:
    base = torch.zeros(4, 6)
    seen = Tensors([base[1:], torch.zeros(0)], [False, False])
    storage = base.untyped_storage()
    assert seen.any_within(storage.data_ptr(), storage.nbytes())
    assert not seen.any_within(storage.data_ptr(), 24)
    assert not seen.any_within(0, 0)
    base.data = torch.zeros(4, 6)
    assert seen.any_within(storage.data_ptr(), storage.nbytes())


def test_numpy_arrays_are_watched_too() -> None:
    array = np.zeros((3, 4), dtype=np.float32)
    seen = Tensors([array], [False])
    assert seen.pointers == [array.ctypes.data]
    assert seen.refresh() == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy 2.5 still lets one do this, under protest
        array.dtype = np.int32
    assert seen.refresh() == [0]


def test_what_cannot_be_described_is_named() -> None:
    fine = torch.zeros(2)
    for bad, why in [
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugate"),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, "negative"),
        (torch.zeros(2, 2).to_sparse(), "storage"),
        (np.array([object()]), "objects"),
        (3, "dtype"),
        ("text", "dtype"),
    ]:
        with pytest.raises(ValueError, match="tensor 1 cannot be used") as caught:
            Tensors([fine, bad], [False, False])
        assert why in str(caught.value)
    with torch.inference_mode():
        unversioned = torch.zeros(2)
    Tensors([unversioned], [False]).refresh()
    with pytest.raises(ValueError, match=r"tensor 0 .* no version counter"):
        Tensors([unversioned], [True])
    with pytest.raises(ValueError, match="marks"):
        Tensors([fine], [])


def test_references_are_kept_and_given_back() -> None:
    import sys

    tensor = torch.zeros(2)
    before = sys.getrefcount(tensor)
    seen = Tensors([tensor, tensor], [True, True])
    seen.refresh()
    seen.moved()
    assert sys.getrefcount(tensor) == before + 2
    del seen
    assert sys.getrefcount(tensor) == before
    with pytest.raises(ValueError, match="tensor 2"):
        Tensors([tensor, tensor, object()], [False] * 3)
    assert sys.getrefcount(tensor) == before


def changes() -> dict[str, Callable[[torch.Tensor], object]]:
    """All that can happen to a tensor of shape (4, 6) that its reader must know of."""

    def give(other: torch.Tensor) -> Callable[[torch.Tensor], object]:
        return lambda tensor: setattr(tensor, "data", other)

    return {
        "another place": give(torch.zeros(4, 6)),
        "another place in the same storage": give(torch.zeros(5, 6)[1:]),
        "another shape": give(torch.zeros(6, 4)),
        "as many elements in one row": give(torch.zeros(24)),
        "other strides": give(torch.zeros(6, 4).t()),
        "another type": give(torch.zeros(4, 6, dtype=torch.int32)),
        "transposed": lambda tensor: tensor.t_(),
        "smaller": lambda tensor: tensor.resize_(4, 5),
        "larger": lambda tensor: tensor.resize_(400, 600),
        "a larger storage": lambda tensor: tensor.untyped_storage().resize_(1 << 20),
        "no storage": lambda tensor: tensor.untyped_storage().resize_(0),
        "another storage": lambda tensor: tensor.set_(torch.zeros(24).untyped_storage(), 0, (4, 6), (6, 1)),
        "a window": lambda tensor: tensor.as_strided_((4, 5), (6, 1), 1),
        "swapped": lambda tensor: torch.utils.swap_tensors(tensor, torch.ones(4, 6)),
    }


@pytest.mark.parametrize("change", list(changes()))
def test_an_imprint_tells_what_torch_would(change: str) -> None:
    tensor, other = torch.zeros(4, 6), torch.zeros(4, 6)
    seen, asked = Tensors([tensor, other], [True, True]), Tensors([tensor, other], [True, True], exchange=False)
    assert (seen.imprinted, asked.imprinted) == (2, 0)
    for _ in range(3):
        tensor.add_(1)
        assert seen.refresh() == asked.refresh() == []
    with torch.no_grad():
        changes()[change](tensor)
    # Asked, the tensor tells of another counter now. The one of the memory that is read has not moved.
    assert seen.moved() == ([] if change == "swapped" else asked.moved())
    assert seen.refresh() == asked.refresh()
    assert seen.pointers == asked.pointers
    other.add_(1)
    assert seen.moved() == [1]


def test_parameters_in_training_are_told_by_their_imprints() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3, 8, 8)).sum().backward()
        optimizer.step()

    step()
    tensors = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    seen, asked = Tensors(tensors, [True] * 8), Tensors(tensors, [True] * 8, exchange=False)
    for _ in range(3):
        step()
        assert seen.moved() == asked.moved() == list(range(8))
        assert seen.refresh() == asked.refresh() == []
        assert seen.moved() == []
        assert seen.pointers == [tensor.data_ptr() for tensor in tensors]
        assert seen.imprinted == 8


def test_what_is_no_plain_block_of_memory_has_no_imprint() -> None:
    many = torch.zeros(2, 2, 2, 2, 2, 2, 2)  # torch keeps so long a shape elsewhere
    with torch.inference_mode():
        unversioned = torch.zeros(2)
    seen = Tensors([many, np.zeros(3), unversioned], [True, False, False])
    assert seen.imprinted == 1
    many.unsqueeze_(0)
    assert seen.refresh() == [0]


def test_versions_are_those_of_the_counter_shared_by_views() -> None:
    base = torch.zeros(4, 6)
    seen = Tensors([base, base[1:], base.detach()], [True] * 3)
    seen.refresh()
    base.detach()[0].add_(1)
    assert seen.moved() == [0, 1, 2]
    seen.refresh()
    assert seen.moved() == []


def test_writes_to_the_memory_that_is_read_are_told_wherever_the_tensor_is() -> None:
    tensor, other = torch.zeros(4, 6), torch.ones(4, 6)
    seen = Tensors([tensor], [True])
    seen.refresh()
    torch.utils.swap_tensors(tensor, other)
    tensor.add_(1)
    assert seen.moved() == []
    other.add_(1)  # it has that memory now
    assert seen.moved() == [0]
    seen.let_go()
    assert seen.refresh() == [] and seen.moved() == []
    other.add_(1)
    assert seen.moved() == []
    tensor.add_(1)
    assert seen.moved() == [0]


def test_what_is_held_of_a_tensor_keeps_nothing_from_it() -> None:
    tensor = torch.nn.Parameter(torch.zeros(4, 6))
    seen = Tensors([tensor], [True])
    seen.refresh()
    torch.utils.swap_tensors(tensor, torch.nn.Parameter(torch.ones(4, 6)))  # refuses one that somebody else holds
    tensor.data.resize_(2, 3)
    with torch.no_grad():
        tensor.set_(torch.zeros(2, 2).untyped_storage(), 0, (2, 2), (2, 1))
    (tensor * 2).sum().backward()
    assert tensor.grad is not None and seen.refresh() == [0]


def test_a_tensor_that_lets_nobody_detach_it_is_held_by_its_storage() -> None:
    class Attached(torch.Tensor):
        def detach(self) -> torch.Tensor:
            raise RuntimeError("never")

    tensor = torch.zeros(4, 6).as_subclass(Attached)
    seen = Tensors([tensor], [True])
    assert seen.refresh() == seen.moved() == []
    tensor.add_(1)
    assert seen.moved() == [0]


def test_memory_that_was_let_go_of_is_held_again() -> None:
    tensor = torch.zeros(1 << 20)
    seen = Tensors([tensor], [True])
    seen.refresh()
    kept = tensor.data
    tensor.data = torch.ones(1 << 20)
    seen.let_go()
    tensor.data = kept
    assert seen.refresh() == []
    before = tensor.data_ptr()
    assert seen.pointers == [before]


def test_what_is_brought_to_huge_pages_stays_as_it_is() -> None:
    tensors = [torch.full((k % 7, 3), k) for k in range(3000)]
    seen = Tensors(tensors, [True] * len(tensors))
    where = seen.pointers
    brought, left, why = seen.bring_to_huge_pages()
    assert brought + left > 0
    assert bool(why) == (left > 0)
    assert seen.refresh() == [] and seen.moved() == []
    assert seen.pointers == where and seen.imprinted == len(tensors)
    assert all(torch.equal(tensor, torch.full((k % 7, 3), k)) for k, tensor in enumerate(tensors))
    tensors[5].add_(1)
    assert seen.moved() == [5]


def test_few_tensors_are_not_worth_huge_pages() -> None:
    tensors = [torch.zeros(3) for _ in range(10)]
    assert Tensors(tensors, [True] * 10).bring_to_huge_pages() == (0, 0, "")
