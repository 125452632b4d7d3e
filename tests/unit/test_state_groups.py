"""Optimizers whose groups, options or parameters are others than those that were stored."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from state_trip import names, restore, same, save
from unit.small_training import OPTIMIZERS, net, run, state_by_name, twin
from zerostall.errors import MismatchError
from zerostall.trainer.state import State


@pytest.mark.parametrize("stepped", [False, True])
def test_parameters_are_matched_by_name_whatever_their_order_and_groups(stepped: bool) -> None:
    model = net()
    decay = [p for n, p in model.named_parameters() if n.endswith("weight")]
    rest = [p for n, p in model.named_parameters() if n.endswith("bias")]
    optimizer = torch.optim.Adam([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.5}], lr=0.25)
    run(model, optimizer, 3, seed=1)
    saved = save(model=model, optimizer=optimizer)
    model2 = net()
    optimizer2 = torch.optim.Adam(list(model2.parameters())[::-1], lr=0.125, eps=0.5)
    if stepped:
        run(model2, optimizer2, 1, seed=5)
    report = restore(saved, model=model2, optimizer=optimizer2)
    assert same(state_by_name(optimizer2, model2), state_by_name(optimizer, model))
    group = optimizer2.param_groups[0]
    assert group["eps"] == 1e-8, "all groups agreed on it"
    assert (group["lr"], group["weight_decay"]) == (0.125, 0), "they differed"
    assert [word for word in ("lr", "weight_decay") if any(f"option {word} " in w for w in report.warnings)]


def test_options_are_those_of_the_moment_however_they_were_changed() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state = State({"model": model, "optimizer": optimizer}, rng=False)
    survey = state.survey()
    group = optimizer.param_groups[0]
    for change in (
        dict,
        lambda: group.update(lr=0.25),
        lambda: group.update(lr=0.5),
        lambda: group.update(nesterov=True),
        dict,
        lambda: setattr(optimizer, "param_groups", [dict(group, lr=0.125)]),
    ):
        before = state.values(survey)
        told = bytes(before.encode())
        change()
        if not state.fits(survey):
            survey = state.survey()
        now = bytes(state.values(survey).encode())
        assert bytes(before.encode()) == told
        assert now == bytes(State({"model": model, "optimizer": optimizer}, rng=False).observe(None)[1].encode())
        assert (now == told) == (change is dict)


def test_groups_keep_their_options_when_they_change_places() -> None:
    def groups(model: nn.Module) -> list[dict]:
        return [{"params": list(model[i].parameters()), "lr": 0.1 * (i + 1)} for i in (0, 2, 4)]

    model = net()
    optimizer = torch.optim.SGD(groups(model), momentum=0.9)
    run(model, optimizer, 2, seed=1)
    saved = save(model=model, optimizer=optimizer)
    model2 = net()
    optimizer2 = torch.optim.SGD([{**g, "lr": 9.0} for g in groups(model2)[::-1]], momentum=0.9)
    restore(saved, model=model2, optimizer=optimizer2)
    assert [g["lr"] for g in optimizer2.param_groups] == [0.1 * 5, 0.1 * 3, 0.1]


def test_without_a_module_parameters_go_by_their_place_and_must_agree() -> None:
    def parameters() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(40, 30)), nn.Parameter(torch.ones(30))]

    def stepped(params: list) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(params)
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    params = parameters()
    optimizer = stepped(params)
    saved = save(optimizer=optimizer)
    assert "optimizer[0][1].exp_avg" in names(saved)
    again = torch.optim.Adam(parameters())
    restore(saved, optimizer=again)
    assert same(again.state_dict()["state"], optimizer.state_dict()["state"])
    with pytest.raises(MismatchError) as caught:
        restore(saved, optimizer=torch.optim.Adam(parameters()[::-1]))
    assert "optimizer[0][0]" in caught.value.different
    with pytest.raises(MismatchError) as caught:
        restore(saved, optimizer=torch.optim.Adam([{"params": [p]} for p in parameters()]))
    assert "optimizer[1][0]" in caught.value.missing
    # Two optimizers without names each number their own.
    other = stepped(parameters())
    saved = save(a=optimizer, b=other)
    assert {"a[0][0].exp_avg", "b[0][0].exp_avg"} <= names(saved)


def test_one_optimizer_of_two_modules_with_the_same_paths() -> None:
    generator, critic = net(), net()
    optimizer = torch.optim.Adam([*generator.parameters(), *critic.parameters()])
    for index, parameter in enumerate([*generator.parameters(), *critic.parameters()]):
        parameter.grad = torch.full_like(parameter, index + 1.0)
    optimizer.step()
    saved = save(generator=generator, critic=critic, optimizer=optimizer)
    assert {"optimizer.generator.0.weight.exp_avg", "optimizer.critic.0.weight.exp_avg"} <= names(saved)
    generator2, critic2 = net(), net()
    optimizer2 = torch.optim.Adam([*critic2.parameters(), *generator2.parameters()])
    restore(saved, critic=critic2, generator=generator2, optimizer=optimizer2)
    for one, other in ((generator, generator2), (critic, critic2)):
        assert same(optimizer.state[one[0].weight], optimizer2.state[other[0].weight])


def test_options_only_one_side_knows() -> None:
    model, optimizer = twin(OPTIMIZERS["adam"])
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    optimizer.param_groups[0]["zzz"] = 1
    saved = save(model=model, optimizer=optimizer)
    model2, optimizer2 = twin(OPTIMIZERS["adam"])
    report = restore(saved, model=model2, optimizer=optimizer2)
    assert optimizer2.param_groups[0]["decoupled_weight_decay"] is False
    assert any("decoupled_weight_decay" in warning for warning in report.warnings)
    assert optimizer2.param_groups[0]["zzz"] == 1


def test_what_is_asked_for_and_not_stored_is_an_error() -> None:
    model, optimizer = twin(OPTIMIZERS["adam"])
    run(model, optimizer, 1, seed=1)
    saved = save(model=model)
    model2, optimizer2 = twin(OPTIMIZERS["adam"])
    before = copy.deepcopy(model2.state_dict())
    with pytest.raises(MismatchError) as caught:
        restore(saved, model=model2, optimizer=optimizer2)
    assert "optimizer" in caught.value.missing
    assert same(dict(before), dict(model2.state_dict()))
    report = restore(saved, options={"strict": False}, model=model2, optimizer=optimizer2)
    assert report.missing == ("optimizer",)
    assert report.nbytes == sum(p.nbytes for p in model.parameters())


def test_a_parameter_the_checkpoint_does_not_know() -> None:
    model, optimizer = twin(OPTIMIZERS["adam"])
    run(model, optimizer, 1, seed=1)
    saved = save(model=model, optimizer=optimizer)
    model2 = net()
    model2.add_module("head", nn.Linear(2, 2))
    optimizer2 = torch.optim.Adam(model2.parameters())
    with pytest.raises(MismatchError) as caught:
        restore(saved, model=model2, optimizer=optimizer2)
    assert {"model.head.weight", "optimizer.head.weight"} <= set(caught.value.missing)
    restore(saved, options={"strict": False}, model=model2, optimizer=optimizer2)
    assert model2.head.weight not in optimizer2.state
    small = nn.Sequential(*list(net())[:3])
    with pytest.raises(MismatchError) as caught:
        restore(saved, model=small, optimizer=torch.optim.Adam(small.parameters()))
    assert {"model.4.weight", "optimizer.4.weight.exp_avg"} <= set(caught.value.unexpected)


def test_a_tensor_learning_rate_stays_the_same_tensor() -> None:
    model, optimizer = twin(OPTIMIZERS["adamw tensor lr"])
    optimizer.param_groups[0]["lr"].fill_(0.75)
    saved = save(model=model, optimizer=optimizer)
    model2, optimizer2 = twin(OPTIMIZERS["adamw tensor lr"])
    lr = optimizer2.param_groups[0]["lr"]
    restore(saved, model=model2, optimizer=optimizer2)
    assert optimizer2.param_groups[0]["lr"] is lr
    assert lr.item() == 0.75
    # Stored as a number, kept as a tensor.
    model3, optimizer3 = twin(OPTIMIZERS["adamw foreach"])
    saved = save(model=model3, optimizer=optimizer3)
    restore(saved, model=model2, optimizer=optimizer2)
    assert optimizer2.param_groups[0]["lr"] is lr
