"""Modules: canonical names under every wrapper, what belongs to their state and what does not."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from state_trip import aliases, load, names, restore, same, save
from zerostall.errors import MismatchError, StateError
from zerostall.trainer.state import Asked, State


class Net(nn.Module):
    """Has a genuine child called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_parameter("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](self.module(x)))


NAMES = {
    "m.module.weight",
    "m.module.bias",
    "m.blocks.0.weight",
    "m.blocks.0.bias",
    "m.blocks.1.weight",
    "m.blocks.1.bias",
    "m.blocks.1.running_mean",
    "m.blocks.1.running_var",
    "m.blocks.1.num_batches_tracked",
    "m.count",
}


class Parallel(nn.parallel.DistributedDataParallel):
    """The class without its process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def __getattr__(self, name: str) -> object:
        return nn.Module.__getattr__(self, name)


def compile_inner(module: nn.Module) -> nn.Module:
    module.blocks[0] = torch.compile(module.blocks[0], backend="eager")
    return module


def checkpoint_inner(module: nn.Module) -> nn.Module:
    module.module = checkpoint_wrapper(module.module)
    return module


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda m: m,
    "compile": compiled,
    "ddp": Parallel,
    "dp": lambda m: _data_parallel(m),
    "compile ddp": lambda m: compiled(Parallel(m)),
    "ddp compile": lambda m: Parallel(compiled(m)),
    "inner compile": compile_inner,
    "inner checkpoint": checkpoint_inner,
}


def _data_parallel(module: nn.Module) -> nn.Module:
    made = nn.DataParallel.__new__(nn.DataParallel)
    nn.Module.__init__(made)
    made.module = module
    return made


def trained(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("one", "other"), list(itertools.product(WRAPS, repeat=2)))
def test_names_do_not_depend_on_wrappers(one: str, other: str) -> None:
    model, optimizer = trained(1)
    expected = copy.deepcopy(model.state_dict())
    saved = save(m=WRAPS[one](model), o=optimizer)
    assert {name for name in names(saved) if name.startswith("m.")} == NAMES
    model2, optimizer2 = trained(2)
    restore(saved, m=WRAPS[other](model2), o=optimizer2)
    plain = dict(zip(expected, model2.state_dict().values(), strict=True))
    assert same(plain, dict(expected))
    weight = next(model2.parameters())
    assert same(optimizer2.state[weight], optimizer.state[next(model.parameters())])


def test_state_is_restored_in_place_and_changes_are_visible_to_autograd() -> None:
    model, _ = trained(1)
    saved = save(m=model)
    target, _ = trained(2)
    held = [(id(t), t.data_ptr(), t._version) for t in target.parameters()]
    restore(saved, m=target)
    assert same(dict(target.state_dict()), dict(model.state_dict()))
    for (which, where, version), tensor in zip(held, target.parameters(), strict=True):
        assert (which, where) == (id(tensor), tensor.data_ptr())
        assert tensor._version > version


def test_loaded_without_a_module_it_is_a_flat_dict() -> None:
    model, _ = trained(1)
    tree = load(save(m=model))["m"]
    assert same(dict(sorted(tree.items())), dict(sorted(model.state_dict().items())))


def test_both_missing_and_unexpected_tensors_are_errors_and_nothing_is_written() -> None:
    saved = save(m=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    target = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(MismatchError) as caught:
        restore(saved, m=target)
    assert caught.value.missing == ("m.c.weight", "m.c.bias")
    assert set(caught.value.unexpected) == {"m.b.bias", "m.b.weight"}
    assert same(dict(before), dict(target.state_dict()))
    report = restore(saved, options={"strict": False}, m=target)
    assert set(report.missing) == {"m.c.bias", "m.c.weight"}
    assert set(report.unexpected) == {"m.b.bias", "m.b.weight"}
    assert report.tensors == 2 and report.nbytes == 24


def test_a_part_of_it_under_other_names() -> None:
    source = nn.ModuleDict({"enc": nn.Linear(30, 30), "head": nn.Linear(30, 3)})
    other = torch.optim.SGD(source.parameters(), lr=1.0)
    saved = save(m=source, o=other)
    target = nn.ModuleDict({"encoder": nn.Linear(30, 30), "head": nn.Linear(30, 9)})
    head = target["head"].weight.clone()
    state = State({"net": target}, rng=False)
    targets = state.targets(saved.stored, Asked(only="net.encoder.*", rename={r"^net\.encoder": "m.enc"}))
    picked = sum(saved.stored.layout.entries[index].nbytes for index in targets.entries)
    assert picked == sum(p.nbytes for p in source["enc"].parameters()), "no other bytes are asked for"
    restore(saved, options={"only": "net.encoder.*", "rename": {r"^net\.encoder": "m.enc"}}, net=target)
    assert torch.equal(target["encoder"].weight, source["enc"].weight)
    assert torch.equal(target["head"].weight, head)
    with pytest.raises(MismatchError):
        restore(saved, options={"rename": {"^net": "nope"}}, net=target)
    for options in ({"only": "no_such.*"}, {"rename": {"no_such": "x"}}):
        with pytest.raises(ValueError, match="no name"):
            restore(saved, options=options, net=target)


def test_prefixes_of_wrappers_in_what_was_stored_elsewhere() -> None:
    model, optimizer = trained(1)
    saved = save(m={"_orig_mod": {"module": {"w": torch.ones(2)}}})
    target = {"module": {"w": torch.zeros(2)}}
    with pytest.raises(MismatchError) as caught:
        restore(saved, m=target)
    assert "prefixes" in caught.value.hint
    restore(saved, options={"prefixes": True, "strict": False}, m=target)
    assert target["module"]["w"].sum() == 2
    del model, optimizer


def test_shared_submodules_are_one_state_under_two_names() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": shared})
    saved = save(m=model)
    assert aliases(saved) == {"m.b.weight": "m.a.weight", "m.b.bias": "m.a.bias"}
    apart = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    restore(saved, m=apart)
    assert same(dict(apart.state_dict()), dict(model.state_dict()))


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = {"amax": torch.tensor([1.0, 2.0]), "steps": 3}

    def get_extra_state(self) -> object:
        return self.scale

    def set_extra_state(self, state: object) -> None:
        self.scale = state


def test_extra_state() -> None:
    source = nn.Sequential(Extra(), nn.Linear(2, 2))
    saved = save(m=source)
    source[0].scale["steps"] = 9
    target = nn.Sequential(Extra(), nn.Linear(2, 2))
    target[0].scale = {"amax": torch.zeros(2), "steps": 0}
    restore(saved, m=target)
    assert same(target[0].scale, {"amax": torch.tensor([1.0, 2.0]), "steps": 3})
    assert load(saved)["m"]["0._extra_state"]["steps"] == 3


class Packed(nn.Module):
    """Saves something else than what it holds."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), value))
        self.inner = nn.Linear(2, 2)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "doubled"] = destination.pop(prefix + "w").detach() * 2

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        state_dict[prefix + "w"] = state_dict.pop(prefix + "doubled") / 2
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_that_changes_its_state_dict_is_asked_and_only_that_one(caplog: pytest.LogCaptureFixture) -> None:
    source = nn.ModuleDict({"plain": nn.Linear(2, 2), "packed": Packed(3.0)})
    optimizer = torch.optim.SGD(source.parameters(), momentum=0.9)
    for parameter in source.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with caplog.at_level(logging.INFO, logger="zerostall"):
        saved = save(m=source, o=optimizer)
        save(m=source, o=optimizer)
    assert [r.message for r in caplog.records].count("Packed overrides _save_to_state_dict, so its state goes "
                                                     "through its own state_dict()") <= 1  # fmt: skip
    assert {"m.plain.weight", "m.packed.doubled", "m.packed.inner.weight", "o.packed.w.momentum_buffer"} <= names(saved)
    target = nn.ModuleDict({"plain": nn.Linear(2, 2), "packed": Packed(0.0)})
    optimizer2 = torch.optim.SGD(target.parameters(), momentum=0.9)
    held = target["packed"].w.data_ptr()
    restore(saved, m=target, o=optimizer2)
    assert same(dict(target.state_dict()), dict(source.state_dict()))
    assert target["packed"].w.data_ptr() == held


def test_hooks() -> None:
    calls = []

    def made() -> nn.Linear:
        module = nn.Linear(2, 2)
        module._register_load_state_dict_pre_hook(lambda *args: calls.append("old names"))
        module.register_load_state_dict_post_hook(lambda module, keys: calls.append(keys))
        return module

    source, target = made(), made()
    restore(save(m=source), m=target)
    assert torch.equal(source.weight, target.weight)
    assert calls == [([], [])], "the state needs no renaming, but the module may want to know that it is new"
    hooked = nn.Linear(2, 2)
    hooked.register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.update({prefix + "bias": state.pop(prefix + "bias") + 1})
    )
    assert same(load(save(m=hooked))["m"]["bias"], hooked.bias.detach() + 1)


def test_parametrized_modules() -> None:
    source = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    target = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    saved = save(m=source)
    assert "m.parametrizations.weight.original0" in names(saved)
    restore(saved, m=target)
    assert torch.equal(target.weight, source.weight)


def test_a_flat_parameter_without_its_wrapper_is_refused() -> None:
    from torch.distributed.fsdp._flat_param import FlatParameter

    flat = FlatParameter(torch.ones(3))
    with pytest.raises(StateError, match=r"m\._flat_param is a flat parameter .*FullyShardedDataParallel"):
        module = nn.Linear(2, 2)
        module._parameters["_flat_param"] = flat
        save(m=module)
    with pytest.raises(StateError, match=r"o holds what is a flat parameter"):
        save(o=torch.optim.SGD([flat], lr=0.1))


def test_a_distributed_tensor_of_one_rank_is_its_local_one() -> None:
    from torch import distributed
    from torch.distributed.tensor import DeviceMesh, DTensor, Partial, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])

        def made(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
            module = nn.Module()
            module.w = nn.Parameter(distribute_tensor(torch.full((4, 3), value), mesh))
            module.b = nn.Parameter(torch.full((3,), value))
            return module, torch.optim.Adam(module.parameters(), foreach=False)

        source, optimizer = made(1.0)
        for parameter in (source.w, source.b):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        saved = save(m=source, o=optimizer)
        target, other = made(2.0)
        restore(saved, m=target, o=other)
        assert torch.equal(target.w.full_tensor(), source.w.full_tensor())
        moments = other.state[target.w]["exp_avg"]
        assert isinstance(moments, DTensor), "state is dealt out as its parameter is"
        assert torch.equal(moments.full_tensor(), optimizer.state[source.w]["exp_avg"].full_tensor())
        plain = nn.Module()
        plain.w, plain.b = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(3))
        restore(save(m=source), m=plain)
        assert torch.equal(plain.w, source.w.full_tensor())
        state = State({"m": source}, rng=False)
        survey = state.survey()
        assert state.fits(survey)
        source.w._local_tensor = source.w._local_tensor.clone()
        assert not state.fits(survey), "the old local tensor would be saved"
        half = nn.Module()
        half.w = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
        with pytest.raises(StateError, match=r"m\.w is a distributed tensor with a Partial placement"):
            save(m=half)
    finally:
        distributed.destroy_process_group()


def test_changes_of_a_module_are_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    state = State({"m": model}, rng=False)
    survey = state.survey()
    assert state.fits(survey)

    def changed() -> bool:
        nonlocal survey
        seen = not state.fits(survey)
        survey = state.survey()
        return seen and state.fits(survey)

    model[0].weight.data = torch.zeros(2, 2)
    assert state.fits(survey), "another address under the same parameter: the refresh of addresses sees that"
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert changed()
    model[1].register_buffer("b", torch.zeros(1))
    assert changed()
    model[0].add_module("adapter", nn.Linear(2, 2))
    assert changed()
    model[0] = nn.Linear(2, 2)
    assert changed()
    model[0].bias = None
    assert changed()
    del model[1]
    assert changed()


def test_lora_and_a_filter() -> None:
    def base(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).requires_grad_(False)
        made.add_module("lora", nn.Linear(40, 2))
        return made

    def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
        return {name: p for name, p in module.named_parameters() if p.requires_grad}

    model = base(1)
    saved = save(m=trainable(model))
    assert saved.stored.layout.nbytes < 4096 + sum(p.nbytes for p in trainable(model).values()) + 64
    other = base(1)
    with torch.no_grad():
        other.lora.weight.zero_()
    restore(saved, m=trainable(other))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    whole = save(m=model)
    restore(whole, options={"only": "m.lora.*"}, m=other)
    with pytest.raises(ValueError, match="no name"):
        restore(whole, options={"only": "m.no_such.*"}, m=other)


def test_a_model_that_holds_what_surveys_it_can_be_collected() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    state = State({"m": model}, rng=False)
    model[0].survey = state.survey()
    gone = weakref.ref(model[0])
    del model, state
    gc.collect()
    assert gone() is None
