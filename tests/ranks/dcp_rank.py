"""One rank that saves and loads with torch.distributed.checkpoint on zerostall's files; prints what it found."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros

from zerostall.integrations.dcp import Reader, Stager, Writer

FULL = {
    "rows": torch.arange(7 * 4, dtype=torch.float32).reshape(7, 4),
    "columns": torch.arange(3 * 5).reshape(3, 5),
    "replicated": torch.arange(6, dtype=torch.bfloat16),
    "uneven": torch.arange(1, dtype=torch.float64),
}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate(), "uneven": Shard(0)}
OTHERS = {"rows": Shard(1), "columns": Replicate(), "replicated": Shard(0), "uneven": Replicate()}


def state(rank: int, mesh, factor: int = 1) -> dict[str, object]:
    model = {name: distribute_tensor(full * factor, mesh, [PLACEMENTS[name]]) for name, full in FULL.items()}
    model["plain"] = torch.full((3,), float(factor))
    return {"model": model, "progress": {"epoch": factor, "seen": [1, 2]}, f"rank{rank}": {"own": torch.ones(2) * rank}}


def loaded(rank: int, mesh, reader: Reader) -> dict[str, object]:
    """The same names in another layout."""
    model: dict[str, object] = {
        name: zeros(full.shape, dtype=full.dtype, device_mesh=mesh, placements=[OTHERS[name]])
        for name, full in FULL.items()
    }
    model["plain"] = torch.zeros(3)
    wanted = {"model": model, "progress": {"epoch": 0, "seen": []}, f"rank{rank}": {"own": torch.zeros(2)}}
    dcp.load(wanted, storage_reader=reader)
    return wanted


def check(rank: int, wanted: dict, factor: int) -> None:
    for name, full in FULL.items():
        got = wanted["model"][name]
        assert isinstance(got, DTensor) and torch.equal(got.full_tensor(), full * factor), name
    assert torch.equal(wanted["model"]["plain"], torch.full((3,), float(factor)))
    assert wanted["progress"] == {"epoch": factor, "seen": [1, 2]}
    assert torch.equal(wanted[f"rank{rank}"]["own"], torch.ones(2) * rank)


def flat(rank: int, run: Path) -> None:
    """FSDP1: its sharded state dict, saved and loaded by others than its own files."""
    sharded = StateDictType.SHARDED_STATE_DICT

    def made(steps: int) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        model = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, steps)
        return model, optimizer

    def train(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(2, 5) * (rank + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def state(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optimizer": moments}

    model, optimizer = made(1)
    with FullyShardedDataParallel.state_dict_type(model, sharded):
        dcp.save(state(model, optimizer), storage_writer=Writer(run, step=1))
    train(model, optimizer, 2)
    other, moments = made(2)
    with FullyShardedDataParallel.state_dict_type(other, sharded):
        found = state(other, moments)
        dcp.load(found, storage_reader=Reader(run, 1))
        other.load_state_dict(found["model"])
        stored = FullyShardedDataParallel.optim_state_dict_to_load(other, moments, found["optimizer"])
        moments.load_state_dict(stored)
    train(other, moments, 2)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def main(rank: int, world: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    run = folder / "run"

    dcp.save(state(rank, mesh), storage_writer=Writer(run, step=1))
    check(rank, loaded(rank, mesh, Reader(run, 1)), 1)
    dcp.save(state(rank, mesh), checkpoint_id=folder / "plain")

    writer, stager = Writer(run), Stager()
    takes_stager = "async_stager" in inspect.signature(dcp.async_save).parameters  # since torch 2.9
    more = {"async_stager": stager} if takes_stager else {}
    response = dcp.async_save(state(rank, mesh, 2), checkpoint_id=run / "step-2", storage_writer=writer, **more)
    (response.upload_completion if takes_stager else response).result()
    check(rank, loaded(rank, mesh, Reader(run)), 2)
    dcp.async_save(state(rank, mesh, 3), checkpoint_id=run / "step-3", storage_writer=writer).result()

    # What one rank cannot store is an error on all, and no step.
    bad = state(rank, mesh)
    bad["bad"] = {"lock": object() if rank == world - 1 else 1}
    try:
        dcp.save(bad, checkpoint_id=run / "step-4", storage_writer=writer)
    except dcp.CheckpointException as error:
        print("refused", sorted({type(failure[0]).__name__ for failure in error.failures.values()}), flush=True)
    try:
        dcp.save(state(rank, mesh), checkpoint_id=run / "step-3", storage_writer=writer)
    except dcp.CheckpointException as error:
        print("refused", sorted({type(failure[0]).__name__ for failure in error.failures.values()}), flush=True)
    writer.close()
    stager.close()
    dist.barrier()
    check(rank, loaded(rank, mesh, Reader(run)), 3)
    flat(rank, folder / "flat")
    dist.destroy_process_group()
    print("ended", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
