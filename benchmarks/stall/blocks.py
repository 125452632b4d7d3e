"""One case: blocks of steps with and without saves in one run of steps, and what they cost each other.

A device that was idle for a moment computes faster for about a second (by a tenth, on an H200). So there are no pauses
where they can be avoided, some steps are made before the first block, and blocks are as long as one another. Systems
whose files must be written, and deleted, before the next block get a pause after each block with saves, and their steps
before the next one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.peers import Peer
from benchmarks.peers.ours import Zerostall
from benchmarks.stall.cases import Case, Outcome
from benchmarks.stall.loop import Loop, Step

LET_GO = 3  # steps after a block with saves, in which its last bytes leave the device
TRACED = 24  # steps of each case that are kept for a timeline


@dataclass
class Taker:
    """The saves of one peer, numbered; true when they were accepted."""

    peer: Peer
    step: int

    def save(self) -> bool:
        return self._take(self.peer.save)

    def persist(self) -> bool:
        return self._take(self.peer.persist)

    def _take(self, verb: Callable[[int], None]) -> bool:
        self.step += 1
        skipped = self.peer.skipped
        verb(self.step)
        return self.peer.skipped == skipped


def drains(peer: Peer) -> list[float]:
    """Seconds from each save until its bytes had left the device, where a system keeps them."""
    return peer.checkpointer.stats.drain_seconds if isinstance(peer, Zerostall) else []


@dataclass
class Block:
    """Steps that count.

    Attributes:
        seconds: a step, by the device's stream: from the first one to the one after the last.
    """

    saves: bool
    seconds: float
    steps: list[Step]


class Stretch:
    """Steps without a pause, and the blocks among them."""

    def __init__(self, loop: Loop, taker: Taker) -> None:
        self._loop = loop
        self._peer = taker.peer
        self._drained = len(drains(taker.peer))
        self._taken: list[tuple[Step, list[object]]] = []
        self._blocks: list[tuple[int, int, bool]] = []

    def go(self, steps: int, save: Callable[[], bool] | None = None, every: int = 1) -> None:
        for at in range(steps):
            self._taken.append(self._loop.step(save if at % every == 0 else None, self._peer.before_update))

    def block(self, steps: int, save: Callable[[], bool] | None = None, every: int = 1) -> None:
        first = len(self._taken)
        self.go(steps, save, every)
        self._blocks.append((first, len(self._taken), save is not None))

    def end(self) -> list[Block]:
        self.go(1)
        steps = self._loop.settle(self._taken)
        self._peer.staged()  # until then the drain of the last save is not known
        saved = (step for step in steps if step.saved)
        for step, seconds in zip(saved, drains(self._peer)[self._drained :], strict=False):
            step.drained = seconds
        return [
            Block(saves, (steps[last].device[0] - steps[first].device[0]) / (last - first), steps[first:last])
            for first, last, saves in self._blocks
        ]


def run(loop: Loop, case: Case, taker: Taker, deadline: float) -> Outcome:
    """The blocks of one case."""
    outcome = Outcome(case, batch=loop.batch)
    loop.looks = case.looks
    peer = taker.peer
    save = taker.save if case.mode == "every" else taker.persist
    if case.pauses:
        peer.drain()
        peer.make_room()
    blocks: list[Block] = []
    stretch = None
    for pair in range(case.pairs):
        if stretch is None:
            stretch = Stretch(loop, taker)
            if not case.pauses:
                stretch.go(case.every + 1, save, case.every)
            stretch.go(case.warm_steps)
        stretch.block(case.bare_steps)
        stretch.block(case.steps, save, case.every)
        if case.pauses:
            blocks += stretch.end()
            stretch = None
            peer.drain()
            if case.mode == "apart" and blocks[-1].steps[0].saved:
                outcome.durable.append(loop.clock.now() - blocks[-1].steps[0].begin)
            peer.make_room()
        else:
            stretch.go(LET_GO)
        if time.monotonic() > deadline and pair + 1 < case.pairs:
            outcome.stopped = f"out of time after {pair + 1} of {case.pairs} pairs"
            break
    if stretch is not None:
        stretch.block(case.bare_steps)
        blocks += stretch.end()
    note(outcome, blocks)
    if isinstance(peer, Zerostall):
        outcome.policy_reason = f"{peer.checkpointer.stats.policy}: {peer.checkpointer.stats.policy_reason}"
    return outcome


def note(outcome: Outcome, blocks: list[Block]) -> None:
    """What the blocks say, each with saves beside the ones without around it."""
    for at, block in enumerate(blocks):
        (outcome.saved if block.saves else outcome.bare).extend(step.end - step.begin for step in block.steps)
        if not block.saves:
            outcome.idle_call += [step.called - step.begin for step in block.steps]
            outcome.idle_guard += [step.guarded - step.ready for step in block.steps]
            outcome.idle_inserted += [step.device[2] - step.device[1] for step in block.steps]
            outcome.bare_update += [step.device[3] - step.device[2] for step in block.steps]
            continue
        accepted = [step for step in block.steps if step.saved]
        outcome.saves += len(accepted)
        outcome.skipped += outcome.case.saves - len(accepted)
        outcome.call += [step.called - step.begin for step in accepted]
        outcome.guard += [step.guarded - step.ready for step in accepted]
        outcome.inserted += [step.device[2] - step.device[1] for step in accepted]
        outcome.update += [step.device[3] - step.device[2] for step in accepted]
        outcome.drain += [step.drained for step in accepted if step.drained]
        around = [other.seconds for other in (blocks[at - 1], *blocks[at + 1 : at + 2]) if not other.saves]
        lost = len(block.steps) * (block.seconds - statistics.fmean(around))
        if accepted:
            outcome.added.append(lost / len(accepted))
    steps = [step for block in blocks for step in block.steps]
    first = next((at for at, step in enumerate(steps) if step.saved), 0)
    outcome.trace = steps[first : first + TRACED]
