"""Any way of dealing out over a mesh into any other, on other numbers of ranks: odd sizes, strips, empty parts."""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import zerostall

MESHES = [(1,), (2,), (3,), (8,), (2, 4), (4, 2), (2, 2, 2)]
SHAPES = {"a": (7, 3), "b": (1,), "c": (2, 5), "d": (), "e": (0, 4), "f": (10, 1), "g": (13, 4, 3), "h": (9, 6)}
SLOTS = ("exp_avg", "exp_avg_sq")


def full(name: str, key: str = "") -> torch.Tensor:
    """The whole tensor; no two have a number in common."""
    shape = SHAPES[name]
    begin = 1000 * (1 + list(SHAPES).index(name)) + 100_000 * ["", *SLOTS].index(key)
    return torch.arange(begin, begin + math.prod(shape), dtype=torch.float32).reshape(shape)


def placements(mesh: DeviceMesh, shape: tuple[int, ...], number: int) -> list[Placement]:
    """One of all the ways to deal it out over that mesh; in each `number`, another one for each shape."""
    ways: list[tuple[Placement, ...]] = list(
        itertools.product([Replicate(), *map(Shard, range(len(shape)))], repeat=mesh.ndim)
    )
    if shape and mesh.ndim > 1:  # as FSDP cuts what tensor parallelism has cut already
        strips = _StridedShard(0, split_factor=mesh.size(mesh.ndim - 1))
        ways += 3 * [(*(Replicate(),) * (mesh.ndim - 2), strips, Shard(0))]
    return list(ways[(7 * number + 5 * math.prod(shape) + 3) % len(ways)])


class Meshed:
    """A model whose parameters are dealt out, with an optimizer that has made a step, or none."""

    def __init__(self, mesh: DeviceMesh, number: int, *, filled: bool) -> None:
        self.model = nn.Module()
        self.ways = {name: placements(mesh, shape, number) for name, shape in SHAPES.items()}
        self.mesh = mesh
        for name in SHAPES:
            whole = full(name) if filled else torch.zeros(SHAPES[name])
            self.model.register_parameter(name, nn.Parameter(self.dealt(name, whole)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        if filled:
            for name, parameter in self.model.named_parameters():
                slots = {key: self.dealt(name, full(name, key)) for key in SLOTS}
                self.optimizer.state[parameter] = {"step": torch.tensor(5.0), **slots}

    def dealt(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(whole, self.mesh, self.ways[name], src_data_rank=None)

    def odd(self) -> list[str]:
        """What is not as it was saved."""
        found = []
        for name, parameter in self.model.named_parameters():
            if not torch.equal(parameter.to_local(), self.dealt(name, full(name)).to_local()):
                found.append(name)
            slots = self.optimizer.state[parameter]
            found += [
                f"{name}.{key}"
                for key in SLOTS
                if slots[key].placements != tuple(self.ways[name])
                or not torch.equal(slots[key].to_local(), self.dealt(name, full(name, key)).to_local())
            ]
            found += [f"{name}.step"] * (slots["step"].item() != 5.0)
        return found


def any_to_any(where: str) -> None:
    """Each way is saved once, and restored into every one of them."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    rank, size = dist.get_rank(), dist.get_world_size()
    meshes = [DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape)) for shape in MESHES]
    groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
    empty = strips = restored = 0
    for number, mesh in enumerate(meshes):
        run = f"{where}/new/deep/{number}"  # made by all of them at once
        if rank < mesh.size():
            job = Meshed(mesh, number, filled=True)
            empty += sum(not parameter.to_local().numel() for parameter in job.model.parameters())
            strips += sum(isinstance(one, _StridedShard) for way in job.ways.values() for one in way)
            with zerostall.Checkpointer(
                run, rng=False, process_group=groups[mesh.size()], model=job.model, optimizer=job.optimizer
            ) as ckpt:
                ckpt.save(1).wait("disk", timeout=120)
        dist.barrier()
        for other, goal in enumerate(meshes):
            if rank < goal.size():
                job = Meshed(goal, number + other, filled=False)
                with zerostall.Checkpointer(
                    run, rng=False, process_group=groups[goal.size()], model=job.model, optimizer=job.optimizer
                ) as ckpt:
                    assert ckpt.restore() == 1
                odd = job.odd()
                assert not odd, (MESHES[number], MESHES[other], odd)
                restored += 1
            dist.barrier()
        if rank == 0:
            loaded = zerostall.load(run, 1)
            for name in SHAPES:
                assert torch.equal(loaded["model"][name], full(name)), name
            stored = sum(path.stat().st_size for path in Path(run).glob("step-*/*.safetensors"))
            assert stored < 3 * 4 * sum(map(math.prod, SHAPES.values())) + 8192 * mesh.size(), stored
    print("restored", restored, "empty", empty, "strips", strips, flush=True)
