"""What an optimizer leaves for a snapshot that is still being read. `test_interpreted.py` runs this with the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from optim.test_adamw import INTERPRETED, everything, parameters, train
from zerostall import optim
from zerostall.core.reading import Flipping, Memory, Placed

PLENTY = 1 << 30
SHAPES = [(37, 19), (4097,), (2, 5, 3)]
KEYS = ("exp_avg", "exp_avg_sq")


class Claim:
    def __init__(self) -> None:
        self.released = 0
        self.read = False

    def release(self) -> None:
        self.released += 1

    def over(self) -> bool:
        return self.read


class SlowReader:
    """A snapshot that has not read anything yet of the given tensors when the step comes, and reads it afterwards."""

    def __init__(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        self.claims: list[Claim] = []
        self.begin(tensors)

    def begin(self, tensors: Sequence[torch.Tensor] | None) -> None:
        self.tensors = None if tensors is None else [tensor.detach() for tensor in tensors]
        self.expected = [tensor.clone() for tensor in self.tensors or []]
        # As the memory was shaped, whatever the tensor's own is by the time it is read.
        self.memory = [tensor.data for tensor in self.tensors or []]
        self.left: list[int] = []
        self.kept: dict[int, Memory] = {}

    def pending(self) -> dict[tuple[int, int], int] | None:
        if self.tensors is None:
            return None
        return {(memory.data_ptr(), memory.nbytes): place for place, memory in enumerate(self.memory)}

    def claim(self, left: Sequence[Placed], kept: Sequence[Placed]) -> Claim:
        assert all(memory.data_ptr() == self.memory[place].data_ptr() for place, memory in left)
        self.left, self.kept = [place for place, _ in left], dict(kept)
        assert not set(self.left) & set(self.kept)
        self.tensors = None
        self.claims.append(Claim())
        return self.claims[-1]

    def assert_intact(self) -> None:
        """What was left is where it was, what was kept is where it was to be: the snapshot reads what `save` saw."""
        assert self.claims[-1].released == 1
        for place in self.left:
            assert torch.equal(self.memory[place], self.expected[place])
        for place, memory in self.kept.items():
            assert isinstance(memory, torch.Tensor) and torch.equal(memory, self.expected[place])


def assert_nothing_but_memory_changes(make: Callable[..., torch.optim.Optimizer], key: str) -> None:
    """Of an optimizer with one moment, which is left in place step after step while its parameters are kept aside."""
    reader, shapes = SlowReader(), SHAPES[:2]
    optimizer, plain = make(parameters(shapes=shapes)), make(parameters(shapes=shapes))
    assert isinstance(optimizer, Flipping) and optimizer.flip_for(reader, PLENTY) is None
    train(optimizer, steps=2)
    train(plain, steps=2)
    mine = optimizer.param_groups[0]["params"]
    moments = [optimizer.state[parameter][key] for parameter in mine]
    for number in range(2, 5):
        if reader.claims:
            reader.claims[-1].read = True
        reader.begin([*moments, *(parameter.detach() for parameter in mine)])
        train(optimizer, steps=1, seed=number)
        train(plain, steps=1, seed=number)
        assert sorted(reader.left) == [0, 1] and sorted(reader.kept) == [2, 3]
        reader.assert_intact()
        assert all(torch.equal(one, other) for one, other in zip(everything(optimizer), everything(plain), strict=True))


def flipping(reader: SlowReader, nbytes: int = PLENTY, **options: Any) -> optim.AdamW:
    optimizer = optim.AdamW(parameters(shapes=SHAPES), **options)
    assert isinstance(optimizer, Flipping)
    assert optimizer.flip_for(reader, nbytes) is None
    return optimizer


def moments(optimizer: torch.optim.Optimizer, keys: Sequence[str] = KEYS) -> list[torch.Tensor]:
    return [optimizer.state[parameter][key] for parameter in optimizer.param_groups[0]["params"] for key in keys]


def weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True}], ids=str)
def test_moments_are_left_parameters_kept_and_results_the_same(options: dict[str, Any]) -> None:
    reader = SlowReader()
    optimizer, plain = flipping(reader, **options), optim.AdamW(parameters(shapes=SHAPES), **options)
    keys = (*KEYS, "max_exp_avg_sq") if options.get("amsgrad") else KEYS
    train(optimizer, steps=1)
    train(plain, steps=1)
    objects, places = moments(optimizer, keys), [weight.data_ptr() for weight in weights(optimizer)]
    for number in range(2, 6):
        addresses = [moment.data_ptr() for moment in objects]
        if reader.claims:
            reader.claims[-1].read = True
        reader.begin([*objects, *weights(optimizer)])
        train(optimizer, steps=1, seed=number)
        train(plain, steps=1, seed=number)
        assert sorted(reader.left) == list(range(len(objects)))
        assert sorted(reader.kept) == list(range(len(objects), len(objects) + len(places)))
        reader.assert_intact()
        assert all(one is other for one, other in zip(moments(optimizer, keys), objects, strict=True))
        assert not set(addresses) & {moment.data_ptr() for moment in objects}
        assert [weight.data_ptr() for weight in weights(optimizer)] == places
        for one, other in zip(everything(optimizer), everything(plain), strict=True):
            assert torch.equal(one, other)
    assert optimizer._flips.nbytes == sum(tensor.nbytes for tensor in [*objects, *weights(optimizer)])


def test_without_a_snapshot_nothing_is_asked_or_taken() -> None:
    reader = SlowReader()
    optimizer = flipping(reader)
    train(optimizer)
    assert not reader.claims and optimizer._flips.nbytes == 0


def test_a_snapshot_that_is_all_read_is_still_told() -> None:
    optimizer = flipping(reader := SlowReader([]))
    train(optimizer, steps=1)
    assert len(reader.claims) == 1 and reader.claims[0].released == 1 and not reader.left and not reader.kept


def test_what_does_not_fit_the_budget_is_not_spared() -> None:
    sizes = [4 * 37 * 19] * 2 + [4 * 4097] * 2 + [4 * 30] * 2
    optimizer = flipping(reader := SlowReader(), nbytes=sum(sizes[3:]) + 100)
    train(optimizer, steps=1)
    reader.begin(moments(optimizer))
    train(optimizer, steps=1)
    assert reader.left == [5, 4, 3], "the last ones of the image are read last"
    reader.assert_intact()
    assert optimizer._flips.nbytes == sum(sizes[3:])

    # The memory goes to others when these are not wanted, if it is enough.
    for first, left in ((4, [3]), (2, [1, 0])):
        reader.claims[-1].read = True
        reader.begin(moments(optimizer)[:first])
        train(optimizer, steps=1)
        assert reader.left == left
        assert optimizer._flips.nbytes <= sum(sizes[3:]) + 100
        reader.assert_intact()


def test_memory_that_is_still_read_is_not_written() -> None:
    reader = SlowReader()
    optimizer = flipping(reader)
    train(optimizer, steps=1)
    reader.begin(moments(optimizer))
    train(optimizer, steps=1)
    slow, seen = reader.claims[-1], list(zip(reader.memory, reader.expected, strict=True))
    for _ in range(2):  # steps without a snapshot
        train(optimizer, steps=1)
    reader.begin(moments(optimizer))
    train(optimizer, steps=1)
    assert not reader.left, "there is no third memory"
    assert all(torch.equal(memory, expected) for memory, expected in seen)
    slow.read = True
    reader.begin(moments(optimizer))
    train(optimizer, steps=1)
    assert len(reader.left) == 6
    reader.assert_intact()


def test_only_what_has_a_gradient_flips() -> None:
    optimizer = flipping(reader := SlowReader())
    train(optimizer, steps=1)
    before = everything(optimizer)
    frozen = optimizer.param_groups[0]["params"][0]
    frozen.grad = None
    reader.begin(moments(optimizer))
    optimizer.step()
    assert reader.left == [5, 4, 3, 2]
    assert torch.equal(frozen, before[0])
    reader.assert_intact()


def test_an_error_in_the_step_leaves_snapshot_and_training_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = SlowReader()
    optimizer = flipping(reader)
    train(optimizer, steps=1)
    before = [tensor.clone() for tensor in [*moments(optimizer), *weights(optimizer)]]
    reader.begin([*moments(optimizer), *weights(optimizer)])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel today")

    if INTERPRETED:
        from zerostall.optim.kernels import adam

        monkeypatch.setattr(adam, "adam", fail)
    else:
        monkeypatch.setattr(optimizer, "_update_by_torch", fail)
    with pytest.raises(RuntimeError, match="no kernel today"):
        optimizer.step()
    assert len(reader.left) == 6 and len(reader.kept) == 3
    reader.assert_intact()
    now = [*moments(optimizer), *weights(optimizer)]
    assert all(torch.equal(one, other) for one, other in zip(now, before, strict=True))


def test_a_closure_is_called_before_anything_is_claimed() -> None:
    optimizer = flipping(reader := SlowReader())
    train(optimizer, steps=1)
    reader.begin(moments(optimizer))

    def closure() -> float:
        assert not reader.claims
        optimizer.zero_grad()
        return 1.0

    assert optimizer.step(closure) == 1.0
    assert not reader.left and reader.claims[0].released == 1


def test_an_overflow_changes_nothing_but_flips_all_the_same() -> None:
    optimizer = flipping(reader := SlowReader())
    train(optimizer, steps=1)
    before = [tensor.clone() for tensor in everything(optimizer)]
    reader.begin([*moments(optimizer), *weights(optimizer)])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    train(optimizer, steps=1)
    assert len(reader.left) == 6 and len(reader.kept) == 3
    reader.assert_intact()
    assert all(torch.equal(one, other) for one, other in zip(everything(optimizer), before, strict=True))


def test_what_a_graph_may_know_does_not_move() -> None:
    optimizer = flipping(reader := SlowReader(), capturable=True)
    train(optimizer, steps=1)
    reader.begin(moments(optimizer))
    train(optimizer, steps=1)
    assert not reader.left and len(reader.claims) == 1


def test_a_loaded_state_is_another_state() -> None:
    optimizer = flipping(reader := SlowReader())
    train(optimizer, steps=1)
    reader.begin(moments(optimizer))
    train(optimizer, steps=1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer._flips.nbytes == 0
    reader.assert_intact()
    reader.begin(moments(optimizer))
    train(optimizer, steps=1)
    assert len(reader.left) == 6
    reader.assert_intact()


def test_one_checkpointer_at_a_time() -> None:
    optimizer = flipping(SlowReader())
    reason = optimizer.flip_for(SlowReader(), PLENTY)
    assert reason is not None and "already" in reason
    assert optimizer.flip_for(None, 0) is None
    assert optimizer.flip_for(SlowReader(), PLENTY) is None


def test_memory_in_another_order_flips_too() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    gaps = torch.randn(6, 8)[:, ::2]
    optimizer = optim.AdamW([Parameter(image), Parameter(gaps)])
    reader = SlowReader()
    assert optimizer.flip_for(reader, PLENTY) is None
    train(optimizer, steps=1)
    assert optimizer.param_groups[0]["params"][1].stride() == (8, 2)
    reader.begin([*moments(optimizer), *weights(optimizer)])
    train(optimizer, steps=1)
    # A parameter with gaps in its memory has no other memory shaped alike: it is read at the guard.
    assert sorted(reader.left) == [0, 1, 2, 3] and sorted(reader.kept) == [4]
    reader.assert_intact()
