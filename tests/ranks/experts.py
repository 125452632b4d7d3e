"""Experts that are themselves dealt out: the same names on all ranks, other data in each group of them."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import zerostall
from ranks.sharded import same, say, whole

EXPERTS = 2


class Mixture:
    """A router that all ranks have, and an expert of each half of them, over which FSDP2 deals it out.

    Two ranks have a whole expert each. One process has expert 1 alone.
    """

    def __init__(self, *, named: bool, flat: bool = False) -> None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(3)
        self.model = nn.ModuleDict(
            {"router": nn.Linear(5, 6), "expert": nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 131))}
        )
        mesh = None
        if size > 1:
            mesh = init_device_mesh("cpu", (EXPERTS, size // EXPERTS), mesh_dim_names=("expert", "shard"))
        self.mine = mesh["expert"].get_local_rank() if mesh is not None else 1
        with torch.no_grad():
            for parameter in self.model["expert"].parameters():
                parameter.add_(self.mine)
        if mesh is not None:
            if flat:
                group, device = mesh["shard"].get_group(), torch.device("cpu")
                self.model["expert"] = FullyShardedDataParallel(self.model["expert"], group, device_id=device)
            elif size > EXPERTS:
                fully_shard(self.model["expert"], mesh=mesh["shard"])
            fully_shard(self.model["router"], mesh=init_device_mesh("cpu", (size,)))
        self.flat = flat
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)
        owner = f"expert {self.mine}" if named else ""
        self.state = {
            "model": zerostall.RankLocal(self.model, "expert.*", owner=owner),
            "optimizer": self.optimizer,
        }

    def train(self, step: int) -> int:
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(step))
        self.model["expert"](torch.relu(self.model["router"](x))).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return step + 1

    def everything(self) -> dict[str, torch.Tensor]:
        """The whole state on every rank, experts by number; of flat parameters what each rank has."""
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        number = dist.get_rank() if self.flat else self.mine
        mine: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            called = f"{number}.{name}" if name.startswith("expert") else name
            mine[called] = whole(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                mine[f"{called}.{key}"] = whole(value)
        if not dist.is_initialized():
            return mine
        every: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, mine)
        return {name: tensor for one in every for name, tensor in one.items()}


def _keep(state: dict[str, torch.Tensor], path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(state, path)


def mixture(where: str, expected: str, kind: str) -> None:
    """Save two steps and go on to the fifth; killed there, do so again from the second."""
    warnings.filterwarnings("ignore")
    job = Mixture(named=False, flat=kind == "fsdp1")
    with zerostall.Checkpointer(where, rng=False, **job.state) as ckpt:
        began = step = ckpt.restore()
        say("restored", step)
        while step < 5:
            step = job.train(step)
            if step <= 2:
                ckpt.save(step).wait("host", timeout=60)
        now = job.everything()
        if began:
            odd = same(torch.load(expected), now)
            assert not odd, odd
            say("equal")
            ckpt.save(step).wait("disk", timeout=60)
            return
        _keep(now, Path(expected))
        dist.barrier()
        say("trained")
        time.sleep(600)  # it is killed


def mixture_hop(where: str, expected: str) -> None:
    """Restore experts by their names, on whatever ranks there are; compare; train on; save."""
    warnings.filterwarnings("ignore")
    job = Mixture(named=True)
    with zerostall.Checkpointer(where, rng=False, **job.state) as ckpt:
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if alone:
            try:
                ckpt.restore()
            except zerostall.errors.MismatchError as error:
                assert "[=owner expert 0]" in str(error), error
                say("the other expert is missed")
        step = ckpt.restore(strict=not alone)
        if step:
            before = torch.load(Path(expected) / f"{step}")
            if alone:
                before = {name: tensor for name, tensor in before.items() if not name.startswith("0.")}
            odd = same(before, job.everything())
            assert not odd, odd
        say("restored", step)
        if not alone:
            step = job.train(step)
            ckpt.save(step).wait("disk", timeout=60)
            _keep(job.everything(), Path(expected) / f"{step}")
