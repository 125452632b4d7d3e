"""What is looked at anew at each save: which tensors there are, where they lie, which of them a guard protects."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from state_trip import Average, load, same, save_state
from unit.test_state_tensors import pair
from zerostall.errors import StateError
from zerostall.trainer.state import OutdatedError, State, Survey


def test_changes_between_saves() -> None:
    tensor = torch.ones(2)
    box = Average(nn.Linear(2, 2))
    tree: dict = {"step": 0, "t": tensor, "more": None}
    state = State({"s": tree, "box": box}, rng=False)
    survey, _ = state.observe(None)
    tree["step"] = 1
    again, values = state.observe(survey)
    assert again is survey and b'"step":1' in bytes(values.encode())
    for change in (
        lambda: tree.update(more=torch.zeros(1)),
        lambda: tree.update(t=torch.ones(2)),
        lambda: tree.pop("t"),
        lambda: box.shadow.update(weight=torch.zeros(2, 2)),
        lambda: box.shadow.pop("bias"),
        lambda: tree.update(new=[torch.ones(1)]),
    ):
        change()
        with pytest.raises(OutdatedError):
            state.values(survey)
        survey, _ = state.observe(survey)
        assert state.observe(survey)[0] is survey
    tree["odd"] = object()
    with pytest.raises(StateError, match=r"s\.odd"):
        state.observe(survey)


def test_a_subclass_that_is_made_of_others_now_is_surveyed_anew() -> None:
    holder = pair()
    module = torch.nn.Module()
    module.register_buffer("x", holder)
    for roots in ({"s": {"x": holder}}, {"s": module}):
        state = State(roots)
        first, _ = state.observe(None)
        assert state.observe(first)[0] is first
        holder.scale = torch.tensor(0.25)
        second, _ = state.observe(first)
        assert any(tensor is holder.scale for tensor in second.tensors)
        holder.block += 1
        third, values = state.observe(second)
        assert third is not second and state.observe(third)[0] is third
        assert f'"block":{holder.block}'.encode() in bytes(values.encode()).replace(b" ", b"")


def test_an_optimizers_changes_are_seen() -> None:
    model = nn.Linear(2, 2)
    extra = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State({"m": model, "o": optimizer}, rng=False)
    survey, _ = state.observe(None)
    optimizer.param_groups[0]["lr"] = 0.2
    assert state.observe(survey)[0] is survey
    optimizer.param_groups[0]["momentum"] = 0.9
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert not state.fits(survey)
    survey, _ = state.observe(survey)
    optimizer.step()
    assert state.observe(survey)[0] is survey
    optimizer.add_param_group({"params": [extra]})
    assert state.observe(survey)[0] is not survey


def test_an_optimizer_that_came_later_guards_nothing() -> None:
    parameter = nn.Parameter(torch.ones(2000))
    tree: dict = {"w": parameter}
    state = State({"s": tree}, rng=False)
    tree["o"] = torch.optim.SGD([parameter])
    survey, _ = state.observe(None)
    assert state.optimizers == [] and not any(survey.tracked)
    assert any(State({"s": tree}, rng=False).survey().tracked)


@pytest.mark.parametrize("user_guards", [False, True])
def test_what_is_copied_within_save(user_guards: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(2048), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model[0].parameters())
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    class Other:
        param_groups: tuple = ()
        moments = torch.zeros(2000)

        def step(self) -> None: ...
        def zero_grad(self) -> None: ...
        def state_dict(self) -> dict:
            return {"moments": self.moments}

        def load_state_dict(self, state: dict) -> None: ...

    state = State(
        {"m": model, "o": optimizer, "ema": Average(model), "other": Other(), "alias": {"w": model[0].weight}},
        rng=False,
        user_guards=user_guards,
    )
    assert state.optimizers == [optimizer]
    survey = state.survey()
    by_name = dict(zip([e.name for e in survey.layout.entries], survey.tracked, strict=True))
    guarded = {name for name, tracked in by_name.items() if tracked}
    expected = {"m.0.weight", "o.0.weight.exp_avg", "o.0.weight.exp_avg_sq"}
    if user_guards:
        expected |= {"m.2.weight", "other.moments", "m.1.weight", "m.1.bias"}
    assert guarded == expected
    assert sorted(survey.at_once) == [index for index, tracked in enumerate(survey.tracked) if not tracked]


def test_addresses_are_read_afresh() -> None:
    model = nn.Linear(8, 8)
    state = State({"m": model}, rng=False)
    for value in range(4):
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, value)
        model.double().float()
        tree = load(save_state(state))["m"]
        assert all(bool((tensor == value).all()) for tensor in tree.values())


def test_a_state_that_changes_shape_and_type_between_saves() -> None:
    small, big = {"a": torch.ones(3), "b": torch.ones(2)}, {"a": torch.ones(3000), "b": torch.ones(2)}
    one, two = {"s": {}}, {"s": {}}
    states = State(one, rng=False), State(two, rng=False)
    for tree in (small, small, big, small, {k: v.bfloat16() for k, v in big.items()}, {"b": big["b"]}, {}):
        for roots, state in zip((one, two), states, strict=True):
            roots["s"].clear()
            roots["s"].update(tree)
            assert same(load(save_state(state))["s"], tree)


class Tied:
    """Two layers, a buffer, a copy of the first layer and a dict."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.net.register_buffer("buf", torch.randn(700))
        self.ema = copy.deepcopy(self.net[0])
        self.bag: dict = {}
        optimizer = torch.optim.AdamW(self.net.parameters())
        self.state = State({"m": self.net, "ema": self.ema, "bag": self.bag, "o": optimizer}, rng=False)

    def saved(self, survey: Survey) -> bool:
        """Whether a save by a survey of before holds what is here now."""
        left = load(save_state(self.state, survey))
        here = {"m": self.net.state_dict(), "ema": self.ema.state_dict(), "bag": self.bag}
        return all(same(left[root], {name: here[root][name].detach() for name in left[root]}) for root in here) and all(
            len(left[root]) == len(here[root]) for root in here
        )


def give(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone() * 1.01


def tie(other: torch.Tensor, tensor: torch.Tensor) -> None:
    other.data = tensor.data


def exchange(tensor: torch.Tensor) -> None:
    torch.utils.swap_tensors(tensor, nn.Parameter(tensor.detach().clone() * 1.01))


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    one.data, other.data = other.data, one.data


def set_elsewhere(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.set_(tensor.detach().clone() * 1.01)


def move_along(tensor: torch.Tensor) -> None:
    """To another place in the same storage, in which its view stays where it is."""
    tensor.data = tensor.data.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + 1)


TIES: dict[str, Callable[[Tied], object]] = {
    "detached": lambda it: it.bag.update(v=it.net[0].weight.detach()),
    "part": lambda it: it.bag.update(v=it.net[0].weight.detach()[2:]),
    "column": lambda it: it.bag.update(v=it.net[0].weight.detach()[:, 3]),
    "by data": lambda it: tie(it.net[1].weight, it.net[0].weight),
    "average": lambda it: tie(it.ema.weight, it.net[0].weight),
    "three": lambda it: (tie(it.net[1].weight, it.net[0].weight), it.bag.update(v=it.net[0].weight)),
}

LEAVES: dict[str, Callable[[Tied], object]] = {
    "data": lambda it: give(it.net[0].weight),
    "swapped data": lambda it: swap(it.net[0].weight, it.state.optimizers[0].param_groups[0]["params"][2]),
    "another's data": lambda it: tie(it.net[0].weight, torch.ones(8, 8)),
    "set_": lambda it: set_elsewhere(it.net[0].weight),
    "swap_tensors": lambda it: exchange(it.net[0].weight),
    "the other": lambda it: give(it.net[1].weight),
    "every": lambda it: it.net._apply(lambda tensor: tensor.clone() * 1.01),
}


@pytest.mark.parametrize("leave", list(LEAVES))
@pytest.mark.parametrize("tied", list(TIES))
def test_tensors_that_shared_memory_may_leave_each_other(tied: str, leave: str) -> None:
    """The name that is stored may go elsewhere as well as the one that is a view of it."""
    it = Tied()
    TIES[tied](it)
    survey, _ = it.state.observe(None)
    assert survey.layout.views
    assert it.state.observe(survey)[0] is survey
    assert it.saved(survey)
    LEAVES[leave](it)
    assert it.saved(survey)


def test_a_view_of_a_buffer_that_left_or_moved_along() -> None:
    for leave in (give, move_along):
        it = Tied()
        it.net.buf = torch.randn(701)[:700]
        it.bag["v"] = it.net.buf[3:600]
        survey, _ = it.state.observe(None)
        assert [(view.name, view.base) for view in survey.layout.views] == [("bag.v", "m.buf")]
        leave(it.net.buf)
        assert it.saved(survey)


def test_expanded_and_numpy_names_of_one_memory_may_leave() -> None:
    for pick in (0, 1):
        bag = {"a": torch.ones(4).expand(3, 4)}
        bag["b"] = bag["a"].detach()
        state = State({"s": bag}, rng=False)
        survey, _ = state.observe(None)
        bag["ab"[pick]].data = torch.full((4,), 2.0).expand(3, 4)
        assert same(load(save_state(state, survey))["s"], bag)
    array = np.ones(6, dtype=np.float32)
    tied = {"a": torch.from_numpy(array), "n": array}
    state = State({"s": tied}, rng=False)
    survey, _ = state.observe(None)
    tied["a"].data = torch.zeros(6)
    assert same(load(save_state(state, survey))["s"], tied)


def test_only_tensors_that_share_memory_are_asked_twice() -> None:
    it = Tied()
    survey, _ = it.state.observe(None)
    assert not survey.anchors  # so that the state can be at rest
    it.bag["same"] = it.net[0].weight  # the very object goes wherever it goes
    survey, _ = it.state.observe(survey)
    assert survey.layout.views and not survey.anchors
    give(it.net[0].weight)
    assert it.state.observe(survey)[0] is survey
    it.bag["other"] = it.net[0].weight.detach()
    survey, _ = it.state.observe(survey)
    assert survey.anchors
    for parameter in it.net.parameters():
        parameter.data.add_(1)
    give(it.net[1].weight)  # shares its memory with none
    assert it.state.observe(survey)[0] is survey
