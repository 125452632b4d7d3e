"""What to measure in the time there is: which cases, in which order, and what is left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from benchmarks.peers import OURS, PEERS
from benchmarks.stall.blocks import LET_GO
from benchmarks.stall.cases import IN_MEMORY, Case, Mode

START = 13.0  # seconds of a process: interpreter, torch, device, model, the batch that gives the step time
STATE = {"gpt-0.7b": 8.5e9, "gpt-0.7b-wide": 8.5e9, "gpt-3b": 36.3e9, "tiny": 5e6}


@dataclass(frozen=True)
class Cost:
    """Seconds a gigabyte, as seen on one H200 whose disk takes 1.9 GB/s; a guess to plan with, no result.

    Attributes:
        setup: to get ready, page-locked memory above all, and the first save.
        call: on the training thread, every save.
        write: until it is on disk.
        load: to bring it back.
    """

    setup: float
    call: float
    write: float
    load: float


COSTS = {
    "none": Cost(0, 0, 0, 0),
    "plain-copies": Cost(0.4, 0, 0, 0),
    "torch.save": Cost(1.4, 1.36, 0, 0.6),
    "dcp": Cost(1.2, 0.68, 0.7, 0.8),
    "dcp-stager": Cost(1.6, 0.02, 0.7, 0.8),
    "torch_checkpointing": Cost(2.2, 0.02, 0.7, 0.8),
    "lm-resiliency": Cost(2.2, 0, 0.9, 0.3),
    "nvrx": Cost(2.4, 0.2, 0.8, 0.6),
    "dlrover": Cost(1.5, 0.2, 0.9, 0.6),
    **dict.fromkeys(OURS, Cost(0.9, 0, 0.55, 0.1)),
}


@dataclass
class Plan:
    """Processes in the order in which they run, each with its cases and the seconds it should take."""

    processes: dict[tuple[str, str], list[Case]] = field(default_factory=dict)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    left_out: list[Case] = field(default_factory=list)


def every(peer: str, model: str, target: float, *, looks: bool = True, steps: int = 1) -> Case:
    """A save every so many steps: 56 of them at every step, few where they are rare or slow."""
    slow = COSTS[peer].call + (0 if peer in IN_MEMORY else COSTS[peer].write) > 0.3
    if steps == 1:
        pairs, saves = (2, 3) if slow else (3, 3) if COSTS[peer].call > 0.05 else (7, 8)
    else:
        pairs, saves = (2, 1) if slow else {5: (5, 2)}.get(steps, (3, 1))
    return Case(peer, model, "every", steps, target, looks, pairs, saves)


def apart(peer: str, model: str, target: float, *, looks: bool = True) -> Case:
    """One save a block that goes to disk, and a block that covers what a copy to the host takes."""
    mode: Mode = "apart"
    pairs = 2 if COSTS[peer].call > 0.3 else {"dcp-stager": 3, "nvrx": 3}.get(peer, 4)
    return Case(peer, model, mode, 5, target, looks, pairs, 1)


def wanted(model: str) -> list[Case]:
    """Everything worth measuring with a model, the most telling first."""
    if model == "gpt-3b":
        return [
            replace(every("overlap", model, 1.0), pairs=5, saves=10),
            every("flip", model, 0.5),
            every("overlap", model, 0.5),
            replace(every("none", model, 1.0), pairs=3),
            every("freeze", model, 0.5),
            every("overlap", model, 1.0, looks=False),
            apart("torch_checkpointing", model, 1.0),
            every("lm-resiliency", model, 1.0),
            every("auto", model, 0.5),
            every("peer", model, 0.5),
        ]
    if model == "tiny":  # to try it out
        some = [every(peer, model, 0.0) for peer in PEERS if COSTS[peer].call < 0.3]
        some += [every("overlap", model, 0.0, looks=False), *(apart(peer, model, 0.0) for peer in PEERS)]
        return [replace(case, pairs=2, saves=min(case.saves, 3)) for case in some]
    short, long = 0.155, 0.3
    return [
        every("overlap", model, short),
        replace(every("none", model, short), pairs=3),
        every("plain-copies", model, short),
        apart("torch_checkpointing", model, short),
        every("overlap", model, long),
        every("flip", model, short),
        every("lm-resiliency", model, short),
        apart("overlap", model, short),
        every("freeze", model, short),
        every("overlap", model, short, looks=False),
        apart("dcp-stager", model, short),
        apart("dcp", model, short),
        apart("torch.save", model, short),
        every("dlrover", model, short),
        apart("nvrx", model, short),
        every("flip", model, short, looks=False),
        every("auto", model, short),
        every("lm-resiliency", model, long),
        apart("torch_checkpointing", model, long),
        every("overlap", model, long, looks=False),
        every("freeze", model, short, looks=False),
        every("torch_checkpointing", model, short),
        apart("torch_checkpointing", model, short, looks=False),
        every("lm-resiliency", model, short, looks=False),
        every("overlap", model, short, steps=5),
        every("overlap", model, short, steps=20),
        every("torch_checkpointing", model, short, steps=20),
        every("dcp-stager", model, short, steps=20),
        every("lm-resiliency", model, short, steps=5),
        every("lm-resiliency", model, short, steps=20),
        every("freeze", model, long),
        every("flip", model, long),
        every("auto", model, long),
        every("torch_checkpointing", model, short, steps=5),
        every("dcp-stager", model, short),
        every("nvrx", model, short),
        every("peer", model, short),
        every("peer", model, long),
        every("peer", model, short, looks=False),
    ]


def seconds_of(case: Case) -> float:
    """What a case should take, its process and its system being there already."""
    cost, size = COSTS[case.peer], STATE[case.model] / 1e9
    stretches = case.pairs if case.pauses else 1
    steps = case.pairs * (case.steps + LET_GO) + (case.pairs + 1) * case.bare_steps + stretches * case.warm_steps
    each = cost.call * case.saves + (cost.write if case.pauses else 0.0)
    if case.mode == "every" and case.every == 1 and case.pauses:
        each += cost.write * (case.saves - 1)  # one must be finished before the next begins
    return steps * (case.target or 0.1) + case.pairs * each * size


def around(case: Case) -> float:
    """What a system takes beside its cases: getting ready, its first save, a look at drain, disk and bits."""
    cost, size = COSTS[case.peer], STATE[case.model] / 1e9
    if case.peer == "none":
        return 0.0
    rounds = 3 if case.peer in OURS and size < 20 else 1 if case.peer in OURS or cost.call > 0.3 else 2
    return (cost.setup + rounds * (cost.call + cost.write) / 1.5 + cost.load) * size + 10 * (case.target or 0.1)


def plan(cases: Iterable[Case], seconds: float) -> Plan:
    """As many cases as fit, in their order; a later one is taken where an earlier one does not fit."""
    made = Plan()
    left, systems = seconds, set[tuple[str, str]]()
    for case in cases:
        new_process = case.process not in made.processes
        new_system = (case.peer, case.model) not in systems
        cost = seconds_of(case) + (START if new_process else 0.0) + (around(case) if new_system else 0.0)
        if cost > left:
            made.left_out.append(case)
            continue
        left -= cost
        systems.add((case.peer, case.model))
        made.processes.setdefault(case.process, []).append(case)
        made.seconds[case.process] = made.seconds.get(case.process, 0.0) + cost
    return made


def chosen(models: Iterable[str], peers: Iterable[str]) -> list[Case]:
    """The cases of some models and some systems, in the order of their worth.

    "all" are all that one GPU is enough for.
    """
    named = set(peers)
    if unknown := named - set(PEERS) - {"all"}:
        raise ValueError(f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    wide = "all" in named
    return [case for model in models for case in wanted(model) if case.peer in named or (wide and case.peer != "peer")]
