"""Jobs whose state is dealt out over ranks in one way or another; what each rank of a test of them does."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import zerostall
from ranks import fsdp1


class Net(nn.Module):
    """Sizes that no number of ranks divides, one tensor large enough to be divided, one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner = nn.Linear(5, 6)
        self.outer = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.table = nn.Embedding(301, 131)
        self.head = nn.Linear(131, 301, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = self.norm(self.outer(torch.relu(self.inner(x))))
        return small.sum() + self.head(self.table(torch.tensor([3, 300]))).square().mean()


def dealt(kind: str) -> nn.Module:
    """The net, dealt out in that way over all ranks there are."""
    net = Net()
    size = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        for part in (net.inner, net.outer, net.norm):
            fully_shard(part, mesh=mesh)
        fully_shard(net, mesh=mesh, reshard_after_forward=False)
    elif kind.startswith("fsdp1"):
        return fsdp1.dealt(net, kind)
    elif kind == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(
            net,
            mesh=init_device_mesh("cpu", (size,)),
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy(pin_memory=False),
        )
    elif kind == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    elif kind in ("tp", "2d"):
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
        if kind == "2d":
            fully_shard(net, mesh=mesh["dp"])
    elif kind == "sp":
        plan = {
            "inner": ColwiseParallel(),
            "outer": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        }
        parallelize_module(net, init_device_mesh("cpu", (size,)), plan)
    elif kind == "stages":
        net.stage = True
        for name in (("norm", "table", "head"), ("inner", "outer"))[dist.get_rank()]:
            delattr(net, name)
    elif kind == "3d":
        mesh = init_device_mesh("cpu", (2, size // 4, 2), mesh_dim_names=("replicate", "shard", "tp"))
        parallelize_module(net, mesh["tp"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
        fully_shard(net, mesh=mesh["replicate", "shard"])
    return net


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The whole state, by name, on every rank."""
    if isinstance(model, FullyShardedDataParallel):
        return fsdp1.everything(model, optimizer)
    bare = getattr(model, "module", model)
    for module in bare.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    found = {f"model.{name}": whole(tensor) for name, tensor in bare.named_parameters()}
    zero = getattr(optimizer, "optim", None)  # of a ZeroRedundancyOptimizer, which has a share of the state here
    kept = (zero or optimizer).state
    for name, parameter in bare.named_parameters():
        for key, value in kept.get(parameter, {}).items():
            found[f"optimizer.{name}.{key}"] = whole(value)
    if zero is not None:
        assert 0 < len(kept) < len(list(bare.parameters())) or dist.get_world_size() == 1  # each rank has a share
    if zero is not None or bare.__dict__.get("stage"):
        every: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, found)
        for one in every:
            found |= one
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names that differ in a bit or are on one side only."""
    odd = list(one.keys() ^ other.keys())
    return odd + [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]


class Dealt:
    """A net and its optimizer. Every rank trains on the same numbers, so that what is replicated stays alike."""

    def __init__(self, kind: str) -> None:
        self.model = dealt("ddp" if kind == "zero" else kind)
        self.optimizer: torch.optim.Optimizer
        if kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # warns, so it is not for whoever imports this

            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=0.1, foreach=False)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)

    def train(self, step: int) -> int:
        generator = torch.Generator().manual_seed(step)
        if self.model.__dict__.get("stage"):  # what a stage hands to the next is not what is tested here
            sum((step + 1) * parameter.square().sum() for parameter in self.model.parameters()).backward()
        else:
            self.model(torch.randn(3, 5, generator=generator)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return step + 1

    def everything(self) -> dict[str, torch.Tensor]:
        return everything(self.model, self.optimizer)


def hop(where: str, kind: str, count: str, expected: str) -> None:
    """Restore what the run has, in this way of dealing out; compare; train on; save."""
    warnings.filterwarnings("ignore")  # gloo's and FSDP's about CPUs are not what is tested here
    job = Dealt(kind)
    with zerostall.Checkpointer(where, rng=False, keep=20, model=job.model, optimizer=job.optimizer) as ckpt:
        step = ckpt.restore()
        if step:
            odd = same(torch.load(Path(expected) / f"{step}"), job.everything())
            assert not odd, odd
        print("restored", step, ckpt.stats.restored_from or "nothing", flush=True)
        for _ in range(int(count)):
            step = job.train(step)
            saving = ckpt.save(step, when_busy="wait")
        saving.wait("disk", timeout=120)
        now = job.everything()
        if ckpt._world.rank == 0:
            torch.save(now, Path(expected) / f"{step}")
        print("saved", step, flush=True)


def flat_loop(where: str, kind: str) -> None:
    """FSDP1 in a loop that evaluates after each save, so that the outermost parameters are gathered when it saves."""
    warnings.filterwarnings("ignore")
    job = Dealt(kind)
    inputs = torch.ones(3, 5)
    with zerostall.Checkpointer(where, rng=False, model=job.model, optimizer=job.optimizer) as ckpt:
        for step in range(1, 6):
            job.train(step)
            saving = ckpt.save(step, when_busy="wait")
            with torch.no_grad():
                job.model(inputs)
        expected = job.everything()
        saving.wait("disk", timeout=60)
        assert ckpt.stats.dirty == 0, ckpt.stats
        job.train(6)
        assert same(expected, job.everything())
        assert ckpt.restore() == 5
        odd = same(expected, job.everything())
        assert not odd, odd
        assert not same(expected, job.everything())
        seen: list[str] = []

        def during(*_: object) -> None:
            try:
                ckpt.save(7)
            except zerostall.errors.StateError as error:
                seen.append(str(error))

        handle = job.model.inner.register_forward_hook(during)
        job.model(inputs).backward()
        handle.remove()
        assert len(seen) == 1 and "in the middle of a forward" in seen[0], seen
        job.optimizer.zero_grad()
        ckpt.save(8, when_busy="wait").wait("disk", timeout=60)
        say("same")


def say(*words: object) -> None:
    print(*words, flush=True)


def refused(where: str, *, hint: str, **state: object) -> None:
    """The first save must come to nothing on every rank, and say why; so must the next."""
    ckpt = zerostall.Checkpointer(where, rng=False, **state)
    for step in (1, 2):
        try:
            ckpt.save(step, when_busy="wait").wait("host", timeout=60)
        except zerostall.errors.StateError as error:
            assert hint in str(error), error
        else:
            raise AssertionError(f"nothing was refused, though {hint}")
        assert not zerostall.snapshots(where)
    ckpt.close()


def loud(where: str) -> None:
    """What ranks should have alike and do not, in one way after another."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alike, own = torch.ones(50), torch.zeros(50)
    other = own if rank == 0 else alike.clone()
    refused(where + "-1", hint="s.b: ranks 1, 2, 3, others on rank 0", s={"a": alike, "b": other})
    other = torch.ones(4, 3) if rank else torch.ones(4, 2)
    refused(where + "-2", hint="s.w: float32 (4, 2) whole on rank 0", s={"w": other})
    other = alike.to(torch.float16) if rank else alike
    refused(where + "-3", hint="s.w: float32 (50) whole on rank 0", s={"w": other})
    other = alike if rank == 2 else alike.clone()
    refused(where + "-6", hint="s.b: another name for s.a on rank 2", s={"a": alike, "b": other})
    mesh = init_device_mesh("cpu", (size,))
    sharded = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
    refused(where + "-4", hint="cut along dimension 0", s={"w": sharded if rank else torch.arange(7.0)})
    with zerostall.Checkpointer(where + "-5", rng=False, s={"w": alike}) as ckpt:
        ckpt.save(1).wait("disk", timeout=60)
        say("saved")


def kinds(where: str) -> None:
    """Marked, led, replicated, empty, tied, of numpy, looked into, in one state; then what is local to a rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    big = torch.arange(60_000.0).reshape(200, 300)

    def state(fill: bool) -> dict[str, object]:
        def made(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if fill else torch.zeros_like(tensor)

        def dtensor(tensor: torch.Tensor, placement: object) -> DTensor:
            return distribute_tensor(made(tensor), mesh, [placement], src_data_rank=None)

        base = made(big)
        bn = DistributedDataParallel(nn.BatchNorm1d(3))
        if fill:
            bn.module.running_mean.fill_(rank + 1.0)  # of a batch of its own: the first rank's is handed out
        tied = dtensor(torch.arange(9.0), Shard(0))
        return {
            "bn": bn,
            "s": {
                "big": base,
                "slice": base[3:5, 7:9],
                "spread": made(torch.arange(4.0)).expand(3, 4) if fill else torch.zeros(4).expand(3, 4),
                "array": made(torch.arange(30_000)).numpy(),
                "empty": torch.ones(0, 4),
                "scalar": made(torch.tensor(5.0)),
                "columns": dtensor(big[:5, :7].clone(), Shard(1)),
                "alike": dtensor(big, Replicate()),
                "one": tied,
                "two": tied,
                "value": 7 if fill else 0,
            },
            "mine": zerostall.RankLocal(
                {"w": torch.full((3,), float(rank) if fill else -1.0), "v": rank if fill else -1}
            ),
        }

    with zerostall.Checkpointer(where, rng=False, **state(True)) as ckpt:
        ckpt.save(1).wait("disk", timeout=60)
    target = state(False)
    with zerostall.Checkpointer(where, rng=False, **target) as ckpt:
        assert ckpt.restore() == 1
    full = state(True)
    for name, tensor in full["s"].items():
        got = target["s"][name]
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(whole(got), whole(tensor)), name
    assert (target["s"]["array"] == full["s"]["array"]).all()
    assert target["s"]["value"] == 7
    assert target["bn"].module.running_mean.tolist() == [1.0] * 3
    mine = target["mine"].value
    assert mine["w"].tolist() == [float(rank)] * 3 and mine["v"] == rank
    say("same")


class Samples:
    """Numbers 0 to 59, each once an epoch, dealt out over whatever ranks there are; knows how many all have seen."""

    def __init__(self) -> None:
        self.seen = 0

    def batch(self, size: int) -> list[int]:
        """This rank's of the next `size` numbers of each rank."""
        order = torch.randperm(60, generator=torch.Generator().manual_seed(5)).tolist()
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = order[self.seen : self.seen + size * world][rank::world]
        self.seen = min(60, self.seen + size * world)
        return mine

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def samples(where: str, size: str, steps: str) -> None:
    """Go through some of the data; two batches make a step, and what was seen in half a step does not count."""
    data, weight = Samples(), torch.zeros(1)
    with zerostall.Checkpointer(where, data=data, s={"w": weight}) as ckpt:
        step = ckpt.restore()
        say("restored", step)
        for step in range(step + 1, step + 1 + int(steps)):
            seen = [*data.batch(int(size)), *data.batch(int(size))]
            weight += 1
            saving = ckpt.save(step, when_busy="wait")
            say("seen", *seen)
        saving.wait("disk", timeout=60)
    data.batch(int(size))  # half a step, lost


def other_world(where: str) -> None:
    """What is each rank's own does not come to another number of ranks; nothing is written."""
    mine = {"w": torch.full((3,), -1.0)}
    ckpt = zerostall.Checkpointer(where, rng=False, mine=zerostall.RankLocal(mine))
    try:
        ckpt.restore(only="mine.w")
    except zerostall.errors.MismatchError as error:
        assert "mine.w: is each rank's own" in str(error), error
        assert mine["w"].tolist() == [-1.0] * 3
        say("refused")
    ckpt.close()


def resumed(where: str, kind: str, until: str, expected: str) -> None:
    """Train to a step, saving each; the state at the end is compared with what training without a break came to."""
    warnings.filterwarnings("ignore")
    job = Dealt(kind)
    with zerostall.Checkpointer(where, rng=False, model=job.model, optimizer=job.optimizer) as ckpt:
        step = ckpt.restore()
        say("restored", step, ckpt.stats.restored_from or "nothing")
        while step < int(until):
            step = job.train(step)
            ckpt.save(step, when_busy="wait").wait("host", timeout=60)
            say("step", step)
        now = job.everything()
    path = Path(expected)
    if path.exists():
        odd = same(torch.load(path), now)
        assert not odd, odd
        say("equal")
    else:
        dist.barrier()
        if ckpt._world.rank == 0:
            torch.save(now, path)


def wander(where: str, kind: str, until: str, expected: str) -> None:
    """Restore what other ranks have left, compare; train and save until a step is reached, or this rank is killed."""
    warnings.filterwarnings("ignore")
    job = Dealt(kind)
    with zerostall.Checkpointer(where, rng=False, model=job.model, optimizer=job.optimizer) as ckpt:
        step = ckpt.restore()
        if step:
            odd = same(torch.load(Path(expected) / f"{step}"), job.everything())
            assert not odd, odd
        say("restored", step, ckpt.stats.restored_from or "nothing")
        while step < int(until):
            step = job.train(step)
            now = job.everything()
            if ckpt._world.rank == 0:  # whose image is sealed after this, so that no step is clean before it is known
                torch.save(now, Path(expected) / "unfinished")
                (Path(expected) / "unfinished").rename(Path(expected) / f"{step}")
            ckpt.save(step, when_busy="wait").wait("host", timeout=300)
            say("clean", step)
