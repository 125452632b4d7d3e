"""Save until durable and load into the same model: zerostall beside torch.distributed.checkpoint, same files' disk."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zerostall
from benchmarks.ranks.found import Found
from benchmarks.ranks.loop import RankLoop
from benchmarks.ranks.together import PATIENCE, Allowance, kill_agent, together
from zerostall.integrations.dcp import Reader, Writer

SAVES = 0.6  # share of the time; the rest is for loads


def forget_cached(folder: Path) -> None:
    """Take files out of the page cache, so that both sides read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Theirs:
    """torch.distributed.checkpoint, as it is and with our storage; from and to one state."""

    def __init__(self, loop: RankLoop, folder: Path) -> None:
        self._loop = loop
        self._folder = folder
        self._run = folder / "dcp-in-ours"
        self._step = 0

    def forget(self) -> None:
        """Make room for the next save; rank 0 does."""
        for name in ("dcp", "dcp-threads"):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def save(self, name: str, **arguments: object) -> None:
        model, optimizer = get_state_dict(self._loop.model, self._loop.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, **{"checkpoint_id": self._folder / name, **arguments})

    def save_on_threads(self) -> None:
        threads = max(1, len(os.sched_getaffinity(0)))
        self.save(
            "dcp-threads", storage_writer=dcp.FileSystemWriter(self._folder / "dcp-threads", thread_count=threads)
        )

    def save_in_ours(self) -> None:
        self._step += 1
        self.save("", storage_writer=Writer(self._run, step=self._step), checkpoint_id=None)

    def load(self, **arguments: object) -> None:
        model, optimizer = get_state_dict(self._loop.model, self._loop.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, **arguments)
        set_state_dict(self._loop.model, self._loop.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def load_own(self) -> None:
        self.load(checkpoint_id=self._folder / "dcp")

    def load_from_ours(self) -> None:
        self.load(storage_reader=Reader(self._run))


def files(
    found: Found, loop: RankLoop, options: argparse.Namespace, allowance: Allowance, note: Callable[[], None]
) -> None:
    """Everybody in turn, each first as often as the others, as many rounds as there is time for."""
    folder = Path(options.folder)
    theirs = Theirs(loop, folder)
    first = dist.get_rank() == 0
    opened: list[zerostall.Checkpointer] = []
    steps = itertools.count(1)

    def checkpointer() -> zerostall.Checkpointer:
        return zerostall.Checkpointer(folder / "ours", keep=1, slots=2, rng=False, disk_interval=3600.0, **loop.state())

    def save() -> None:
        opened[0].save(next(steps), when_busy="wait").wait("disk", timeout=PATIENCE)

    def restart() -> None:
        opened.append(checkpointer())
        opened[0].restore()
        assert opened[0].stats.restored_from == "disk"

    saves = {
        "zerostall": save,
        "dcp": lambda: theirs.save("dcp"),
        "dcp, a thread a core": theirs.save_on_threads,
        "dcp with zerostall's Writer": theirs.save_in_ours,
    }
    loads = {
        "zerostall, agent and all": restart,
        "dcp": theirs.load_own,
        "dcp with zerostall's Reader": theirs.load_from_ours,
    }
    opened.append(checkpointer())
    spent = 0.0
    for number in range(options.rounds + 1):
        if number > 1 and not allowance.has(spent, share=SAVES):
            break
        spent = 0.0
        for name in _turned(saves, number):
            if first:
                theirs.forget()
            took = together(saves[name])
            spent += took
            if number:  # whoever comes the first time has things to make and to compare
                found.save.setdefault(name, []).append(took)
                note()
    if first:
        theirs.forget()
    together(saves["dcp"])
    for _ in range(options.rounds):
        found.load.setdefault("zerostall, from memory", []).append(together(opened[0].restore))
        note()
    opened.pop().close()
    spent = 0.0
    for number in range(options.rounds):
        if number and not allowance.has(spent):
            break
        spent = 0.0
        for name in _turned(loads, number):
            kill_agent()
            forget_cached(folder)
            took = together(loads[name])
            spent += took
            found.load.setdefault(name, []).append(took)
            while opened:
                opened.pop().close()
            note()


def _turned(names: dict[str, Callable[[], None]], number: int) -> list[str]:
    """Another begins each time."""
    every = list(names)
    return every[number % len(every) :] + every[: number % len(every)]
