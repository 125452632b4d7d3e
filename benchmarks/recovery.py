"""From `kill -9` of a trainer to the next finished step, out of the memory that the agent kept.

    python -m benchmarks.recovery --model gpt-3b                       # 36 GB on a GPU
    python -m benchmarks.recovery --model tiny --device cpu            # to try it

A trainer saves at every step and is killed in the middle of one. Another one is started at once, and tells when it came
by: interpreter and imports, device, model, checkpointer (the kept memory is mapped), restore (registered with the
device, and copied), first step. The state that comes back is compared by fingerprint with that of the save.
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

STAGES = ("imports", "device", "model", "checkpointer", "restored", "step")
GOAL = 15.0
PATIENCE = 400.0


@dataclass
class Death:
    """One trainer killed and its successor's way back; seconds since the kill, by what the successor said.

    Attributes:
        at: stage -> seconds, the comparison of bits taken out.
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

    from benchmarks.stall.loop import SIZES, Loop
    from zerostall import Checkpointer

    tell(stage="imports")
    torch.ones(1, device=arguments.device)
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    tell(stage="device")
    loop = Loop(SIZES[arguments.model], arguments.device, flips=False)
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
        return found

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

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.recovery", "--train", "--out", str(folder / "saved")]
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

    def kill(self) -> float:
        self.process.kill()
        moment = time.monotonic()
        self.process.wait()
        return moment


def die_and_come_back(arguments: argparse.Namespace, folder: Path) -> Death:
    death = Death()
    first = Trainer(arguments, folder)
    second = None
    try:
        begun = 0
        while begun < arguments.steps:
            facts = first.next()
            begun = facts["step"] if facts.get("stage") == "step" else begun
            death.nbytes = facts.get("nbytes", death.nbytes)
        moment = first.kill()
        second = Trainer(arguments, folder)
        looked, done = 0.0, -1
        while "step" not in death.at:
            facts = second.next()
            if "log" in facts:
                death.registered += [facts["log"]] if "registered" in facts["log"] else []
            elif "fingerprint" in facts:
                looked = facts["time"] - moment - death.at["restored"]
                death.exact = facts["fingerprint"] == first.fingerprints.get(done)
            else:
                death.at[facts["stage"]] = facts["time"] - moment - looked
                if facts["stage"] == "restored":
                    done, death.tier = facts["step"], facts["tier"]
                    death.lost = begun - done
    finally:
        for trainer in (first, second):
            if trainer is not None:
                trainer.kill()
    return death


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default="gpt-3b")
    options.add_argument("--device", default="cuda")
    options.add_argument("--steps", type=int, default=6, help="steps until the trainer is killed")
    options.add_argument("--deaths", type=int, default=1)
    options.add_argument("--slots", type=int, default=2)
    options.add_argument("--peer", action="store_true", help="through another GPU's memory")
    options.add_argument("--folder", help="where to write (default: the temporary folder)")
    options.add_argument("--results", type=Path, help="folder of the report (default: benchmarks/results)")
    options.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--out", help=argparse.SUPPRESS)
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
    page = Report(
        "recovery",
        f"From kill -9 to the next finished step: {size / 1e9:.1f} GB of state on {arguments.device}",
        Path(arguments.folder or tempfile.gettempdir()),
        columns=("until", "seconds since the kill", "of that, this stage"),
    )
    before = 0.0
    for stage in STAGES:
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
        f"{len(deaths)} trainers, each killed while step {arguments.steps} was being saved; "
        f"steps lost: {', '.join(str(death.lost) for death in deaths)}",
        "the successor is started at the moment of the kill; comparing the bits is taken out of the times",
        *dict.fromkeys(line for death in deaths for line in death.registered),
    ]
    return page


WORDS = {
    "imports": "interpreter and imports",
    "device": "device (CUDA context)",
    "model": "model and optimizer built",
    "checkpointer": "checkpointer made, kept memory mapped",
    "restored": "restored (registered with the device, copied)",
    "step": "first step finished",
}

if __name__ == "__main__":
    main()
