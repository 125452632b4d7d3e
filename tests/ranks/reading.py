"""A scenario of ranks that restore from disk: what the node reads."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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


def read_once(where: str) -> None:
    """Restore what is dealt out and what all have, from disk: what several ranks want is read once for all of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float(ROWS * size)).reshape(-1, 16)
    alike = torch.arange(float(ROWS)).flip(0)

    def state(fill: bool) -> dict[str, object]:
        def made(tensor: torch.Tensor, placement: object) -> torch.Tensor:
            local = tensor.clone() if fill else torch.zeros_like(tensor)
            return distribute_tensor(local, mesh, [placement], src_data_rank=None)

        return {"mine": made(whole, Shard(0)), "ours": made(alike, Replicate()), "rank": rank}

    with zerostall.Checkpointer(where, rng=False, s=state(fill=True)) as ckpt:
        ckpt.save(1).wait("disk", timeout=120)
    _end_agent()
    found = state(fill=False)
    with zerostall.Checkpointer(where, rng=False, s=found) as ckpt:
        before = _bytes_read()
        assert ckpt.restore() == 1 and ckpt.stats.restored_from == "disk"
        read = torch.tensor(_bytes_read() - before)
    rows = whole.shape[0] // size
    assert torch.equal(found["mine"].to_local(), whole[rank * rows : (rank + 1) * rows])
    assert torch.equal(found["ours"].to_local(), alike)
    dist.all_reduce(read)
    images = sum(path.stat().st_size for path in Path(where).glob("step-*/*.safetensors"))
    assert images <= int(read) < 1.02 * images, (int(read), images)
    print("same", flush=True)
