"""What is looked at anew at each save: which tensors there are, where they lie, which of them a guard protects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from state_trip import Average, load, same, save_state
from unit.test_state_tensors import pair
from zerostall.errors import StateError
from zerostall.trainer.state import OutdatedError, State


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
