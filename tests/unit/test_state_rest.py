"""A state at rest: by one look it is told that what was read of it last would be read again."""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

import zerostall
from zerostall.trainer.state import Rest, State, Survey
from zerostall.trainer.state.parts import rng


class Job:
    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5)
        self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def state(self) -> State:
        return State({"model": self.model, "optimizer": self.optimizer})


def _other_parameter(job: Job) -> None:
    cast("torch.nn.Linear", job.model[0]).bias = torch.nn.Parameter(torch.zeros(4))


def _other_state(job: Job) -> None:
    job.optimizer.state = defaultdict(dict)


def _reloaded(job: Job) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())


CHANGES: dict[str, Callable[[Job], object]] = {
    "another rate": lambda job: job.optimizer.param_groups[0].update(lr=0.25),
    "another parameter": _other_parameter,
    "an optimizer that was loaded": _reloaded,
    "an optimizer that has forgotten": _other_state,
    "another group": lambda job: job.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]}),
    "torch drew": lambda job: torch.rand(1),
    "python drew": lambda job: random.random(),
    "numpy drew": lambda job: np.random.rand(),
}


def at_rest(state: State) -> tuple[Survey, Rest]:
    survey, rest = state.survey(), None
    for _ in range(3):
        rest = state.rest(survey, state.values(survey))
    assert rest is not None
    return survey, rest


@pytest.mark.parametrize("change", list(CHANGES))
def test_every_change_of_what_is_no_tensor_ends_the_rest(change: str) -> None:
    job = Job()
    state = job.state()
    _, rest = at_rest(state)
    job.step()  # tensors alone
    assert rest.still.same() and rest.reads == state.reads
    CHANGES[change](job)
    assert not rest.still.same()


def test_what_is_others_each_time_is_never_at_rest() -> None:
    job = Job()
    state = job.state()
    survey = state.survey()
    for step in range(4):
        job.optimizer.param_groups[0]["lr"] = 1.0 / (1 + step)
        assert state.rest(survey, state.values(survey)) is None


def test_whoever_reads_values_ends_the_rest() -> None:
    state = Job().state()
    survey, rest = at_rest(state)
    state.values(survey)
    assert rest.reads != state.reads


@pytest.mark.parametrize("change", [_other_state, _reloaded])
def test_a_survey_does_not_fit_an_optimizer_whose_state_is_another_dict(change: Callable[[Job], None]) -> None:
    job = Job()
    state = job.state()
    survey, _ = at_rest(state)
    for after in (change, Job.step):
        after(job)
        survey, _ = state.observe(survey)
        found = {id(tensor) for tensor in survey.tensors}
        kept = [tensor for slots in job.optimizer.state.values() for tensor in slots.values()]
        assert all(id(tensor) in found for tensor in kept)
        assert len(found) == len(kept) + 4


def test_groups_in_the_place_of_others_are_looked_at_before_their_options_are_taken() -> None:
    job = Job()
    state = job.state()
    survey, _ = at_rest(state)
    job.optimizer.param_groups = [{**job.optimizer.param_groups[0], "lr": torch.tensor(0.25)}]
    survey, values = state.observe(survey)
    assert "optimizer[0].lr" in {entry.name for entry in survey.layout.entries}
    values.encode()


def test_the_rest_is_told_by_what_was_read_for_it_not_by_what_others_have_read_since() -> None:
    state = Job().state()
    survey, _ = at_rest(state)
    values = state.values(survey)
    torch.rand(1)
    state.values(survey)  # as for another save
    rest = state.rest(survey, values)
    assert rest is None or not rest.still.same()


def test_values_are_put_into_words_once_for_all_saves_of_a_rest_and_anew_after_it() -> None:
    job = Job()
    state = job.state()
    survey, rest = at_rest(state)
    said = rest.values.encode()
    assert rest.values.again().encode() is said
    job.optimizer.param_groups[0]["lr"] = 0.25
    changed = state.values(survey).encode()
    assert changed is not said and bytes(changed) != bytes(said)


def test_devices_that_come_up_while_a_state_rests_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rest = at_rest(Job().state())
    drawn = torch.ones(16, dtype=torch.uint8)
    monkeypatch.setattr(rng.Generators, "read_on_devices", lambda _: [drawn])
    generators = rest.values.again().generators
    assert generators is not None and generators.cuda == [drawn]


def test_a_state_with_parts_that_must_be_asked_is_never_at_rest() -> None:
    job = Job()
    state = State({"model": job.model, "progress": {"tokens": 5}})
    survey = state.survey()
    assert all(state.rest(survey, state.values(survey)) is None for _ in range(4))


@pytest.mark.usefixtures("own_agent")
def test_saves_of_a_state_at_rest_hold_what_was_changed_between_them(tmp_path: Path) -> None:
    job = Job()
    rates = {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.25, 5: 0.25, 6: 0.25, 7: 0.125}
    drawn: dict[int, float] = {}
    with zerostall.Checkpointer(tmp_path, keep=20, when_busy="wait", model=job.model, optimizer=job.optimizer) as ckpt:
        for step, rate in rates.items():
            if job.optimizer.param_groups[0]["lr"] != rate:
                job.optimizer.param_groups[0]["lr"] = rate
            ckpt.save(step)
            state = torch.get_rng_state()
            drawn[step] = float(torch.rand(1))
            if step % 3:
                torch.set_rng_state(state)  # drawn by no training: the generator is as it was
            job.step()
    for step, rate in rates.items():
        with zerostall.Checkpointer(tmp_path, keep=20, model=job.model, optimizer=job.optimizer) as ckpt:
            assert ckpt.restore(step=step) == step
            assert job.optimizer.param_groups[0]["lr"] == rate
            assert float(torch.rand(1)) == drawn[step]


class DeviceGenerator:
    """As one of CUDA's: a seed, an offset, and a state that is made of both."""

    def __init__(self, extra: bytes = b"") -> None:
        self.seed, self.offset, self.extra, self.asked = 7, 0, extra, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def get_state(self) -> torch.Tensor:
        self.asked += 1
        return torch.tensor(list(struct.pack("=Qq", self.seed, self.offset) + self.extra), dtype=torch.uint8)


READER = rng.Generators()


def states(*generators: DeviceGenerator) -> list[bytes]:
    found = READER.states_on_devices(cast("list[torch.Generator]", list(generators)))
    return [bytes(state.tolist()) for state in found]


def test_generators_of_devices_are_read_when_they_were_used() -> None:
    one, other = DeviceGenerator(), DeviceGenerator()
    first = states(one, other)
    assert states(one, other) == first and (one.asked, other.asked) == (1, 1)
    other.offset = 4
    one.seed = 8
    assert states(one, other) == [struct.pack("=Qq", 8, 0), struct.pack("=Qq", 7, 4)]
    assert states(DeviceGenerator(), other) == [first[0], struct.pack("=Qq", 7, 4)]
    assert states() == []


def test_a_generator_that_holds_more_than_two_numbers_is_read_each_time() -> None:
    odd = DeviceGenerator(b"more")
    assert states(odd) == states(odd) == states(odd)
    odd.extra = b"else"
    assert states(odd)[0].endswith(b"else")
