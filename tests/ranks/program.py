"""What one rank does: `main` joins the group and runs a scenario. Prints what tests look for.

A scenario is a function of `scenarios.py`, `sharded.py`, `experts.py`, `reading.py`, `apart.py`, `meshes.py`,
`loops.py`, `failures.py` or `items.py`; it is given the rank, the folder of the run and the words that are left.
"""

from __future__ import annotations

import logging
import os
import sys

import torch
import torch.distributed as dist

import zerostall.trainer.checkpointer  # noqa: F401 - everything is loaded before the fork
from crash.states import Job
from ranks import apart, experts, failures, items, loops, meshes, reading, scenarios, sharded

torch.set_num_threads(1)
Job().train_one_step()


def main(words: list[str]) -> int:
    name, rank, size, rendezvous, *more = words
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, GLOO_SOCKET_IFNAME="lo")
    if rendezvous == "env":
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=rendezvous, rank=int(rank), world_size=int(size))
    try:
        modules = (scenarios, sharded, experts, reading, apart, meshes, loops, failures, items)
        next(getattr(module, name) for module in modules if hasattr(module, name))(*more)
    except Exception as error:
        print(f"FAILED {type(error).__name__}: {error}", flush=True)
        raise
    print("ENDED", flush=True)
    dist.destroy_process_group()
    return 0
