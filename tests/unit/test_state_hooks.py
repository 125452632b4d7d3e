"""What changes what modules say of themselves, between two saves of a state at rest, is seen by the second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import zerostall
from zerostall.trainer.state import Rest, State, Survey
from zerostall.trainer.state.parts import hooking


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self[1].register_buffer("scratch", torch.ones(4), persistent=False)


def _with(key: str, value: object) -> Callable[..., None]:
    return lambda module, state, prefix, local: state.__setitem__(prefix + key, value)


def _post(net: Net) -> None:
    net[0].register_state_dict_post_hook(_with("scale", torch.full((2,), 5.0)))


def _pre(net: Net) -> None:
    net[0].register_state_dict_pre_hook(lambda module, prefix, keep: None)


def _persistent(net: Net) -> None:
    net[1]._non_persistent_buffers_set.discard("scratch")


def _no_more(net: Net) -> None:
    net[1]._non_persistent_buffers_set.add("running_mean")


def _in_the_place_of_another(net: Net) -> None:
    _persistent(net)
    _no_more(net)


def _extra(net: Net) -> None:
    type(net).get_extra_state = lambda self: {"seen": 7}  # type: ignore[method-assign]


CHANGES: dict[str, tuple[Callable[[Net], None], set[str], set[str]]] = {
    "a hook": (_post, {"model.0.scale"}, set()),
    "a hook before": (_pre, set(), set()),
    "a buffer that is saved now": (_persistent, {"model.1.scratch"}, set()),
    "one that is not any more": (_no_more, set(), {"model.1.running_mean"}),
    "one in the place of another": (_in_the_place_of_another, {"model.1.scratch"}, {"model.1.running_mean"}),
    "a state of its own": (_extra, set(), set()),
}


@pytest.fixture
def net() -> Net:
    return type("Net", (Net,), {})()  # a class for each test, which it may change


def at_rest(state: State) -> tuple[Survey, Rest]:
    survey, rest = state.survey(), None
    for _ in range(3):
        rest = state.rest(survey, state.values(survey))
    assert rest is not None and rest.still.same() and state.fits(survey)
    return survey, rest


@pytest.mark.parametrize("change", list(CHANGES))
def test_every_change_is_seen_by_the_next_look(net: Net, change: str) -> None:
    state = State({"model": net})
    survey, rest = at_rest(state)
    next(net.parameters()).data.add_(1)
    assert rest.still.same()
    make, more, less = CHANGES[change]
    make(net)
    assert not rest.still.same() and not rest.still.same()
    assert not state.fits(survey) and not state.fits(survey)
    before, after = ({entry.name for entry in one.layout.entries} for one in (survey, state.survey()))
    assert (after - before, before - after) == (more, less)


def test_hooks_of_other_kinds_and_one_that_is_gone_again_end_no_rest(net: Net) -> None:
    state = State({"model": net})
    survey, rest = at_rest(state)
    for _ in range(2):
        net[0].register_forward_hook(lambda *_: None)
        next(net.parameters()).register_hook(lambda grad: None)
        net[0].register_state_dict_post_hook(_with("scale", 1)).remove()
        type(net).notes = object()  # type: ignore[attr-defined]
        assert rest.still.same() and state.fits(survey)


@pytest.mark.usefixtures("own_agent")
def test_a_save_has_what_a_hook_adds_from_then_on(net: Net, tmp_path: Path) -> None:
    with zerostall.Checkpointer(tmp_path, keep=9, when_busy="wait", model=net) as ckpt:
        for step in (1, 2, 3, 4):
            if step == 4:
                _post(net)
                _persistent(net)
                _extra(net)
            ckpt.save(step)
    before, after = (cast("dict[str, Any]", zerostall.load(tmp_path, step)["model"]) for step in (3, 4))
    # A submodule that speaks for itself stands as it said it.
    assert after.keys() - before.keys() == {"0", "1.scratch", "_extra_state"}
    assert after["0"]["scale"].tolist() == [5.0, 5.0] and after["_extra_state"] == {"seen": 7}


def test_where_nothing_tells_of_new_hooks_all_are_looked_at(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooking, "_tells", lambda: False)
    state = State({"model": net})
    _, rest = at_rest(state)
    _post(net)
    assert not rest.still.same()


def test_this_torch_and_this_python_tell() -> None:
    assert hooking._tells()
