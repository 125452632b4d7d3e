"""Optimizers: state by parameter name, in place, whatever has or has not been stepped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from state_trip import bits, load, restore, same, save
from unit.small_training import OPTIMIZERS, net, run, state_by_name, twin
from zerostall.errors import StateError
from zerostall.trainer.state.parts.optimizer_record import OptimizerRecord


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
