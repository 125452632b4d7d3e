"""From `kill -9` of a trainer to the next finished step, out of the memory that the agent kept.

    python -m benchmarks.recovery --model gpt-3b                       # 36 GB on a GPU
    python -m benchmarks.recovery --model gpt-3b --ranks 2             # 36 GB on two, dealt out with FSDP2; both killed
    ... --ranks 8 --kill one               # one is killed, and a launcher kills the others when it notices
    ... --ranks 8 --then 4,8 --tier disk   # all are killed, and so many come back; and again; memory is lost
    python -m benchmarks.recovery --model tiny --device cpu --ranks 2  # to try it

A trainer saves at every step and is killed in the middle of one, of several ranks all at once. Others are started at
once, and tell when they came by: interpreter and imports, device, process group (of several), model, checkpointer (the
kept memory is mapped), restore (registered with the device, and copied), first step; of several, the last one counts.
The state that comes back is compared by fingerprint with that of the save.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.machine import ROOT, end_on_signals
from benchmarks.report import Report, median, seconds

STAGES = ("noticed", "imports", "device", "met", "model", "checkpointer", "restored", "step")
GOAL = 15.0
PATIENCE = 400.0
NOTICES = 0.1  # seconds until torchrun looks at its processes again


@dataclass
class Death:
    """Trainers killed and their successors' way back; seconds since the kill, by what these said.

    Attributes:
        at: stage -> seconds until the last of them was there, the comparison of bits taken out.
        registered: what the log says of mapping and registering.
        exact: the fingerprint after the restore is that of the save of that step.
        lost: steps that had been begun after the one that came back.
        ranks, successors: how many there were, and how many came back.
    """

    at: dict[str, float] = field(default_factory=dict)
    registered: list[str] = field(default_factory=list)
    exact: bool = False
    tier: str = ""
    lost: int = 0
    nbytes: int = 0
    ranks: int = 1
    successors: int = 1


def fingerprint(tensors: Iterable, device: str) -> int:
    """64 bits over every bit of some tensors and where it stands."""
    import torch

    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, tensor in enumerate(tensors, 1):
        flat = tensor.detach().to(total.device).contiguous().reshape(-1).view(torch.int32)
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
    several, cuda = arguments.ranks > 1 or arguments.whole, arguments.device == "cuda"
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

    def facts() -> dict[str, int]:
        """Fingerprint and bytes of what this rank has, or of all there is, however it is dealt out."""
        states = (loop.optimizer.state[one] for one in loop.model.parameters())
        found = [*loop.model.parameters(), *(state[key] for state in states for key in sorted(state))]
        local = [one.to_local() if isinstance(one, DTensor) else one for one in found]
        whole = (one.full_tensor() if isinstance(one, DTensor) else one for one in found)
        return {
            "fingerprint": fingerprint(whole if arguments.whole else local, device),
            "nbytes": sum(one.nbytes for one in local),
        }

    if done:
        tell(step=done, **facts())
    for step in range(done + 1, 1_000_000):
        loop.step(None, lambda: None)
        loop.clock.synchronize()
        tell(stage="step", step=step)
        tell(step=step, **facts())
        kept = arguments.tier == "disk" and step == done + arguments.steps
        # Else to memory: a disk would take longer for a large state than the steps here.
        saving = ckpt.save(step, when_busy="wait" if kept else "skip")
        if step == 1 or kept:
            saving.wait("disk" if kept else "host", timeout=PATIENCE)
        tell(saved=step)


class Trainer:
    """A trainer's process and what it tells."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, rank: int, ranks: int, attempt: int) -> None:
        command = [sys.executable, "-m", "benchmarks.recovery", "--train", "--out", str(folder / "saved")]
        command += ["--ranks", str(ranks), "--rank", str(rank), "--meeting", str(folder / f"meeting-{attempt}")]
        command += ["--model", arguments.model, "--device", arguments.device, "--slots", str(arguments.slots)]
        command += ["--steps", str(arguments.steps), "--tier", arguments.tier]
        command += ["--peer"] if arguments.peer else []
        command += ["--whole"] if arguments.then else []
        environment = {"GLOO_SOCKET_IFNAME": "lo"} if arguments.device == "cpu" else {}
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.fingerprints: dict[int, int] = {}
        self.step = self.nbytes = 0

    def next(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the trainer ended by itself, code {self.process.wait()}")
        return self._heard(json.loads(line))

    def _heard(self, facts: dict) -> dict:
        if "fingerprint" in facts:
            self.fingerprints[facts["step"]] = facts["fingerprint"]
            self.nbytes = facts["nbytes"]
        if facts.get("stage") == "step":
            self.step = facts["step"]
        return facts

    def until_saved(self, step: int) -> None:
        """Until it has begun to save a step; with `--tier disk`, that is whole there."""
        while self.next().get("saved", 0) < step:
            pass

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        """Wait for one that was killed, and hear what it said at last."""
        self.process.wait()
        if self.process.stdout is None or self.process.stdout.closed:
            return
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # it was killed while it told
                self._heard(json.loads(line))
        self.process.stdout.close()


def trainers(arguments: argparse.Namespace, folder: Path, ranks: int, attempt: int) -> list[Trainer]:
    """One of each rank, all started now; an attempt has a meeting point of its own."""
    return [Trainer(arguments, folder, rank, ranks, attempt) for rank in range(ranks)]


def die_and_come_back(arguments: argparse.Namespace, folder: Path) -> list[Death]:
    """One death, or with `--then` one before each of those worlds."""
    worlds = [int(ranks) for ranks in arguments.then.split(",")] if arguments.then else [arguments.ranks]
    deaths: list[Death] = []
    running = trainers(arguments, folder, arguments.ranks, 0)
    dead: list[Trainer] = []
    try:
        begin = 0
        for attempt, ranks in enumerate(worlds, 1):
            for trainer in running:
                trainer.until_saved(begin + arguments.steps)
            death = Death(ranks=len(running), successors=ranks)
            moment = kill(arguments, running, folder, death)
            dead, running = running, trainers(arguments, folder, ranks, attempt)
            for trainer in dead:
                trainer.end()
                death.nbytes += trainer.nbytes
            pairs = [(trainer, dead[0 if arguments.then else rank]) for rank, trainer in enumerate(running)]
            found = [come_back(trainer, moment, before.fingerprints) for trainer, before in pairs]
            for back in found:
                death.at = {**death.at, **{at: max(back.at[at], death.at.get(at, 0.0)) for at in back.at}}
                death.registered += back.registered
            death.exact = all(back.exact for back in found)
            death.tier = ", ".join(sorted({back.tier for back in found}))
            begin = min(back.step for back in found)
            death.lost = max(trainer.step for trainer in dead) - begin
            deaths.append(death)
    finally:
        for trainer in (*dead, *running):
            trainer.kill()
        for trainer in (*dead, *running):
            trainer.end()
    return deaths


def kill(arguments: argparse.Namespace, running: list[Trainer], folder: Path, death: Death) -> float:
    """Kill them, and the agent if memory is to be lost; the moment."""
    from benchmarks.ranks.beside_dcp import forget_cached
    from benchmarks.ranks.together import end_agent

    moment = time.monotonic()
    if arguments.kill == "one":
        running[-1].kill()
        time.sleep(NOTICES)
    for trainer in running:
        trainer.kill()
    if arguments.kill == "one":
        death.at["noticed"] = time.monotonic() - moment
    if arguments.tier == "disk":
        end_agent()
        forget_cached(folder)
    return moment


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
    options.add_argument("--kill", choices=("one", "all"), default="all", help="which of several trainers")
    options.add_argument("--then", default="", help="how many come back, and how many after their death, and so on")
    options.add_argument("--tier", choices=("host", "disk"), default="host", help="disk: the memory is lost, too")
    options.add_argument("--name", default="", help="of the report")
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
    options.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.train:
        train(arguments)
        return
    from benchmarks.workload import scratch

    end_on_signals()
    deaths: list[Death] = []
    for _ in range(arguments.deaths):
        with scratch(arguments.folder) as folder:
            deaths += die_and_come_back(arguments, folder)
        print(deaths[-1], flush=True)
        written = worlds_report(arguments, deaths) if arguments.then else report(arguments, deaths)
        page = written.write(arguments.results) if arguments.results else written.write()
    print(page.with_suffix(".md").read_text())


def report(arguments: argparse.Namespace, deaths: list[Death]) -> Report:
    size = deaths[0].nbytes
    several = arguments.ranks > 1
    devices = f"{arguments.ranks} ranks (FSDP2), {arguments.device}" if several else arguments.device
    page = Report(
        arguments.name or ("recovery_ranks" if several else "recovery"),
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
        "out of host memory" if arguments.tier == "host" else "from disk": ", ".join(
            sorted({death.tier for death in deaths})
        ),
    }
    page.notes = [
        f"{len(deaths)} times, {'one trainer' if arguments.kill == 'one' else 'all trainers'} killed while step "
        f"{arguments.steps} was being saved{', the others when it was noticed' if arguments.kill == 'one' else ''}; "
        f"steps lost: {', '.join(str(death.lost) for death in deaths)}",
        "successors are started at the moment of the kill; comparing the bits is taken out of the times",
        *dict.fromkeys(line for death in deaths for line in death.registered),
    ]
    return page


def worlds_report(arguments: argparse.Namespace, deaths: list[Death]) -> Report:
    """Of deaths after which others come back than died."""
    hops = [str(arguments.ranks), *arguments.then.split(",")]
    page = Report(
        arguments.name or f"reshard-{arguments.tier}",
        f"{' → '.join(hops)} ranks (FSDP2) on {arguments.device}: {deaths[0].nbytes / 1e9:.1f} GB of state from "
        f"{arguments.tier}",
        Path(arguments.folder or tempfile.gettempdir()),
        module="recovery",
        columns=("ranks", "restored, of that", "next finished step, since the kill", "from", "bit for bit"),
    )
    for death in deaths:
        took = death.at["restored"] - death.at["checkpointer"]
        hop = f"{death.ranks} → {death.successors}"
        rate = f"{death.nbytes / took / 1e9:.1f} GB/s in all"
        page.rows.append((hop, f"{seconds(took)}, {rate}", seconds(death.at["step"]), death.tier,
                          "yes" if death.exact else "NO"))  # fmt: skip
        page.samples |= {f"{hop}, {stage} s": [at] for stage, at in death.at.items()}
    page.goals = {"the state is that of the save, bit for bit": "yes" if all(d.exact for d in deaths) else "NO"}
    page.notes = ["whole tensors are compared, as all ranks together have them; comparing is taken out of the times"]
    return page


WORDS = {
    "noticed": "the launcher has noticed, and killed the others",
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
