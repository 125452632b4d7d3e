"""Optimizers: state by parameter name, in place, whatever has or has not been stepped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from state_trip import bits, load, names, restore, same, save
from zerostall.errors import MismatchError, StateError
from zerostall.trainer.state import State
from zerostall.trainer.state.parts.optimizer_record import OptimizerRecord

OPTIMIZERS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "sgd plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, history_size=3),
}
Make = Callable[[list], torch.optim.Optimizer]


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2))


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        batch = torch.randn(6, 5, generator=generator)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch.to(next(model.parameters()).dtype)).float().square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def state_by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, object]:
    label = {parameter: name for name, parameter in model.named_parameters()}
    return dict(sorted((label[parameter], state) for parameter, state in optimizer.state.items()))


def twin(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, make(list(model.parameters()))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_never_stepped_optimizer_continues_bit_for_bit(kind: str) -> None:
    model, optimizer = twin(OPTIMIZERS[kind])
    run(model, optimizer, 3, seed=1)
    saved = save(model=model, optimizer=optimizer)
    reference = run(model, optimizer, 4, seed=2)
    model2, optimizer2 = twin(OPTIMIZERS[kind])
    with torch.no_grad():
        for parameter in model2.parameters():
            parameter.zero_()
    restore(saved, model=model2, optimizer=optimizer2)
    assert run(model2, optimizer2, 4, seed=2) == reference
    assert same(state_by_name(optimizer2, model2), state_by_name(optimizer, model))
    assert same(dict(model2.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_restore_twice_and_back_in_place(kind: str) -> None:
    model, optimizer = twin(OPTIMIZERS[kind])
    run(model, optimizer, 2, seed=1)
    first = save(model=model, optimizer=optimizer)
    run(model, optimizer, 2, seed=2)
    second = save(model=model, optimizer=optimizer)
    reference = run(model, optimizer, 2, seed=3)
    where = [(id(p), p.data_ptr()) for p in model.parameters()]
    for saved in (first, second, first, second):
        restore(saved, model=model, optimizer=optimizer)
    assert where == [(id(p), p.data_ptr()) for p in model.parameters()]
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    assert run(model, optimizer, 2, seed=3) == reference


def test_an_empty_optimizer_state_is_legal_and_is_put_back() -> None:
    model, optimizer = twin(OPTIMIZERS["adam"])
    saved = save(model=model, optimizer=optimizer)
    run(model, optimizer, 2, seed=1)
    restore(saved, model=model, optimizer=optimizer)
    assert not any(optimizer.state.values())


def test_saving_and_restoring_change_nothing_else() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, maximize=True)
    run(model, optimizer, 2, seed=1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def boom(*_: object) -> None:
        raise AssertionError("a step was taken")

    optimizer.register_step_pre_hook(boom)
    optimizer.register_step_post_hook(boom)
    grads = [p.grad.clone() for p in model.parameters()]
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random = torch.get_rng_state()
    saved = save(model=model, optimizer=optimizer, rng=True)
    assert same(dict(before[0]), dict(model.state_dict()))
    assert same(before[1], optimizer.state_dict())
    fresh, optimizer2 = twin(OPTIMIZERS["adamw amsgrad"])
    for parameter, grad in zip(fresh.parameters(), grads, strict=True):
        parameter.grad = grad.clone()
    held = [p.grad for p in fresh.parameters()]
    torch.set_rng_state(random)
    restore(saved, model=fresh, optimizer=optimizer2)
    assert all(p.grad is g for p, g in zip(fresh.parameters(), held, strict=True))
    assert same(held, grads)
    assert torch.equal(torch.get_rng_state(), random)


def test_frozen_parameters_keep_their_moments() -> None:
    model, optimizer = twin(OPTIMIZERS["adam"])
    run(model, optimizer, 2, seed=1)
    model[0].requires_grad_(False)
    saved = save(model=model, optimizer=optimizer)
    model2, optimizer2 = twin(OPTIMIZERS["adam"])
    restore(saved, model=model2, optimizer=optimizer2)
    assert same(state_by_name(optimizer2, model2), state_by_name(optimizer, model))
    assert "0.weight" in state_by_name(optimizer2, model2)


class WideAdam(torch.optim.Optimizer):
    """Moments and a master copy in fp32 for parameters of any type."""

    def __init__(self, params: list) -> None:
        super().__init__(params, {"lr": 0.01})

    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
        loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(
                        step=0, master=parameter.float(), moment=torch.zeros_like(parameter, dtype=torch.float)
                    )
                state["step"] += 1
                state["moment"].mul_(0.9).add_(parameter.grad.float())
                state["master"].sub_(state["moment"] * 0.01)
                parameter.copy_(state["master"])
        return loss


def test_state_keeps_its_stored_type() -> None:
    model = net().bfloat16()
    optimizer = WideAdam(list(model.parameters()))
    run(model, optimizer, 3, seed=1)
    saved = save(model=model, optimizer=optimizer)
    model2 = net().bfloat16()
    optimizer2 = WideAdam(list(model2.parameters()))
    restore(saved, model=model2, optimizer=optimizer2)
    assert same(state_by_name(optimizer2, model2), state_by_name(optimizer, model))
    assert optimizer2.state[next(model2.parameters())]["step"] == 3
    assert run(model2, optimizer2, 3, seed=2) == run(model, optimizer, 3, seed=2)
    # A slot of another type than what is stored is replaced, not cast into.
    for state in optimizer2.state.values():
        state["moment"] = state["moment"].bfloat16()
    restore(saved, model=model2, optimizer=optimizer2)
    assert {state["moment"].dtype for state in optimizer2.state.values()} == {torch.float32}


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
    model3, optimizer3 = twin(OPTIMIZERS["adam"])
    saved = save(model=model3, optimizer=optimizer3)
    restore(saved, model=model2, optimizer=optimizer2)
    assert optimizer2.param_groups[0]["lr"] is lr


class Compressed(torch.optim.SGD):
    """Says itself what its state is."""

    def state_dict(self) -> dict:
        return {"inner": super().state_dict(), "version": 2}

    def load_state_dict(self, state_dict: dict) -> None:
        assert state_dict["version"] == 2
        super().load_state_dict(state_dict["inner"])


def test_an_optimizer_with_a_state_dict_of_its_own_is_asked() -> None:
    def make(params: list) -> torch.optim.Optimizer:
        return Compressed(params, lr=0.01, momentum=0.9)

    model, optimizer = twin(make)
    run(model, optimizer, 3, seed=1)
    saved = save(model=model, optimizer=optimizer)
    reference = run(model, optimizer, 3, seed=2)
    model2, optimizer2 = twin(make)
    restore(saved, model=model2, optimizer=optimizer2)
    assert run(model2, optimizer2, 3, seed=2) == reference


def test_state_that_belongs_to_no_parameter() -> None:
    model, optimizer = twin(OPTIMIZERS["adam"])
    optimizer.state["global"] = {"seen": 5, "norms": [torch.ones(3)]}
    saved = save(model=model, optimizer=optimizer)
    model2, optimizer2 = twin(OPTIMIZERS["adam"])
    restore(saved, model=model2, optimizer=optimizer2)
    assert same(optimizer2.state["global"], optimizer.state["global"])


def test_loaded_without_objects_an_optimizer_is_a_dict_by_parameter() -> None:
    model, optimizer = twin(OPTIMIZERS["sgd"])
    run(model, optimizer, 1, seed=1)
    tree = load(save(model=model, optimizer=optimizer))
    assert torch.equal(
        bits(tree["optimizer"]["state"]["0.weight"]["momentum_buffer"]),
        bits(optimizer.state[model[0].weight]["momentum_buffer"]),
    )
    assert tree["optimizer"]["param_groups"][0]["params"][0] == "0.weight"
    assert list(tree["model"]) and same(tree["model"]["0.weight"], model[0].weight.detach())


@pytest.mark.parametrize(
    ("key", "options", "where"),
    [
        ("step", {}, "cpu"),
        ("step", {"foreach": True, "capturable": False, "fused": None}, "cpu"),
        ("step", {"capturable": True}, "cuda"),
        ("step", {"fused": True}, "cuda"),
        ("mu_product", {}, "cpu"),
        ("mu_product", {"capturable": True}, "cuda"),
        ("exp_avg", {}, "cuda"),
    ],
)
def test_where_torch_would_keep_a_state_tensor(key: str, options: dict, where: str) -> None:
    record = OptimizerRecord([], {}, {}, [], frozenset({"step", "mu_product"}))
    parameter = SimpleNamespace(device=torch.device("cuda"))
    assert record.device(key, options, parameter).type == where


def test_a_zero_optimizer_that_updates_during_backward_is_refused() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        _overlap_with_ddp = True

    ZeroRedundancyOptimizer.__module__ = "torch.distributed.optim.zero_redundancy_optimizer"
    optimizer = ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(StateError, match="o is a ZeroRedundancyOptimizer with overlap_with_ddp"):
        save(o=optimizer)
