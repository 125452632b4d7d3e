"""A step of one optimizer goes into another one only where that can go on with it."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

import zerostall.optim
from state_trip import Saved, restore, same, save
from unit.small_training import OPTIMIZERS, Make, run, state_by_name, twin
from zerostall.core.optimizers import Fields, compare
from zerostall.errors import MismatchError
from zerostall.trainer.state.parts.optimizer_record import OptimizerValues


class Mine(torch.optim.AdamW):
    """A class of a user's, with an option of its own."""

    def __init__(self, params: list, lr: float = 0.01, pull: float = 0.5) -> None:
        super().__init__(params, lr)
        self.defaults["pull"] = pull
        for group in self.param_groups:
            group["pull"] = pull


def moved(kind: type[torch.optim.Optimizer], name: str, module: str = "elsewhere") -> type[torch.optim.Optimizer]:
    """The same class, not derived from it, as after it was moved or renamed."""

    def fill(namespace: dict[str, object]) -> None:
        namespace.update({key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")})
        namespace.update(__module__=module, __qualname__=name)

    return types.new_class(name, (torch.optim.Optimizer,), {}, fill)


class Pull(torch.optim.Optimizer):
    """Written by a user, straight from torch's base."""

    def __init__(self, params: list, lr: float = 0.1) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "pull": 0.5})

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        loss = closure() if closure else None
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["trail"] = parameter.grad.clone()
        return loss


def stepped(make: Make, *, silent: bool = False) -> Saved:
    """A step of a training with that optimizer; `silent`: of when a step did not say of what class it is."""
    model, optimizer = twin(make)
    run(model, optimizer, 2, seed=1)
    with pytest.MonkeyPatch.context() if silent else nullcontext() as patch:
        if patch is not None:
            whole = OptimizerValues.tree

            def without(values: OptimizerValues) -> object:
                tree = whole(values)
                assert isinstance(tree, dict)
                return {key: value for key, value in tree.items() if key != "class"}

            patch.setattr(OptimizerValues, "tree", without)
        return save(model=model, optimizer=optimizer)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("strict", [True, False, "stored"])
def test_another_class_is_refused_before_anything_is_written(silent: bool, ahead: bool, strict: bool | str) -> None:
    for one, other in (("adamw amsgrad", "sgd"), ("sgd", "adamw amsgrad")):
        saved = stepped(OPTIMIZERS[one], silent=silent)
        model, optimizer = twin(OPTIMIZERS[other])
        if ahead:
            run(model, optimizer, 1, seed=3)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with pytest.raises(MismatchError) as caught:
            restore(saved, options={"strict": strict}, model=model, optimizer=optimizer)
        text = caught.value.different["optimizer"]
        assert f"torch.optim.{type(optimizer).__name__}" in text
        assert silent or ("torch.optim.AdamW" in text and "torch.optim.SGD" in text)
        assert "betas" in text and "nesterov" in text
        assert same(before, (model.state_dict(), optimizer.state_dict()))
        run(model, optimizer, 1, seed=3)


def test_every_other_class_of_torch_is_refused_and_its_own_is_not() -> None:
    kinds = {name: make for name, make in OPTIMIZERS.items() if "adamw" not in name and name != "sgd plain"}
    for one, make in kinds.items():
        saved = stepped(make)
        for other, another in kinds.items():
            model, optimizer = twin(another)
            if one == other:
                restore(saved, model=model, optimizer=optimizer)
                continue
            with pytest.raises(MismatchError, match="stored by"):
                restore(saved, model=model, optimizer=optimizer)
            with pytest.raises(MismatchError, match="stored by"):
                restore(saved, options={"only": ["optimizer.0.weight.*"]}, model=model, optimizer=optimizer)


def test_what_is_left_out_may_be_of_any_class() -> None:
    saved = stepped(OPTIMIZERS["adam"])
    for only in (["*", "!optimizer"], ["model"], ["model.*"]):
        model, optimizer = twin(OPTIMIZERS["sgd"])
        restore(saved, options={"only": only}, model=model, optimizer=optimizer)
        assert not optimizer.state and "betas" not in optimizer.param_groups[0]
        run(model, optimizer, 1, seed=3)


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (lambda p: zerostall.optim.AdamW(p, lr=0.01), OPTIMIZERS["adamw fused"]),
        (lambda p: zerostall.optim.SGD(p, lr=0.01, momentum=0.9), OPTIMIZERS["sgd"]),
        (Mine, OPTIMIZERS["adamw foreach"]),
        (Mine, lambda p: zerostall.optim.AdamW(p, lr=0.01)),
    ],
)
def test_another_make_of_the_same_optimizer_goes_on(ours: Make, torchs: Make) -> None:
    for one, other in ((ours, torchs), (torchs, ours)):
        model, optimizer = twin(one)
        run(model, optimizer, 2, seed=1)
        saved = save(model=model, optimizer=optimizer)
        model2, optimizer2 = twin(other)
        restore(saved, model=model2, optimizer=optimizer2)
        assert same(state_by_name(optimizer2, model2), state_by_name(optimizer, model))
        run(model2, optimizer2, 1, seed=2)


def test_what_a_class_stands_for_is_not_overwritten() -> None:
    for silent in (False, True):
        saved = stepped(OPTIMIZERS["adam"], silent=silent)
        model, optimizer = twin(OPTIMIZERS["adamw fused"])
        with pytest.raises(MismatchError, match="decoupled_weight_decay is True in that class, and False is stored"):
            restore(saved, model=model, optimizer=optimizer)
    model, optimizer = twin(OPTIMIZERS["adam"])
    report = restore(stepped(OPTIMIZERS["adamw fused"]), model=model, optimizer=optimizer)
    assert any("stored by torch.optim.AdamW, and here it is torch.optim.Adam" in text for text in report.warnings)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True  # as torch's own load_state_dict has it


def test_a_class_that_was_moved_goes_on_and_one_that_was_renamed_where_that_is_said() -> None:
    saved = stepped(Pull)
    model, optimizer = twin(moved(Pull, "Pull"))
    assert not restore(saved, model=model, optimizer=optimizer).warnings
    model, optimizer = twin(moved(Pull, "Tug"))
    with pytest.raises(MismatchError, match=r"Pull, and here it is elsewhere\.Tug: their fields .* strict=False"):
        restore(saved, model=model, optimizer=optimizer)
    report = restore(saved, options={"strict": False}, model=model, optimizer=optimizer)
    assert any("elsewhere.Tug" in text for text in report.warnings)
    assert all("trail" in state for state in optimizer.state.values())


def test_what_a_class_stands_for_may_be_of_any_type() -> None:
    here = Fields(("my.Steps", "torch.optim.sgd.SGD"), frozenset({"lr", "milestones", "looks"}))
    fixed: dict[str, object] = {"milestones": [1, 2], "looks": {"at": set()}}
    assert compare(Fields(), here, [{"lr": 0.1, "milestones": [3], "looks": {}}], fixed).fits


def telling(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer, which says itself what its state is."""

    class Telling(kind):  # type: ignore[misc, valid-type]
        def state_dict(self) -> dict:
            return super().state_dict()

        def load_state_dict(self, state_dict: dict) -> None:
            super().load_state_dict(state_dict)

    Telling.__name__ = Telling.__qualname__ = f"Telling{kind.__name__}"
    return Telling


class Around(torch.optim.Optimizer):
    """Passes everything on to another one, as those of training libraries do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def state_dict(self) -> dict:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Foreign:
    """No optimizer of torch's at all."""

    def __init__(self, params: list) -> None:
        self.param_groups = [{"params": params, "lr": 0.1, "rate": 1.0}]
        self.trail = torch.zeros(3)

    def step(self) -> None:
        self.trail += 1

    def zero_grad(self) -> None:
        pass

    def state_dict(self) -> dict:
        return {"trail": self.trail}

    def load_state_dict(self, state: dict) -> None:
        self.trail = state["trail"]


class Stranger(Foreign):
    """Derived from it."""


def adam(around: bool) -> Make:
    if around:
        return lambda params: Around(torch.optim.Adam(params, lr=0.01))
    return lambda params: telling(torch.optim.Adam)(params, lr=0.01)


def sgd(around: bool) -> Make:
    if around:
        return lambda params: Around(torch.optim.SGD(params, lr=0.01, momentum=0.9))
    return lambda params: telling(torch.optim.SGD)(params, lr=0.01, momentum=0.9)


def kept(make: Make, patch: pytest.MonkeyPatch, *, silent: bool) -> Saved:
    """A step of two steps of it; `silent`: as a step of before says nothing of such an optimizer's class."""
    with patch.context() as change:
        if silent:
            change.setattr("zerostall.trainer.state.state.classes_of", lambda _: {})
        model, optimizer = twin(make)
        run(model, optimizer, 2, seed=1)
        return save(model=model, optimizer=optimizer)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("strict", [True, False, "stored"])
def test_optimizers_that_say_their_state_themselves_go_into_their_own_class_only(
    monkeypatch: pytest.MonkeyPatch, silent: bool, around: bool, strict: bool | str
) -> None:
    for one, other in ((adam, sgd), (sgd, adam)):
        saved = kept(one(around), monkeypatch, silent=silent)
        model, optimizer = twin(other(around))
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with pytest.raises(MismatchError) as caught:
            restore(saved, options={"strict": strict}, model=model, optimizer=optimizer)
        text = caught.value.different["optimizer"]
        assert "betas" in text and "nesterov" in text and ("stored by" in text)
        assert same(before, (model.state_dict(), optimizer.state_dict()))
        restore(saved, options={"only": ["model"]}, model=model, optimizer=optimizer)
        model, optimizer = twin(one(around))
        assert not restore(saved, options={"strict": strict}, model=model, optimizer=optimizer).warnings
        run(model, optimizer, 1, seed=2)


def test_an_optimizer_that_is_none_of_torchs_has_a_class_too() -> None:
    def make(kind: type) -> dict[str, object]:
        model = torch.nn.Linear(2, 2)
        return {"model": model, "optimizer": kind(list(model.parameters()))}

    saved = save(**make(Foreign))
    body = {key: value for key, value in vars(Foreign).items() if key not in ("__dict__", "__weakref__")}
    other = type("Pushed", (), body)
    with pytest.raises(MismatchError, match=r"stored by .*Foreign, and here it is .*Pushed"):
        restore(saved, **make(other))
    assert not restore(saved, **make(Foreign)).warnings
    report = restore(saved, **make(Stranger))
    assert any("Stranger" in text for text in report.warnings)


def test_options_of_schedulers_and_of_the_users_own_are_no_difference() -> None:
    def make(params: list) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([{"params": params, "share": 0.5}], lr=0.1)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
        return optimizer

    for silent in (False, True):
        model, optimizer = twin(OPTIMIZERS["sgd"])
        restore(stepped(make, silent=silent), model=model, optimizer=optimizer)
        model, optimizer = twin(make)
        restore(stepped(OPTIMIZERS["sgd"], silent=silent), model=model, optimizer=optimizer)


def test_what_torch_adds_to_a_class_in_time_is_no_difference() -> None:
    own = frozenset({"lr", "betas", "eps"})
    new = Fields(("lib.Adam",), own | {"maximize", "fused", "decoupled_weight_decay"})
    for old in (Fields((), own | {"initial_lr", "share"}), Fields(("old.Adam",), own)):
        assert compare(old, new, [], {}).fits
        assert compare(new, Fields(("old.Adam",), own), [], {}).fits
    assert compare(Fields(("lib.Adam",), frozenset({"x"})), new, [], {}).fits  # the very class may have changed
    assert not compare(Fields((), own | {"rho"}), Fields(("lib.B",), own | {"mu"}), [], {}).fits
