"""A part of the state is saved, by name or because it is trained; the rest is left alone, and told from another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from state_trip import names, restore, restore_state, same, save, save_state
from zerostall.errors import MismatchError, StateError
from zerostall.trainer.state import Choice, State

DIFFERS = "the base differs"


def adapted(seed: int = 1) -> nn.Sequential:
    """A frozen base with something small that is trained."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 700)).requires_grad_(False)
    model.add_module("lora", nn.Linear(40, 2))
    return model


def state(only: str | list[str] | None = None, frozen: str = "save", **roots: object) -> State:
    return State(roots, rng=False, choice=Choice.of(only, frozen, alone=True))


def trained() -> set[str]:
    return {"m.lora.weight", "m.lora.bias", "m.1.running_mean", "m.1.running_var", "m.1.num_batches_tracked"}


def test_frozen_parameters_are_left_out_and_left_alone() -> None:
    model = adapted()
    saved = save_state(state(frozen="leave", m=model))
    assert names(saved) == trained()
    target = adapted()
    with torch.no_grad():
        target.lora.weight.zero_()
    report = restore_state(saved, state(frozen="leave", m=target))
    assert same(dict(target.state_dict()), dict(model.state_dict()))
    assert report.warnings == ()


def test_what_is_trained_from_now_on_is_saved_from_now_on() -> None:
    model = adapted()
    chosen = state(frozen="leave", m=model)
    survey = chosen.survey()
    assert chosen.observe(survey)[0] is survey
    model[0].weight.requires_grad_(True)
    assert "m.0.weight" in {entry.name for entry in chosen.observe(survey)[0].layout.entries}


def test_another_base_is_told_of() -> None:
    saved = save_state(state(frozen="leave", m=adapted()))
    for changed in ("0.weight", "2.bias"):
        other = adapted()
        with torch.no_grad():
            other.get_parameter(changed)[-1] += 1
        for target, strict in ((state(frozen="leave", m=other), True), (State({"m": other}, rng=False), "stored")):
            report = restore_state(saved, target, strict=strict)
            assert any(DIFFERS in warning for warning in report.warnings)


def test_large_tensors_are_told_by_a_sample() -> None:
    def model(value: float) -> nn.Module:
        made = nn.Linear(1000, 1000, bias=False).requires_grad_(False)
        nn.init.constant_(made.weight, value)
        made.add_module("head", nn.Linear(3, 3))
        return made

    saved = save_state(state(frozen="leave", m=model(1.0)))
    assert restore_state(saved, state(frozen="leave", m=model(1.0))).warnings == ()
    assert DIFFERS in restore_state(saved, state(frozen="leave", m=model(1.5))).warnings[0]


def test_all_that_is_stored_must_find_its_place() -> None:
    """Restored over a given base, as for inference: the target has more than was saved."""
    model = adapted()
    saved = save_state(state(frozen="leave", m=model))
    target = adapted()
    with torch.no_grad():
        target.lora.weight.zero_()
    with pytest.raises(MismatchError, match="missing"):
        restore(saved, m=target)
    report = restore(saved, options={"strict": "stored"}, m=target)
    assert same(dict(target.state_dict()), dict(model.state_dict()))
    assert set(report.missing) == {"m.0.weight", "m.0.bias", "m.1.weight", "m.1.bias", "m.2.weight", "m.2.bias"}
    assert report.warnings == ()
    without = adapted()
    del without.lora
    with pytest.raises(MismatchError) as caught:
        restore(saved, options={"strict": "stored"}, m=without)
    assert set(caught.value.unexpected) == {"m.lora.weight", "m.lora.bias"}
    with pytest.raises(ValueError, match="strict='almost'"):
        restore(saved, options={"strict": "almost"}, m=target)


def test_other_objects_are_chosen_as_a_whole() -> None:
    model = adapted()
    optimizer = torch.optim.AdamW(model.lora.parameters())
    model.lora(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    roots = {"m": model, "o": optimizer, "data": {"nets": [nn.Linear(2, 2)], "n": 3}, "big": {"t": torch.zeros(9)}}
    saved = save_state(state(["m.lora.*", "o", "data"], **roots))
    assert {name for name in names(saved) if name.startswith("o.")} == {
        f"o.lora.{name}.{key}" for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert {name for name in names(saved) if not name.startswith("o.")} == {
        *("m.lora.weight", "m.lora.bias"),
        *("data.nets[0].weight", "data.nets[0].bias"),
    }
    again = save_state(state(["*", "!m.0.*", "!m.1.*", "!m.2.*", "!big"], **roots))
    assert names(again) == names(saved)
    target = adapted()
    fresh = torch.optim.AdamW(target.lora.parameters())
    data = {"nets": [nn.Linear(2, 2)], "n": 0}
    chosen = state(["m.lora.*", "o", "data"], m=target, o=fresh, data=data, big={"t": torch.ones(9)})
    restore_state(saved, chosen)
    assert data["n"] == 3
    assert same(target.lora.weight.data, model.lora.weight.data)
    assert len(fresh.state) == 2


def test_a_module_with_a_state_dict_of_its_own_is_chosen_as_a_whole() -> None:
    class Odd(nn.Linear):
        def state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:
            return super().state_dict(*args, **kwargs)

    model = nn.Sequential(nn.Linear(2, 2), Odd(3, 3))
    assert names(save_state(state("m.0.*", m=model))) == {"m.0.weight", "m.0.bias"}
    assert names(save_state(state("m.1.*", m=model))) == {"m.1.weight", "m.1.bias"}


def test_a_pattern_that_fits_nothing_is_refused_before_anything_is_saved() -> None:
    for only in ("no_such.*", ["m.*", "!m.loar.*"], "o.*"):
        with pytest.raises(ValueError, match=r"fits no name; names begin with m$"):
            state(only, m=adapted())
    Choice.of("another.ranks.*", "save", alone=False).insist_on_use(["m."])
    with pytest.raises(ValueError, match="frozen='drop'"):
        Choice.of(None, "drop", alone=True)  # pyright: ignore[reportArgumentType]


def test_shapes_that_are_expected() -> None:
    shapes = {"m.w": (8, 8)}

    def survey(**tree: object) -> None:
        State({"m": tree}, rng=False, expected=shapes).survey()

    survey(w=torch.ones(8, 8))
    whole = torch.ones(9, 8)
    survey(all=whole, w=whole[:8])
    with pytest.raises(StateError, match=r"m\.w has shape \(0,\), expected \(8, 8\)"):
        survey(w=nn.Parameter(torch.empty(0)))
    with pytest.raises(StateError, match=r"m\.w is not there"):
        survey(v=torch.ones(8, 8))
    saved = save(m={"w": torch.empty(0)})  # legal where nobody expects more
    with pytest.raises(MismatchError):
        restore(saved, m={"w": torch.zeros(8, 8)})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Linear(3, 4)
        self.l2 = nn.Linear(3, 4)
        self.l2.weight = self.l1.weight
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("freqs", torch.ones(3), persistent=False)


def test_memory_for_a_module_on_the_meta_device() -> None:
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.l1(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = save(m=model, o=optimizer)
    with torch.device("meta"):
        target = Net()
    later = torch.optim.SGD(target.parameters(), momentum=0.9)
    kept = dict(target.named_parameters())
    report = restore(saved, options={"meta_to": "cpu"}, m=target, o=later)
    assert same(dict(target.state_dict()), dict(model.state_dict()))
    assert all(target.get_parameter(name) is parameter for name, parameter in kept.items())
    assert target.l1.weight is target.l2.weight
    assert target.l1.weight.requires_grad
    assert later.param_groups[0]["params"][0] is target.l1.weight
    assert len(later.state) == 2  # the weight and one bias
    assert [warning for warning in report.warnings if "m.freqs" in warning and "meta" in warning]
    target.l1(torch.ones(3)).sum().backward()
    later.step()


def test_what_is_not_stored_stays_on_the_meta_device() -> None:
    saved = save(m={"l1": {"weight": torch.ones(4, 3)}})
    with torch.device("meta"):
        target = {"l1": {"weight": torch.ones(4, 3), "bias": torch.ones(4)}}
    report = restore(saved, options={"meta_to": "cpu", "strict": "stored"}, m=target)
    assert torch.equal(target["l1"]["weight"], torch.ones(4, 3))
    assert target["l1"]["bias"].is_meta
    assert report.missing == ("m.l1.bias",)
    assert ["m.l1.bias" in warning for warning in report.warnings] == [True]


def test_memory_is_taken_back_where_the_snapshot_does_not_fit() -> None:
    saved = save(m=Net(), more={"t": torch.ones(1)})
    with torch.device("meta"):
        target = Net()
    with pytest.raises(MismatchError, match="more"):
        restore(saved, options={"meta_to": "cpu"}, m=target)
    assert all(tensor.is_meta for tensor in target.state_dict().values())


def test_slips_in_names_are_found_when_the_state_is_handed_over() -> None:
    model = adapted()
    roots = {"m": model, "o": torch.optim.AdamW(model.lora.parameters()), "d": {"ema": torch.ones(2)}}
    for pattern in ("m.laura.*", "model.*", ["m", "!m.laura"], "x*", "optim"):
        with pytest.raises(ValueError, match=r"require_finite=.* fits no name; names begin with d, m"):
            State(roots, rng=False, finite=pattern)
    # An optimizer comes to have more in time, and so may a dict.
    for pattern in (
        "m.lora.*",
        "m",
        "*",
        "*.weight",
        "o*",
        "o",
        "o.lora.weight.exp_avg",
        ["*", "!o.*.step"],
        "d.new.*",
    ):
        State(roots, rng=False, finite=pattern)
    State(roots, rng=False, finite="another.ranks", choice=Choice(alone=False))
    with pytest.raises(StateError, match=r"expect_shapes: there is no m\.laura\.weight; names begin with d, m"):
        State(roots, rng=False, expected={"m.laura.weight": (2, 40), "o.lora.weight.exp_avg": (2, 40)})
