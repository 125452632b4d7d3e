"""From `kill -9` of a trainer to the next finished step, out of the memory that the agent kept.

    python -m benchmarks.recovery --model gpt-3b                       # 36 GB on a GPU
    python -m benchmarks.recovery --model gpt-3b --ranks 2             # 36 GB on two, dealt out with FSDP2; both killed
    python -m benchmarks.recovery --model tiny --device cpu --ranks 2  # to try it

A trainer saves at every step and is killed in the middle of one, of several ranks all at once. Others are started at
once, and tell when they came by: interpreter and imports, device, process group (of several), model, checkpointer (the
kept memory is mapped), restore (registered with the device, and copied), first step; of several, the last one counts.
The state that comes back is compared by fingerprint with that of the save.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.report import Report, median, seconds

STAGES = ("imports", "device", "met", "model", "checkpointer", "restored", "step")
GOAL = 15.0
PATIENCE = 400.0


@dataclass
class Death:
    """Trainers killed and their successors' way back; seconds since the kill, by what these said.

    Attributes:
        at: stage -> seconds until the last of them was there, the comparison of bits taken out.
        registered: what the log says of mapping and registering.
        exact: the fingerprint after the restore is that of the save of that step.
        lost: steps that had been begun after the one that came back.
    """

    at: dict[str, float] = field(default_factory=dict)
    registered: list[str] = field(default_factory=list)
    exact: bool = False
    tier: str = ""
    lost: int = 0
    nbytes: int = 0


def fingerprint(tensors: list) -> int:
    """64 bits over every bit of some tensors and where it stands."""
    import torch

    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors, 1):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.int32)
        for part, words in enumerate(flat.split(1 << 26)):
            places = torch.arange(1, len(words) + 1, dtype=torch.int64, device=words.device)
            total = total * 31 + (words.to(torch.int64) * (2 * places + 1)).sum() * (number + part)
    return int(total.item())


def tell(**facts: object) -> None:
    print(json.dumps({**facts, "time": time.monotonic()}), flush=True)


def train(arguments: argparse.Namespace) -> None:
    """The trainer's process: tells what it does, for ever."""
    import torch
    from torch.distributed.tensor import DTensor

    from benchmarks.ranks.loop import RankLoop
    from benchmarks.stall.loop import SIZES, Loop
    from zerostall import Checkpointer

    tell(stage="imports")
    several, cuda = arguments.ranks > 1, arguments.device == "cuda"
    device = f"cuda:{arguments.rank}" if cuda else arguments.device
    if cuda:
        torch.cuda.set_device(arguments.rank)
    torch.ones(1, device=device)
    if cuda:
        torch.cuda.synchronize()
    tell(stage="device")
    if several:
        torch.distributed.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=f"file://{arguments.meeting}",
            rank=arguments.rank,
            world_size=arguments.ranks,
            device_id=torch.device(device) if cuda else None,
        )
        tell(stage="met")
    loop = RankLoop(arguments.model, device, "fsdp2") if several else Loop(SIZES[arguments.model], device, flips=False)
    loop.clock.synchronize()
    tell(stage="model")
    teller = logging.Handler()
    teller.emit = lambda record: tell(log=record.getMessage())
    logging.getLogger("zerostall").addHandler(teller)
    logging.getLogger("zerostall").setLevel(logging.INFO)
    ckpt = Checkpointer(
        arguments.out,
        keep=1,
        slots=arguments.slots,
        disk_interval=3600.0,
        peer=arguments.peer,
        model=loop.model,
        optimizer=loop.optimizer,
    )
    tell(stage="checkpointer")
    done = ckpt.restore()
    loop.clock.synchronize()
    tell(stage="restored", step=done, tier=ckpt.stats.restored_from)

    def all_tensors() -> list[torch.Tensor]:
        found = list(loop.model.parameters())
        for state in loop.optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [one.to_local() if isinstance(one, DTensor) else one for one in found]

    if done:
        tell(fingerprint=fingerprint(all_tensors()), step=done)
    for step in range(done + 1, 1_000_000):
        loop.step(None, lambda: None)
        loop.clock.synchronize()
        tell(stage="step", step=step)
        saving = ckpt.save(step)  # to memory; a disk would take longer for a large state than the steps here
        tell(fingerprint=fingerprint(all_tensors()), step=step, nbytes=sum(one.nbytes for one in all_tensors()))
        if step == 1:
            saving.wait("host", timeout=PATIENCE)


class Trainer:
    """A trainer's process and what it tells."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, rank: int, attempt: str) -> None:
        command = [sys.executable, "-m", "benchmarks.recovery", "--train", "--out", str(folder / "saved")]
        command += ["--ranks", str(arguments.ranks), "--rank", str(rank), "--meeting", str(folder / attempt)]
        command += ["--model", arguments.model, "--device", arguments.device, "--slots", str(arguments.slots)]
        command += ["--peer"] if arguments.peer else []
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.fingerprints: dict[int, int] = {}

    def next(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the trainer ended by itself, code {self.process.wait()}")
        facts = json.loads(line)
        if "fingerprint" in facts:
            self.fingerprints[facts["step"]] = facts["fingerprint"]
        return facts

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        """Wait for one that was killed."""
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def trainers(arguments: argparse.Namespace, folder: Path, attempt: str) -> list[Trainer]:
    """One of each rank, all started now; an attempt has a meeting point of its own."""
    return [Trainer(arguments, folder, rank, attempt) for rank in range(arguments.ranks)]


def die_and_come_back(arguments: argparse.Namespace, folder: Path) -> Death:
    death = Death()
    first = trainers(arguments, folder, "first")
    second: list[Trainer] = []
    try:
        begun = 0
        for trainer in first:
            step = nbytes = 0
            while step < arguments.steps or not nbytes:
                facts = trainer.next()
                step = facts["step"] if facts.get("stage") == "step" else step
                nbytes = facts.get("nbytes", nbytes)
            death.nbytes += nbytes
            begun = max(begun, step)
        for trainer in first:
            trainer.kill()
        moment = time.monotonic()
        second = trainers(arguments, folder, "second")
        found = [come_back(trainer, moment, before.fingerprints) for before, trainer in zip(first, second, strict=True)]
        for back in found:
            death.at = {stage: max(at, death.at.get(stage, 0.0)) for stage, at in back.at.items()}
            death.registered += back.registered
        death.exact = all(back.exact for back in found)
        death.tier = ", ".join(sorted({back.tier for back in found}))
        death.lost = begun - min(back.step for back in found)
    finally:
        for trainer in (*first, *second):
            trainer.kill()
        for trainer in (*first, *second):
            trainer.end()
    return death


@dataclass
class Back:
    """One trainer's way back; see `Death`."""

    at: dict[str, float] = field(default_factory=dict)
    registered: list[str] = field(default_factory=list)
    exact: bool = False
    tier: str = ""
    step: int = -1


def come_back(trainer: Trainer, moment: float, before: dict[int, int]) -> Back:
    """Listen to a successor until it has finished a step; `before` are its predecessor's fingerprints."""
    back, looked = Back(), 0.0
    while "step" not in back.at:
        facts = trainer.next()
        if "log" in facts:
            back.registered += [facts["log"]] if "registered" in facts["log"] else []
        elif "fingerprint" in facts:
            looked = facts["time"] - moment - back.at["restored"]
            back.exact = facts["fingerprint"] == before.get(back.step)
        else:
            back.at[facts["stage"]] = facts["time"] - moment - looked
            if facts["stage"] == "restored":
                back.step, back.tier = facts["step"], facts["tier"]
    return back


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default="gpt-3b")
    options.add_argument("--device", default="cuda")
    options.add_argument("--ranks", type=int, default=1, help="trainers of one job, each on a device of its own")
    options.add_argument("--steps", type=int, default=6, help="steps until the trainer is killed")
    options.add_argument("--deaths", type=int, default=1)
    options.add_argument("--slots", type=int, default=2)
    options.add_argument("--peer", action="store_true", help="through another GPU's memory")
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    options.add_argument("--results", type=Path, help="folder of the report (default: benchmarks/results)")
    options.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--out", help=argparse.SUPPRESS)
    options.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options.add_argument("--meeting", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.train:
        train(arguments)
        return
    from benchmarks.workload import scratch

    deaths = []
    for _ in range(arguments.deaths):
        with scratch(arguments.folder) as folder:
            deaths.append(die_and_come_back(arguments, folder))
        print(deaths[-1], flush=True)
        written = report(arguments, deaths)
        page = written.write(arguments.results) if arguments.results else written.write()
    print(page.with_suffix(".md").read_text())


def report(arguments: argparse.Namespace, deaths: list[Death]) -> Report:
    size = deaths[0].nbytes
    several = arguments.ranks > 1
    devices = f"{arguments.ranks} ranks (FSDP2), {arguments.device}" if several else arguments.device
    page = Report(
        "recovery_ranks" if several else "recovery",
        f"From kill -9 to the next finished step: {size / 1e9:.1f} GB of state on {devices}",
        Path(arguments.folder or tempfile.gettempdir()),
        module="recovery",
        columns=("until", "seconds since the kill", "of that, this stage"),
    )
    before = 0.0
    for stage in [stage for stage in STAGES if stage in deaths[0].at]:
        found = median([death.at[stage] for death in deaths])
        page.rows.append((WORDS[stage], f"{found:.2f}", f"{found - before:.2f}"))
        before = found
        page.samples[f"{stage} s"] = [death.at[stage] for death in deaths]
    page.goals = {
        f"kill -9 to the next finished step in under {GOAL:.0f} s": seconds(before),
        "the state is that of the save, bit for bit": "yes" if all(death.exact for death in deaths) else "NO",
        "out of host memory": ", ".join(sorted({death.tier for death in deaths})),
    }
    page.notes = [
        f"{len(deaths)} times, all trainers killed while step {arguments.steps} was being saved; "
        f"steps lost: {', '.join(str(death.lost) for death in deaths)}",
        "successors are started at the moment of the kill; comparing the bits is taken out of the times",
        *dict.fromkeys(line for death in deaths for line in death.registered),
    ]
    return page


WORDS = {
    "imports": "interpreter and imports",
    "device": "device (CUDA context)",
    "met": "process group: the ranks have met",
    "model": "model and optimizer built",
    "checkpointer": "checkpointer made, kept memory mapped",
    "restored": "restored (registered with the device, copied)",
    "step": "first step finished",
}

if __name__ == "__main__":
    main()
