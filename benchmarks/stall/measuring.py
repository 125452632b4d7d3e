"""One process: some systems, one model; what they take, how they run, and what comes back."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.peers import OURS, PEERS, Peer
from benchmarks.peers.contract import different, state_of, tensors_in
from benchmarks.peers.ours import Zerostall
from benchmarks.stall.blocks import Taker, drains, run
from benchmarks.stall.cases import Case, Outcome, Subject
from benchmarks.stall.loop import Loop
from benchmarks.stall.memory import Registered, device_used, host_used, pinned_used
from zerostall.errors import ZerostallError

LARGE = 16 << 30  # bytes
SLOW = 2.0  # seconds of a call; such a system's drain is the call, and its disk is in its cases
COPIED = 1 << 30


def copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second of a plain copy from the device to page-locked memory, and back."""
    gpu = device.type == "cuda"
    here = torch.ones(COPIED if gpu else 1 << 24, dtype=torch.uint8, device=device)
    there = torch.ones(here.nbytes, dtype=torch.uint8, pin_memory=gpu)

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return source.nbytes / min(times)

    return rate(there, here), rate(here, there)


class Bench:
    """A loop, and what is measured with it, one system after another.

    Args:
        deadline: by `time.monotonic()`; no pair of blocks is begun after it.
        done: told whenever something was found out.
    """

    def __init__(self, loop: Loop, folder: Path, deadline: float, done: Callable[[Subject], None]) -> None:
        self.loop = loop
        self.folder = folder
        self.deadline = deadline
        self.done = done
        self._registered = Registered()
        self._step = 0
        self._rates = copy_rates(loop.device)
        loop.run(2)  # the optimizer's state comes to be

    def measure(self, cases: list[Case]) -> None:
        """All cases of one system."""
        loop = self.loop
        subject = Subject(cases[0].peer, cases[0].model)
        if time.monotonic() > self.deadline:
            subject.failure = "the systems before it in its process left no time"
            self.done(subject)
            return
        subject.copy_rate, subject.load_rate = self._rates
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in tensors_in(state_of(loop)).values()}
        subject.nbytes, subject.tensors = sum(tensors.values()), len(tensors)
        subject.parameters = sum(parameter.numel() for parameter in loop.model.parameters())
        for case in sorted(cases, key=lambda case: case.target):
            loop.aim(case.target)
        loop.run(2)  # with the largest batch: what training itself takes is taken now
        host, device, pinned = host_used(), device_used(), pinned_used(self._registered)
        start = time.perf_counter()
        peer = self._make(subject)
        subject.setup = time.perf_counter() - start
        subject.fsyncs, subject.outlives = peer.fsyncs, peer.outlives
        taker = Taker(peer, self._step)
        if isinstance(peer, Zerostall):  # one policy goes on in the slots of the one before
            peer.checkpointer.restore()
        try:
            start = time.perf_counter()
            taker.save()
            peer.staged()
            subject.first_save = time.perf_counter() - start
            if isinstance(peer, Zerostall):  # the first one goes to disk whatever was said
                peer.drain()
                subject.durable.append(time.perf_counter() - start)
            loop.step(None, peer.before_update)
            for case in cases:
                if time.monotonic() > self.deadline:
                    subject.outcomes.append(Outcome(case, stopped="out of time before it began"))
                    continue
                loop.aim(case.target)
                subject.outcomes.append(run(loop, case, taker, self.deadline))
                subject.host = max(subject.host, host_used() - host)
                subject.pinned = max(subject.pinned, pinned_used(self._registered) - pinned)
                subject.device = max(subject.device, device_used() - device)
                self.done(subject)
            if subject.peer != "none":
                look_closer(loop, taker, subject, self.folder)
        finally:
            self._step = taker.step
            self.done(subject)
            if isinstance(peer, Zerostall):  # what is not on disk by now need not get there
                with contextlib.suppress(ZerostallError):
                    peer.checkpointer.close(timeout=0.1)
            else:
                peer.close()

    def _make(self, subject: Subject) -> Peer:
        folder = self.folder / "saved"
        if subject.peer not in OURS:
            return PEERS[subject.peer](self.loop, folder)
        # Saves go to memory, and to disk when that is what is measured. Three slots of a large state are too many here.
        slots = 3 if subject.nbytes < LARGE else 2
        return OURS[subject.peer](self.loop, folder, disk_interval=3600.0, slots=slots)


def look_closer(loop: Loop, taker: Taker, subject: Subject, folder: Path) -> None:
    """With nothing else going on: the drain, the disk, and the bits that come back."""
    peer = taker.peer
    clock = time.perf_counter
    loop.looks = True
    slow = any(outcome.call and min(outcome.call) > SLOW for outcome in subject.outcomes)
    for last in (False, False, True) if subject.peer in OURS else () if slow else (True,):
        loop.clock.synchronize()
        count = len(drains(peer))
        fits = shutil.disk_usage(folder).free > 1.1 * subject.nbytes
        verb = taker.persist if last and fits else taker.save
        start = clock()
        verb()
        peer.staged()
        took = clock() - start
        if subject.outlives == "memory":
            subject.sealed.append(took)
        subject.idle_drain += drains(peer)[count:] or [took]
        if last and fits:
            peer.drain()
            subject.durable.append(clock() - start)
            peer.make_room()
        loop.step(None, peer.before_update)
    compare(loop, taker, subject)
    if isinstance(peer, Zerostall):
        subject.dirty = peer.checkpointer.stats.dirty


def compare(loop: Loop, taker: Taker, subject: Subject) -> None:
    """A save behind a long queue of work, an update right after it; then it must come back as it was at the save."""
    peer = taker.peer
    if loop.clock.gpu:
        torch.cuda.empty_cache()
    loop.keep_device_busy()
    loop.looks = False
    loop.step(None, peer.before_update)  # still queued when it is saved
    expected = {path: tensor.clone() for path, tensor in tensors_in(state_of(loop)).items()}
    try:
        if not taker.save():
            subject.correct = "the save was skipped"
            return
        loop.step(None, peer.before_update)
        peer.staged() if subject.peer in OURS else peer.drain()
        loop.clock.synchronize()
        start = time.perf_counter()
        found = peer.load()
        loop.clock.synchronize()
        subject.loaded.append(time.perf_counter() - start)
        wrong = different(found, expected)
        subject.correct = f"{len(wrong)} of {len(expected)} differ: {wrong[0]}" if wrong else "bit for bit"
        if subject.peer in OURS:
            start = time.perf_counter()
            peer.load()
            loop.clock.synchronize()
            subject.loaded.append(time.perf_counter() - start)
    except Exception as error:  # noqa: BLE001 - what a system cannot do is a result
        subject.correct = f"not comparable: {type(error).__name__}: {error}"[:300]
    finally:
        loop.looks = True
