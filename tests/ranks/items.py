"""Ranks that save with torch what they have, each into a file of its own, as torch_checkpointing does."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

from ranks.meshes import SHAPES, full, placements
from ranks.sharded import Dealt


def save_items(where: str, kind: str, expected: str) -> None:
    """A model and its optimizer, dealt out in that way; every shape over a mesh; values; what only some ranks have."""
    warnings.filterwarnings("ignore")
    rank, size = dist.get_rank(), dist.get_world_size()
    job = Dealt(kind)
    job.train(1)
    model, optimizer = get_state_dict(job.model, job.optimizer)
    mesh = init_device_mesh("cpu", (size // 2, 2))
    odd: dict[str, object] = {}
    for number in range(5):
        for name, shape in SHAPES.items():
            way = placements(mesh, shape, number)
            odd[f"{name}{number}"] = torch.distributed.tensor.distribute_tensor(
                full(name), mesh, way, src_data_rank=None
            )
    items = {
        "model": model,
        "optimizer": optimizer,
        "odd": odd,
        "progress": {"epoch": 3, "rank": rank, f"stage{rank}": torch.full((2,), float(rank))},
    }
    for name, item in items.items():
        torch.save(item, Path(where) / f"{name}_{rank}.pt")
    every = job.everything()
    if rank == 0:
        torch.save(every, expected)
    dist.barrier()
