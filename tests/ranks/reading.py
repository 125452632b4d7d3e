"""Scenarios of ranks that restore from disk, and from a store: what the node reads."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zerostall
from zerostall.config import runtime_dir
from zerostall.wire import channel, rendezvous

ROWS = 5 << 20  # of each: 20 MiB a rank of what is dealt out


def _agent() -> int:
    connection = rendezvous.connect(runtime_dir())
    assert connection is not None
    pid, _ = channel.peer(connection.socket)
    connection.close()
    return pid


def _bytes_read() -> int:
    """What this process, and on rank 0 the agent, has read of files until now, by the kernel's count."""
    processes = ["self", *([str(_agent())] if dist.get_rank() == 0 else [])]
    return sum(int(re.findall(r"rchar: (\d+)", Path(f"/proc/{one}/io").read_text())[0]) for one in processes)


def _end_agent() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        pid = _agent()
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            os.sched_yield()
    dist.barrier()


def _whole() -> torch.Tensor:
    return torch.arange(float(ROWS * dist.get_world_size())).reshape(-1, 16)


def _state(value: float | None) -> dict[str, object]:
    """What is dealt out and what all have, with numbers from `value` on; None: empty."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def made(tensor: torch.Tensor, placement: object) -> torch.Tensor:
        local = torch.zeros_like(tensor) if value is None else tensor + value
        return distribute_tensor(local, mesh, [placement], src_data_rank=None)

    return {
        "mine": made(_whole(), Shard(0)),
        "ours": made(torch.arange(float(ROWS)).flip(0), Replicate()),
        "rank": dist.get_rank(),
    }


def _assert_same(found: dict[str, object], value: float) -> None:
    expected = _state(value)
    assert all(torch.equal(found[name].to_local(), expected[name].to_local()) for name in ("mine", "ours"))


def from_store(url: str, *values: str) -> None:
    """Save steps that hold these values, if any; then restore the newest that is whole, and say which."""
    if values:
        state = _state(float(values[0]))
        with zerostall.Checkpointer(url, rng=False, s=state) as ckpt:
            for step, value in enumerate(values, start=1):
                for name, tensor in _state(float(value)).items():
                    if isinstance(tensor, DTensor):
                        state[name].to_local().copy_(tensor.to_local())
                ckpt.save(step).wait("remote", timeout=120)
        _end_agent()
    found = _state(None)
    with zerostall.Checkpointer(url, rng=False, s=found) as ckpt:
        step, tier = ckpt.restore(), ckpt.stats.restored_from
    _assert_same(found, float(step))
    print(f"restored {step} from {tier}", flush=True)


def columns_from_store(url: str) -> None:
    """Save what is dealt out by rows; restore by columns, of which no rank's image has one in a run of bytes.

    And what looks into another tensor into memory of its own, once alone there and once with others.
    """
    table = torch.arange(8000.0).view(80, 100)
    looks = {"table": table, "column": table[:, 5], "turned": table.T[3:], "row": table[7]}
    with zerostall.Checkpointer(url, rng=False, s={**_state(1.0), **looks}) as ckpt:
        ckpt.save(1).wait("remote", timeout=120)
    _end_agent()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {**_state(None), "mine": distribute_tensor(torch.zeros(_whole().shape), mesh, [Shard(1)])}
    found |= {name: torch.zeros(tensor.shape) for name, tensor in looks.items()}
    found["row"] = torch.zeros(200)[:100]
    found["column"] = found["row"]._base[100:180]
    found["rank"] = dist.get_rank()
    with zerostall.Checkpointer(url, rng=False, s=found) as ckpt:
        step, tier = ckpt.restore(), ckpt.stats.restored_from
    columns = (_whole() + 1.0).chunk(dist.get_world_size(), dim=1)
    assert torch.equal(found["mine"].to_local(), columns[dist.get_rank()])
    assert torch.equal(found["ours"].to_local(), _state(1.0)["ours"].to_local())
    assert all(torch.equal(found[name], tensor) for name, tensor in looks.items())
    print(f"restored {step} from {tier}", flush=True)


def read_once(where: str) -> None:
    """Restore what is dealt out and what all have, from disk: what several ranks want is read once for all of them."""
    with zerostall.Checkpointer(where, rng=False, s=_state(1.0)) as ckpt:
        ckpt.save(1).wait("disk", timeout=120)
    _end_agent()
    found = _state(None)
    with zerostall.Checkpointer(where, rng=False, s=found) as ckpt:
        before = _bytes_read()
        assert ckpt.restore() == 1 and ckpt.stats.restored_from == "disk"
        read = torch.tensor(_bytes_read() - before)
    _assert_same(found, 1.0)
    dist.all_reduce(read)
    images = sum(path.stat().st_size for path in Path(where).glob("step-*/*.safetensors"))
    assert images <= int(read) < 1.02 * images, (int(read), images)
    print("same", flush=True)
