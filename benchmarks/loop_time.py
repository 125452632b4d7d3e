"""Time that a save adds to a training loop, beside other ways to save, each against the bare loop in the same process.

Every system runs in a process of its own (they patch, fork and start threads): blocks of bare steps and blocks of
steps with saves take turns, and a block is compared with the bare blocks right before and after it.

    stall   time on the training thread per save: the call, and the wait before optimizer.step()
    added   what the loop loses per save, all told: stall, and slower steps while bytes move in the background
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.report import Report, interval, median, percentile, seconds

DEFAULT = ("none", "torch.save", "dcp", "dcp-stager", "torch_checkpointing", "overlap", "freeze")


@dataclass
class Samples:
    """What one system's process measured; times in seconds.

    Attributes:
        copy: a plain copy of the state's bytes from memory to memory.
        bare, saved: step times in blocks without and with saves, in order.
        call, wait: of each save, on the training thread: the call, and the wait before the next update.
        added: of each block with saves, per finished save: its median time from save to save, less that of the bare
            blocks around it.
        durable: from the call until everything is on disk, for some saves with nothing else going on.
    """

    peer: str
    nbytes: int
    fsyncs: bool
    copy: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    skipped: int = 0

    @property
    def stall(self) -> list[float]:
        return [call + wait for call, wait in zip(self.call, self.wait, strict=True)]


def measure(arguments: argparse.Namespace, peer_name: str) -> Samples:
    """Runs one system in this process."""
    from benchmarks import workload
    from benchmarks.peers import PEERS

    job = workload.gpt(width=arguments.width, layers=arguments.layers, batch=arguments.batch, context=arguments.context)
    nbytes = workload.state_bytes(job)
    clock = time.perf_counter
    before, after = [0.0], [0.0]
    with workload.scratch(arguments.folder) as folder:
        # Hooks run in the order in which they came: these two enclose those of the system under test.
        job.optimizer.register_step_pre_hook(lambda *_: before.__setitem__(0, clock()))
        peer = PEERS[peer_name](job, folder / "saved")
        job.optimizer.register_step_pre_hook(lambda *_: after.__setitem__(0, clock()))
        samples = Samples(peer_name, nbytes, peer.fsyncs, copy=workload.copy_seconds(nbytes))
        number = 0

        def step(save: bool) -> tuple[float, float, float]:
            """One step; returns its time, that of the save call and that of the wait before the update."""
            nonlocal number
            number += 1
            start = clock()
            job.model.loss(job.batches.next()).backward()
            ready = clock()
            peer.before_update()
            asked = clock() - ready
            job.optimizer.step()
            waited = asked + after[0] - before[0]
            job.optimizer.zero_grad()
            call = clock()
            if save:
                peer.save(number)
            end = clock()
            return end - start, end - call, waited

        def block(save: bool) -> list[float]:
            times = []
            for i in range(arguments.steps):
                saves = save and i % arguments.every == 0
                whole, call, waited = step(saves)
                times.append(whole)
                if save and i and (i - 1) % arguments.every == 0:  # the wait for the save of the step before
                    samples.wait.append(waited)
                if saves:
                    samples.call.append(call)
            del samples.call[len(samples.wait) :]  # a save after the last update was never waited for
            peer.drain()
            peer.make_room()
            return times

        block(True)  # the first saves start processes and allocate; they are not counted
        samples.call.clear()
        samples.wait.clear()
        skipped_before = peer.skipped
        bare_before = block(False)
        samples.bare += bare_before
        for _ in range(arguments.blocks):
            skipped = peer.skipped
            with_saves = block(True)
            attempted = len(range(0, arguments.steps, arguments.every))
            finished = attempted - (peer.skipped - skipped)
            bare = block(False)
            lost = median(cycles(with_saves, arguments.every)) - median(cycles(bare_before + bare, arguments.every))
            samples.added.append(lost * attempted / max(1, finished))
            samples.saved += with_saves
            samples.bare += bare
            bare_before = bare
        samples.skipped = peer.skipped - skipped_before
        for _ in range(arguments.durable):
            step(False)
            start = clock()
            peer.save(number)
            peer.drain()
            samples.durable.append(clock() - start)
            peer.make_room()
        peer.close()
    return samples


def cycles(times: list[float], every: int) -> list[float]:
    """Times from one save to the next: sums of `every` steps. Their median shrugs off what a busy machine does."""
    return [sum(times[at : at + every]) for at in range(0, len(times) - every + 1, every)]


def run(arguments: argparse.Namespace) -> list[Samples]:
    """Runs every system in a process of its own, one after the other."""
    found = []
    for name in arguments.peers.split(","):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "samples.json"
            options = ["width", "layers", "batch", "context", "blocks", "steps", "every", "durable"]
            command = [sys.executable, "-m", "benchmarks.loop_time", "--one", name, "--json", str(target)]
            command += [f"--{option}={getattr(arguments, option)}" for option in options]
            if arguments.folder:
                command += ["--folder", arguments.folder]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
                print(f"{name}: did not run: {reason}", file=sys.stderr)
                if name in ("overlap", "freeze", "none"):
                    raise SystemExit(done.stderr)
                continue
            found.append(Samples(**json.loads(target.read_text())))
            print(f"{name}: done", file=sys.stderr)
    return found


def rows(found: list[Samples]) -> list[tuple[str, ...]]:
    """The table: a row a system."""
    from benchmarks.peers import LABELS

    table = []
    for one in found:
        cells = [LABELS[one.peer], seconds(median(one.bare)), seconds(median(one.saved))]
        if one.peer == "none":
            cells += ["–", "–", "–", f"{seconds(median(one.added))} (noise)", "–", "–", "–"]
        else:
            cells += [seconds(percentile(one.stall, share)) for share in (0.5, 0.99, 1.0)]
            cells += [seconds(median(one.added)), f"{median(one.added) / median(one.copy):.2f}"]
            cells += [f"{seconds(median(one.durable))}{'' if one.fsyncs else ' (no fsync)'}" if one.durable else "–"]
            cells += [str(one.skipped)]
        table.append(tuple(cells))
    return table


def spread(one: Samples) -> str:
    """How sure the time is that a system adds."""
    mean, half = interval(one.added)
    return f"{one.peer} {mean * 1e3:.1f} ± {half * 1e3:.1f} ms"


COLUMNS = (
    "",
    "step",
    "step with saves",
    "stall p50",
    "p99",
    "max",
    "added per save",
    "× plain copy",
    "on disk",
    "skipped",
)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--peers", default=",".join(DEFAULT))
    options.add_argument("--width", type=int, default=384)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--context", type=int, default=64)
    options.add_argument("--blocks", type=int, default=16, help="blocks with saves; one more without")
    options.add_argument("--steps", type=int, default=8, help="steps a block, a multiple of --every")
    options.add_argument("--every", type=int, default=2, help="a save every so many steps")
    options.add_argument("--durable", type=int, default=3, help="saves timed until they are on disk")
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    options.add_argument("--json", type=Path, help="write the samples there instead of a report")
    options.add_argument("--one", help=argparse.SUPPRESS)
    return options


def main() -> None:
    arguments = parser().parse_args()
    if arguments.steps % arguments.every or arguments.steps <= arguments.every:
        parser().error("--steps must be a multiple of --every, twice or more")
    if arguments.one:
        arguments.json.write_text(json.dumps(asdict(measure(arguments, arguments.one))))
        return
    found = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in found]))
        return
    report(arguments, found).write()


def report(arguments: argparse.Namespace, found: list[Samples]) -> Report:
    """The finished report, its plot written beside it."""
    from benchmarks.plots import step_times

    size = found[0].nbytes
    page = Report(
        "loop_time",
        f"Time a save adds to a training loop: GPT, {size / 1e6:.0f} MB of weights and optimizer state, on the CPU",
        Path(arguments.folder or tempfile.gettempdir()),
        columns=COLUMNS,
        rows=rows(found),
    )
    by_name = {one.peer: one for one in found}
    for name in ("overlap", "freeze"):
        if name in by_name:
            one = by_name[name]
            ratio = median(one.added) / median(one.copy)
            page.goals[f"{name}: added per save ≤ 1.5 × a plain copy of the same bytes"] = f"{ratio:.2f} ×"
            peers = [other for other in found if other.peer not in ("none", "overlap", "freeze")]
            if peers:
                best = min(peers, key=lambda other: median(other.added))
                page.goals[f"{name}: added per save below every peer"] = (
                    f"{seconds(median(one.added))}; least of the others: {seconds(median(best.added))} ({best.peer})"
                )
    page.notes = [
        f"a save every {arguments.every} steps; {arguments.blocks} blocks of {arguments.steps} steps with saves, "
        "each compared with the bare blocks before and after it: the median time from save to save; median of blocks",
        "a peer that must finish one save before the next waits inside its call; zerostall skips a save when no slot "
        "is free (counted) and writes the newest image to disk in the background, at most every 5 s, not every one",
        "on disk: from the call until the newest save is finished, the loop standing still; median",
        f"plain copy: {seconds(median(found[-1].copy))} by torch with all threads",
        "added per save, mean of the blocks and its 95 % interval: " + "; ".join(map(spread, found)),
    ]
    for one in found:
        for kind in ("bare", "saved", "call", "wait", "added", "durable", "copy"):
            page.samples[f"{one.peer} {kind} s"] = getattr(one, kind)
    step_times(found, ROOT / "benchmarks" / "results" / "loop_time.png")
    return page


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
