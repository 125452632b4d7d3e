"""One rank: what it measures of one way of dealing out. Rank 0 writes what was found, whenever there is more."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.ranks.beside_dcp import files
from benchmarks.ranks.found import OURS, Found
from benchmarks.ranks.loop import RankLoop
from benchmarks.ranks.neighbours import SHAPES, Between, neighbours
from benchmarks.ranks.stalls import stalls
from benchmarks.ranks.together import Allowance, together


def rank_main(options: argparse.Namespace) -> None:
    """What a rank does; rank 0 writes what was found, whenever there is more."""
    allowance = Allowance(options.begin, options.begin + options.seconds)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device(options.device, rank) if cuda else torch.device("cpu")
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{options.folder}/meeting",
        rank=rank,
        world_size=world,
        device_id=device if cuda else None,
    )
    if not cuda:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    everything: list[Found | Between] = []

    def note() -> None:
        if rank == 0:
            target = Path(options.folder, "found.json")
            target.with_suffix(".new").write_text(json.dumps([asdict(one) for one in everything]))
            target.with_suffix(".new").replace(target)

    loop = RankLoop(options.model, str(device), options.way)
    loop.batch = options.batch or (4 if cuda else 1)
    loop.run(2)
    if options.way in SHAPES:
        everything.append(Between(options.way, world))
        neighbours(everything[0], loop, options, allowance, note)
    elif options.way == "dcp":
        everything.append(found := Found("fsdp2 beside dcp", world, nbytes=loop.nbytes()))
        files(found, loop, options, allowance, note)
    else:
        found = Found(options.way, world, options.system, nbytes=loop.nbytes())
        if cuda and options.system == OURS:
            links(found, device)
        stalls(found, everything, loop, options, allowance, note)
    dist.barrier()
    dist.destroy_process_group()


def links(found: Found, device: torch.device) -> None:
    """Plain copies from the device to page-locked memory: rank 0 by itself, then all ranks at once."""
    here = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    there = torch.ones_like(here, device="cpu", pin_memory=True)

    def copy() -> None:
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    first = dist.get_rank() == 0
    found.alone = here.nbytes / min(together(copy if first else lambda: None) for _ in range(4))
    found.at_once = dist.get_world_size() * here.nbytes / min(together(copy) for _ in range(4))
