"""Containers, schedulers, scalers, averages: everything that is neither a module nor an optimizer."""

from __future__ import annotations

import argparse
import copy
import datetime
import enum
import itertools
import pickle
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as sched

from state_trip import Average, load, names, restore, same, save
from zerostall.errors import MismatchError, StateError
from zerostall.trainer.state import State

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "step": lambda o: sched.StepLR(o, 3, 0.5),
    "restarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 5),
    "one cycle": lambda o: sched.OneCycleLR(o, 0.5, total_steps=40),
    "plateau": lambda o: sched.ReduceLROnPlateau(o, patience=1),
    "lambda": lambda o: sched.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multi": lambda o: sched.MultiStepLR(o, [5, 15, 15]),
    "cyclic": lambda o: sched.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "chained": lambda o: sched.ChainedScheduler([sched.ExponentialLR(o, 0.9), sched.StepLR(o, 4)], optimizer=o),
    "sequential": lambda o: sched.SequentialLR(
        o, [sched.LinearLR(o, total_iters=4), sched.CosineAnnealingLR(o, 20)], milestones=[6]
    ),
}


class Loop:
    """A tiny training run; `draw` is its only source of randomness."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = SCHEDULERS[kind](self.optimizer)

    def run(self, start: int, stop: int) -> list[float]:
        rates = []
        for step in range(start, stop):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 3) * (step % 4 - 1)).square().sum().backward()
            self.optimizer.step()
            if isinstance(self.scheduler, sched.ReduceLROnPlateau):
                self.scheduler.step(1.0)
            else:
                self.scheduler.step()
            rates.append(self.optimizer.param_groups[0]["lr"])
        return rates

    def roots(self, order: str) -> dict[str, object]:
        return {name: getattr(self, name) for name in order.split()}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("order", ["model optimizer scheduler", "scheduler optimizer model"])
def test_learning_rates_go_on_whatever_the_order_of_roots(kind: str, order: str) -> None:
    whole = Loop(kind).run(0, 30)
    loop = Loop(kind)
    assert loop.run(0, 13) == whole[:13]
    saved = save(**loop.roots(order))
    fresh = Loop(kind)
    restore(saved, **fresh.roots(" ".join(reversed(order.split()))))
    assert fresh.run(13, 30) == whole[13:]


def test_a_loss_scaler_and_a_users_own_class() -> None:
    class Mine:
        def __init__(self, k: object) -> None:
            self.k = k

        def state_dict(self) -> dict:
            return {"k": self.k}

        def load_state_dict(self, state: dict) -> None:
            self.k = state["k"]

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=3)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler.update(2.0**9)
    again, mine = torch.amp.GradScaler("cpu"), Mine(None)
    saved = save(scaler=scaler, mine=Mine({"a": [1, torch.ones(3)]}))
    restore(saved, scaler=again, mine=mine)
    assert again.state_dict() == scaler.state_dict()
    assert same(mine.k, {"a": [1, torch.ones(3)]})
    with pytest.raises(MismatchError) as caught:
        restore(saved, scaler=again)
    assert caught.value.unexpected == ("mine.k.a[1]",)


def test_averages_are_a_second_copy() -> None:
    model = nn.Linear(40, 40)
    average, swa = Average(model), torch.optim.swa_utils.AveragedModel(model)
    for _ in range(20):
        with torch.no_grad():
            model.weight.add_(1)
        average.update(model)
        swa.update_parameters(model)
    saved = save(m=model, ema=average, swa=swa)
    assert {"swa.module.weight", "swa.n_averaged", "ema.shadow.weight"} <= names(saved)
    model2 = nn.Linear(40, 40)
    average2, swa2 = Average(model2), torch.optim.swa_utils.AveragedModel(model2)
    held = average2.shadow["weight"]
    restore(saved, ema=average2, m=model2, swa=swa2)
    assert average2.updates == 20 and average2.shadow["weight"] is held
    assert same(average2.shadow, average.shadow) and not same(held, model2.weight.detach())
    assert swa2.n_averaged == 20
    expected = average.shadow["weight"].clone()
    with torch.no_grad():
        model2.weight.add_(1)
    assert same(held, expected)


VALUES = {
    "none": None,
    "flag": True,
    "int": 10**30,
    "float": -0.0,
    "inf": float("-inf"),
    "complex": 1 + 2j,
    "text": "ü\n",
    "bytes": b"\0\xff",
    "array": bytearray(b"abc"),
    "list": [1, [2, (3, "x")]],
    "set": {1, 2},
    "frozen": frozenset({"a"}),
    "range": range(1, 9, 2),
    "ordered": OrderedDict(b=1, a=2),
    "default": defaultdict(list, {"k": [1]}),
    "counter": Counter("aab"),
    "queue": deque([1, 2], maxlen=3),
    "path": Path("a/b"),
    "when": datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC),
    "fraction": Fraction(1, 3),
    "space": types.SimpleNamespace(a=1, b=[2]),
    "args": argparse.Namespace(lr=0.1),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda:7"),
    "size": torch.Size([2, 3]),
    "np": np.float64(0.3),
    "npi": np.int32(-5),
    "days": np.array(["2024-05-01"], dtype="datetime64[D]"),
    1: "int key",
    (1, "t"): "tuple key",
}


def test_values_keep_their_exact_types_and_need_no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {**VALUES, "rng": [random.getstate(), np.random.get_state(), torch.get_rng_state()], "t": torch.ones(2)}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    for name in ("loads", "load", "dumps", "dump", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    saved = save(s=tree)
    assert same(load(saved)["s"], tree)
    empty = {"t": torch.zeros(2), "rng": None}
    restore(saved, s=empty)
    assert same({key: empty[key] for key in tree}, tree)


class Mode(enum.Enum):
    A = 1


def test_unsupported_values_are_all_named_when_saved() -> None:
    tree = {"mode": Mode.A, "ok": 1, "list": [1, object()], "key": {Mode.A: 1}, "fn": len}
    with pytest.raises(StateError) as caught:
        save(s=tree)
    assert [name for name in ("s.mode", "s.list[1]", "s.key", "s.fn") if name not in str(caught.value)] == []


def test_a_container_is_restored_in_place() -> None:
    tree = {
        "step": 7,
        "best": None,
        "hist": [1.0, 2.0],
        "nested": {"w": torch.ones(3), "k": 5},
        "pair": (torch.ones(2), 3),
    }
    saved = save(s=tree)
    target = {
        "step": 0,
        "best": 0.5,
        "hist": [],
        "nested": {"w": torch.zeros(3), "k": 0},
        "pair": (torch.zeros(2), 0),
    }
    inner, w, hist, first = target["nested"], target["nested"]["w"], target["hist"], target["pair"][0]
    restore(saved, s=target)
    assert same(target, tree)
    assert target["nested"] is inner and inner["w"] is w and target["hist"] is hist
    assert target["pair"][0] is first
    for other, name in [
        ({**target, "new": 1}, "s.new"),
        ({**target, "nested": {"w": torch.zeros(3), "k": 0, "v": torch.zeros(1)}}, "s.nested.v"),
    ]:
        with pytest.raises(MismatchError) as caught:
            restore(saved, s=other)
        assert caught.value.missing == (name,)
    for other, name in [
        ({**target, "step": torch.zeros(1)}, "s.step"),
        ({**target, "nested": [torch.zeros(3)]}, "s.nested"),
        ({**target, "nested": {"w": 1.0, "k": 0}}, "s.nested.w"),
    ]:
        with pytest.raises(MismatchError) as caught:
            restore(saved, s=other)
        assert name in caught.value.different


def test_only_some_values() -> None:
    saved = save(s={"step": 7, "nested": {"w": torch.ones(3), "k": 5}}, t={"x": 1})
    target = {"step": 0, "nested": {"w": torch.zeros(3), "k": 0}}
    restore(saved, options={"only": "s.nested.k"}, s=target)
    assert (target["step"], target["nested"]["k"], target["nested"]["w"].sum()) == (0, 5, 0)
    restore(saved, options={"only": ["s.*", "!s.step"]}, s=target)
    assert (target["step"], target["nested"]["w"].sum()) == (0, 3)


def test_objects_within_containers() -> None:
    def made(seed: int) -> dict[str, object]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model.weight.grad = torch.ones(2, 2)
        optimizer.step()
        return {"step": seed, "m": model, "o": [optimizer, sched.StepLR(optimizer, 2)]}

    source = made(5)
    saved = save(s=source)
    assert "s.o[0].weight.exp_avg" in names(saved)
    target = made(6)
    restore(saved, s=target)
    assert target["step"] == 5
    assert same(target["m"].state_dict(), source["m"].state_dict())
    assert same(target["o"][0].state_dict(), source["o"][0].state_dict())
    tree = load(saved)["s"]
    assert same(tree["m"]["weight"], source["m"].weight.detach()) and tree["step"] == 5


def test_values_are_isolated_from_later_changes() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tree = copy.deepcopy({key: value for key, value in VALUES.items() if key != "ordered"})
    expected = copy.deepcopy(tree)
    state = State({"s": tree, "o": optimizer, "m": model})
    survey = state.survey()
    values = state.values(survey)
    before = bytes(values.encode())
    tree["list"][1].append(9)
    tree["set"].add(9)
    tree["array"].extend(b"z")
    tree["default"]["k"].append(2)
    tree["counter"]["a"] += 1
    tree["queue"].append(9)
    tree["space"].b.append(3)
    tree["args"].lr = 9
    tree["days"][0] = np.datetime64("1999-01-01")
    tree["none"] = 1
    optimizer.param_groups[0]["lr"] = 9.0
    random.random()
    np.random.rand()
    torch.rand(1)
    assert bytes(values.encode()) == before
    assert not same(tree, expected)


def test_names_of_roots_are_escaped_too() -> None:
    roots = {"a.b": {"x": torch.ones(1)}, "a": {"b": {"x": torch.zeros(1)}}, "c[0]": [torch.ones(2)]}
    saved = save(**roots)
    assert same(load(saved), roots)
    restore(saved, **copy.deepcopy(roots))
    for name in ("", "__metadata__"):
        with pytest.raises(StateError, match="no name"):
            save(**{name: {}})


def test_step_in_the_state_is_the_step_that_is_restored() -> None:
    tree = {"step": 0, "seen": []}
    for step in range(1, 6):
        tree["step"] = step
        tree["seen"].append(step)
        saved = save(s=tree)
    target = {"step": 0, "seen": []}
    restore(saved, s=target)
    assert target == {"step": 5, "seen": [1, 2, 3, 4, 5]}


def test_devices_in_values_need_not_exist() -> None:
    target = {"dev": None}
    restore(save(s={"dev": torch.device("cuda:7")}), s=target)
    assert target["dev"] == torch.device("cuda:7")


def test_a_stored_kind_that_is_another_now() -> None:
    scaler = torch.amp.GradScaler("cpu")
    saved = save(x=scaler)
    model = nn.Linear(2, 2)
    with pytest.raises(MismatchError) as caught:
        restore(saved, x=torch.optim.SGD(model.parameters()))
    assert "stateful" in caught.value.different["x"]


@pytest.mark.parametrize("strict", [True, False])
def test_every_root_must_be_stored(strict: bool) -> None:
    scaler = torch.amp.GradScaler("cpu")
    saved = save(a=scaler)
    for roots, kind in itertools.product(({"b": torch.Generator()}, {"a": scaler, "b": torch.Generator()}), ["b"]):
        if strict:
            with pytest.raises(MismatchError) as caught:
                restore(saved, **roots)
            assert caught.value.missing == (kind,)
        else:
            assert restore(saved, options={"strict": False}, **roots).missing == (kind,)


def test_what_is_no_part_of_a_state_is_told_how_to_become_one() -> None:
    with pytest.raises(StateError) as caught:
        State({"epoch": 3, "seen": {1, 2}}).survey()
    assert 'hand over a dict that holds it: progress={"epoch": epoch}' in str(caught.value)
    assert "seen is of type set, which cannot be restored in place: it has no state_dict()" in str(caught.value)
