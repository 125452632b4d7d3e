"""What saves in training cost all ranks: blocks of steps with and without them, in turn, by whichever system saves."""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import zerostall
from benchmarks.machine import file_system
from benchmarks.peers import PEERS, Peer
from benchmarks.peers.ours import Zerostall
from benchmarks.ranks.found import OURS, Found
from benchmarks.ranks.loop import RankLoop
from benchmarks.ranks.together import Allowance, every_rank, kill_agent, slowest, together
from benchmarks.report import median
from benchmarks.stall.blocks import LET_GO, drains
from benchmarks.stall.loop import Step
from benchmarks.stall.memory import Registered, device_used, host_used, pinned_used

ROOM = 1.4  # of the time that draining 1/N of the state takes, for a step, where no batch was asked for
LINK = 54e9  # bytes a second that an H200 sends to host memory
OFTEN, SELDOM = 8, 3  # saves in a block: one every step; one every several
THEIR_OFTEN, THEIR_SELDOM = 3, 1  # of systems that wait in a save for the files of the one before
FEWEST = 2  # pairs of blocks, for an interval
GRANTED = 0.3  # seconds in which a rank that has nothing to do is granted its next slot


@dataclass
class Held:
    """What is checkpointed."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


def opened(loop: RankLoop, options: argparse.Namespace, registered: Registered) -> Saver:
    """The system that is asked for, ready, with one save finished."""
    folder = Path(options.folder, "stall")
    before = host_used()
    if options.system == OURS:
        training = Held(loop.net, loop.optimizer)
        peer = Zerostall(training, folder, policy=options.policy, slots=2, disk_interval=3600.0)
    else:
        peer = PEERS[options.system](Held(loop.model, loop.optimizer), folder)
    saver = Saver(peer, loop, registered, Host(Path(options.folder), before))
    peer.persist(saver.next())
    saver.finish()  # and the disk rests from now on
    return saver


@dataclass
class Host:
    """This machine's memory: what was used before, and a folder whose files may be in memory, too."""

    folder: Path
    before: int

    def taken(self) -> int:
        """Bytes that are used by now, files not counted."""
        taken = host_used() - self.before
        if file_system(self.folder) == "tmpfs":
            for path in self.folder.rglob("*"):
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    taken -= path.stat().st_blocks * 512
        return taken


class Saver:
    """One system on all ranks: its saves, numbered alike, and the memory that it takes."""

    def __init__(self, peer: Peer, loop: RankLoop, registered: Registered, host: Host) -> None:
        self.peer = peer
        self._loop = loop
        self._number = 0
        self._registered = registered
        self._host = host

    @property
    def drains(self) -> list[float]:
        return drains(self.peer)

    def next(self) -> int:
        self._number += 1
        return self._number

    def save(self) -> bool:
        """A save, when training asks for it; whether it was taken."""
        skipped = self.peer.skipped
        self.peer.save(self.next())
        return self.peer.skipped == skipped

    def finish(self) -> None:
        """Everything saved is finished, and its files are gone."""
        self.peer.drain()
        dist.barrier()
        if dist.get_rank() == 0:
            self.peer.make_room()
        dist.barrier()

    def let_go(self) -> None:
        """What a block with saves leaves behind is not measured with the next one."""
        if not isinstance(self.peer, Zerostall):
            self.finish()
        self._loop.run(LET_GO)

    def at_rest(self, found: Found, count: int) -> None:
        """Saves with nothing else going on: how fast all links drain at once."""
        for _ in range(count):
            time.sleep(GRANTED)
            before = len(self.drains)
            dist.barrier()
            begin = time.perf_counter()
            if slowest(not self.save()):
                continue
            self.peer.staged()
            staged = time.perf_counter() - begin
            times = every_rank(self.drains[before] if self.drains else staged)
            each = self._each()
            if not found.drained or max(times) < min(found.drained):
                found.rates = [each / seconds for seconds in times]
            found.drained.append(max(times))
            if isinstance(self.peer, Zerostall):
                found.finished.append(slowest(staged))
            else:
                found.finished.append(slowest(staged) + together(self.peer.drain))
                self.finish()
        found.each = int(self._each())

    def _each(self) -> float:
        """Bytes that a rank moves in a save, at most."""
        if isinstance(self.peer, Zerostall):
            stats = self.peer.checkpointer.stats
            return slowest(stats.bytes_captured / max(1, stats.saves))
        return slowest(self._loop.held_bytes())

    def remember(self, found: Found) -> None:
        """The memory that is taken now, if it is more than before."""
        dist.barrier()
        found.host = max(found.host, int(slowest(self._host.taken())))
        found.pinned = max(found.pinned, int(slowest(pinned_used(self._registered))))
        found.device = max(found.device, int(slowest(device_used())))


class Blocks:
    """Blocks of steps without saves and with one every so many, in turn."""

    def __init__(self, found: Found, loop: RankLoop, saver: Saver, saves: int) -> None:
        self._found = found
        self._loop = loop
        self._saver = saver
        self._steps = saves * found.every
        self._saves = saves
        self._skipped = 0

    def _save(self) -> bool:
        accepted = self._saver.save()
        self._skipped += not accepted
        return accepted

    def block(self, saves: bool) -> tuple[float, list[Step]]:
        """Seconds of so many steps, and the steps."""

        def run() -> None:
            for at in range(self._steps):
                save = self._save if saves and at % self._found.every == 0 else None
                steps.append(self._loop.step(save, self._saver.peer.before_update))
            self._loop.clock.synchronize()

        steps: list[tuple[Step, list[object]]] = []
        took = together(run)
        return took, self._loop.settle(steps)

    def pair(self, bare: float) -> float:
        """A block with saves, and one without; seconds of the latter. `bare`: of the one before."""
        found = self._found
        self._skipped = 0
        before = len(self._saver.drains)
        with_saves, saving = self.block(True)
        self._saver.remember(found)
        self._saver.let_go()
        after, idle = self.block(False)
        skipped = int(slowest(self._skipped))
        accepted = self._saves - skipped
        found.skipped += skipped
        found.saves += accepted
        found.step = after / self._steps
        if accepted:
            found.added.append((with_saves - (bare + after) / 2) / accepted)
        guards, inserts = zip(*map(_waits, idle), strict=True)
        base = (median(guards), median(inserts))
        for guard, inserted in zip(_slowest_of(guards), _slowest_of(inserts), strict=True):
            found.idle_guard.append(guard)
            found.idle_inserted.append(inserted)
        taken = [step for step in saving if step.saved]
        stalls = []
        for step in taken:
            guard, inserted = _waits(step)
            wait = max(0.0, guard - base[0], inserted - base[1])
            stalls.append((step.called - step.begin, guard, inserted, step.called - step.begin + wait))
        if slowest(len(taken) != accepted):  # a save that only some ranks have skipped is no save
            stalls = []
        columns = zip(*stalls, strict=True) if stalls else [()] * 4
        for name, values in zip(("call", "guard", "inserted", "stall"), columns, strict=True):
            getattr(found, name).extend(_slowest_of(values))
        found.busy += _slowest_of(self._saver.drains[before:])
        return after


def _waits(step: Step) -> tuple[float, float]:
    """What the thread and the stream waited for before the update."""
    _, ready, guarded, _ = step.device
    return step.guarded - step.ready, guarded - ready


def _slowest_of(values: object) -> list[float]:
    """Of each save the largest of all ranks' values, of as many saves as every rank has."""
    every: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, list(values))  # type: ignore[call-overload]
    return [max(times) for times in zip(*every, strict=False)]


def stalls(
    common: Found,
    everything: list,
    loop: RankLoop,
    options: argparse.Namespace,
    allowance: Allowance,
    note: Callable[[], None],
) -> None:
    """Pairs of blocks until there are enough or there is no more time; `note` is called after each.

    Args:
        common: what is known before; what is found of each number of steps from save to save is put into `everything`.
    """
    registered = Registered()
    common.free = device_used()
    ours = options.system == OURS
    saver = opened(loop, options, registered)
    Blocks(copy.deepcopy(common), loop, saver, 2 if ours else 1).block(True)  # memory is registered, checksums compared
    saver.let_go()
    saver.at_rest(common, 3 if ours else 1)
    if loop.clock.gpu and not options.batch:
        loop.aim(ROOM * common.nbytes / common.ranks / LINK)  # the same loop for every system
        loop.batch = int(slowest(loop.batch))
    common.batch = loop.batch
    everys = [int(every) for every in options.every.split(",")]
    for number, every in enumerate(everys):
        found = copy.deepcopy(common)
        found.every, found.again = every, number > 0
        everything.append(found)
        saver.remember(found)
        note()
        share = allowance.share(1.0 / (len(everys) - number))
        often, seldom = (OFTEN, SELDOM) if ours else (THEIR_OFTEN, THEIR_SELDOM)
        blocks = Blocks(found, loop, saver, often if every == 1 else seldom)
        bare, _ = blocks.block(False)
        took = 0.0
        for pair in range(options.pairs):
            if pair >= FEWEST and not allowance.has(took, share=share):
                break
            begin = time.monotonic()
            bare = blocks.pair(bare)
            took = slowest(time.monotonic() - begin)
            note()
    if isinstance(saver.peer, Zerostall):
        with contextlib.suppress(zerostall.errors.ZerostallError):
            saver.peer.checkpointer.close(timeout=0.1)
    kill_agent()  # what is not on disk by now need not get there
