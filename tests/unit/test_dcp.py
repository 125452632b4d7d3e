"""torch.distributed.checkpoint on zerostall's files, in one process."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zerostall
from zerostall import errors
from zerostall.flow.folder_lock import FolderLock
from zerostall.integrations.dcp import Reader, Stager, Writer


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        yield


def trained(seed: int = 5) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    module, slots = get_state_dict(model, optimizer)
    return {"model": module, "optimizer": slots}


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values()))


def cause(caught: pytest.ExceptionInfo[dcp.CheckpointException]) -> BaseException:
    ((error, _),) = caught.value.failures.values()
    return error


def test_a_round_trip_with_one_argument_changed(tmp_path: Path) -> None:
    model, optimizer = trained()
    extra = {"list": [1, {"t": torch.ones(2)}], "pair": (torch.zeros(1), "x"), "array": np.arange(3), "step": 3}
    state = {**states(model, optimizer), "extra": extra, "epoch": 7}
    dcp.save(state, storage_writer=Writer(tmp_path / "run", step=5, run="tour"))
    (snapshot,) = zerostall.snapshots(tmp_path / "run")
    assert (snapshot.step, snapshot.clean) == (5, True)
    assert [verdict.problems for verdict in zerostall.verify(tmp_path / "run")] == [()]

    other, slots = trained(seed=6)
    fresh: dict[str, object] = {**states(other, slots), "epoch": 0}
    fresh["extra"] = {"list": [0, {"t": torch.zeros(2)}], "pair": None, "array": None, "step": None}
    dcp.load(fresh, storage_reader=Reader(tmp_path / "run"))
    set_state_dict(other, slots, model_state_dict=fresh["model"], optim_state_dict=fresh["optimizer"])
    assert equal(model, other) and fresh["epoch"] == 7
    before, after = optimizer.state_dict(), slots.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert all(
        torch.equal(before["state"][n][key], after["state"][n][key])
        for n in before["state"]
        for key in before["state"][n]
    )
    got = fresh["extra"]
    assert torch.equal(got["list"][1]["t"], torch.ones(2)) and got["list"][0] == 1 and got["step"] == 3
    assert torch.equal(got["pair"][0], torch.zeros(1)) and got["pair"][1] == "x" and got["array"].tolist() == [0, 1, 2]

    # The names are those that a Checkpointer would have given.
    found = zerostall.load(tmp_path / "run")
    assert set(found) == {"model", "optimizer", "extra", "epoch"} and found["epoch"] == 7
    assert torch.equal(found["optimizer"]["state"]["0.weight"]["exp_avg"], before["state"][0]["exp_avg"])
    zerostall.export(tmp_path / "run", 5, tmp_path / "w.safetensors", zerostall.ExportOptions(weights=True))


def test_a_checkpoint_id_says_where_and_which_step(tmp_path: Path) -> None:
    state = {"w": torch.arange(5.0), "b": torch.ones(1)}
    writer = Writer()
    for step in (10, 20):
        dcp.save(state, checkpoint_id=tmp_path / "run" / f"step-{step}", storage_writer=writer)
    assert [snapshot.step for snapshot in zerostall.snapshots(tmp_path / "run")] == [10, 20]
    fresh = {"w": torch.zeros(5), "b": torch.zeros(1)}
    dcp.load(fresh, checkpoint_id=tmp_path / "run" / "step-10", storage_reader=Reader())
    assert torch.equal(fresh["w"], state["w"])
    assert set(zerostall.load(tmp_path / "run")["model"]) == {"w", "b"}  # a flat dict of tensors is a model

    with pytest.raises(ValueError, match="does not end in the number"):
        dcp.save(state, checkpoint_id=tmp_path / "run" / "last", storage_writer=writer)
    with pytest.raises(ValueError, match="say where and which step"):
        dcp.save(state, storage_writer=Writer(tmp_path / "run"))
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(state, checkpoint_id=tmp_path / "run" / "20", storage_writer=writer)
    assert isinstance(cause(caught), errors.StepExistsError)
    changed = {"w": torch.zeros(5), "b": torch.zeros(1)}
    dcp.save(changed, storage_writer=Writer(tmp_path / "run", 20, replace=True, keep=zerostall.Keep(last=1)))
    assert [snapshot.step for snapshot in zerostall.snapshots(tmp_path / "run")] == [20]
    assert not zerostall.load(tmp_path / "run")["model"]["w"].any()


def test_what_cannot_be_had_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def refused(state: dict[str, object], writer: Writer, **more: object) -> BaseException:
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.save(state, storage_writer=writer, **more)  # pyright: ignore[reportArgumentType]
        assert not run.exists() or not list(run.glob("step-*"))
        return cause(caught)

    tensor = {"w": torch.ones(2)}
    assert isinstance(refused({**tensor, "o": object()}, Writer(run, 1)), errors.StateError)
    assert isinstance(refused({**tensor, "s": torch.eye(2).to_sparse()}, Writer(run, 1)), Exception)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(tensor, storage_writer=Writer(tmp_path / "cached", 1), planner=planner)
    error = refused(tensor, Writer(run, 1), planner=DefaultSavePlanner(enable_plan_caching=True))
    assert isinstance(error, errors.CapabilityError)
    if "use_collectives" in inspect.signature(dcp.save).parameters:
        with pytest.raises(errors.CapabilityError, match="use_collectives=False cannot be had"):
            dcp.save(tensor, storage_writer=Writer(run, 1), use_collectives=False)
    run.mkdir(exist_ok=True)
    lock = FolderLock(run)
    assert isinstance(refused(tensor, Writer(run, 1)), errors.RunBusyError)
    lock.close()
    dcp.save(tensor, storage_writer=Writer(tmp_path / "named", 1, run="one"))
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(tensor, storage_writer=Writer(tmp_path / "named", 2, run="two"))
    assert isinstance(cause(caught), errors.RunMismatchError)


class OwnBytes(DefaultSavePlanner):
    """A planner that makes the bytes of values itself."""

    def transform_object(self, write_item, object):
        if isinstance(object, torch.Tensor):
            return object
        stream = io.BytesIO()
        torch.save(("wrapped", object, torch.ones(2)), stream)
        return stream


def test_a_planner_with_bytes_of_its_own(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "n": 3}, storage_writer=Writer(tmp_path / "run", 1), planner=OwnBytes())
    fresh = {"w": torch.zeros(2), "n": None}
    dcp.load(fresh, storage_reader=Reader(tmp_path / "run", 1))
    assert fresh["n"][:2] == ("wrapped", 3) and torch.equal(fresh["n"][2], torch.ones(2))


def test_damage_is_found_by_the_reader(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=Writer(tmp_path / "run", 1))
    image = tmp_path / "run" / "step-000000000001" / "rank-00000.safetensors"
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"w": torch.zeros(2)}, storage_reader=Reader(tmp_path / "run", 1))
    assert isinstance(cause(caught), errors.CorruptError)


def test_another_type_and_strided_targets(tmp_path: Path) -> None:
    full = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    dcp.save({"w": full, "turned": full.t()}, storage_writer=Writer(tmp_path / "run", 1))
    fresh = {"w": torch.zeros(6, 4, dtype=torch.float64), "turned": torch.zeros(6, 4).t()}
    dcp.load(fresh, storage_reader=Reader(tmp_path / "run", 1))
    assert torch.equal(fresh["w"], full.double()) and torch.equal(fresh["turned"], full.t())


@pytest.mark.skipif("async_stager" not in inspect.signature(dcp.async_save).parameters, reason="torch before 2.9")
@pytest.mark.parametrize("guarded", [True, False])
def test_staged_while_training_goes_on(tmp_path: Path, guarded: bool) -> None:
    model, optimizer = trained()
    stager = Stager(*([optimizer] if guarded else []))
    writer = Writer(tmp_path / "run")
    tied = {"head": model[0].weight, "lock": [1, 2]}
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {"model": model.state_dict(), "tied": tied}
    response = dcp.async_save(state, checkpoint_id=tmp_path / "run" / "1", storage_writer=writer, async_stager=stager)
    if not guarded:
        response.staging_completion.result()
    tied["lock"].append(3)
    model(torch.randn(5, 3)).sum().backward()  # changes the buffers, which no optimizer guards
    optimizer.step()
    response.upload_completion.result()
    found = zerostall.load(tmp_path / "run")
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in wanted.items())
    assert found["tied"]["lock"] == [1, 2] and torch.equal(found["tied"]["head"], wanted["0.weight"])
    assert not torch.equal(model[0].weight, wanted["0.weight"])

    done = dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "run" / "2", storage_writer=writer)
    done.result()  # a writer stages by itself, and answers as DCP's own does
    assert [snapshot.step for snapshot in zerostall.snapshots(tmp_path / "run")] == [1, 2]
    with pytest.raises(errors.CapabilityError, match=r"a\.s: a Tensor"):
        stager.stage({"a": {"s": torch.eye(2).to_sparse()}})
    stager.close()
    writer.close()
    optimizer.step()


def test_what_a_checkpointer_stores_is_read(tmp_path: Path) -> None:
    from zerostall import native
    from zerostall.flow import importing
    from zerostall.trainer.captures import plan_of
    from zerostall.trainer.state import State

    model, optimizer = trained()
    state = State({"model": model, "optimizer": optimizer, "progress": {"epoch": 3}}, rng=False)
    survey = state.survey()
    sources = native.Tensors(survey.tensors, [False] * len(survey.tensors))

    def fill(segment: native.Segment, pool: native.Pool) -> None:
        sources.refresh()
        native.Capture(pool, plan_of(survey.layout), sources, segment.address, at_once=[]).wait(None)

    importing.store(tmp_path / "run", 4, survey.layout, state.values(survey).encode(), fill)
    other, slots = trained(seed=6)
    fresh: dict[str, object] = {**states(other, slots), "progress": {"epoch": 0}}
    dcp.load(fresh, storage_reader=Reader(tmp_path / "run"))
    set_state_dict(other, slots, model_state_dict=fresh["model"], optim_state_dict=fresh["optimizer"])
    assert equal(model, other) and fresh["progress"] == {"epoch": 3}
    assert torch.equal(slots.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
