"""What is measured of one system, what came out, and the bytes that carry both between processes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Literal

from benchmarks.peers import BARE, FLIPPING, OURS
from benchmarks.stall.loop import Step

IN_MEMORY = {*BARE, "lm-resiliency", "dlrover", *OURS}  # whose saves wait for no disk unless they are to
WARM = 1.5  # seconds of steps until a device that was idle computes as it will
Mode = Literal["every", "apart"]


@dataclass(frozen=True)
class Case:
    """Blocks of steps with and without saves, in turn.

    Attributes:
        mode: "every": a save every so many steps, to the memory that a system offers (its files, if it has none).
            "apart": one save at the beginning of a block, which goes on to disk, and is waited for after the block.
        every: steps from a save to the next one; with "apart" the steps of a block.
        target: seconds that a step is to take; 0: as long as it takes.
        looks: whether the loop looks at the loss after each step.
        pairs: blocks with saves; between them are blocks without.
        saves: in a block.
    """

    peer: str
    model: str
    mode: Mode
    every: int
    target: float
    looks: bool
    pairs: int
    saves: int

    @property
    def steps(self) -> int:
        return self.every * self.saves

    @property
    def bare_steps(self) -> int:
        """Of a block without saves. Each but the outermost is compared with the block before and the one after it."""
        return self.steps if self.pauses else max(4, self.steps // 2)

    @property
    def pauses(self) -> bool:
        """Whether files must be written and deleted before the next block."""
        return self.mode == "apart" or self.peer not in IN_MEMORY

    @property
    def warm_steps(self) -> int:
        """Before the first block after a pause."""
        return math.ceil(WARM / self.target) if self.target else 2

    @property
    def process(self) -> tuple[str, str]:
        """Cases with the same one share a process. Systems of others patch and fork, so each has its own."""
        if self.peer in FLIPPING:
            return self.model, "flipping"
        return self.model, "hooked" if self.peer in OURS or self.peer == "none" else self.peer

    @property
    def label(self) -> str:
        how = f"every {self.every}" if self.mode == "every" else "apart, to disk"
        return f"{self.peer}, {self.model}, {how}, {self.target:g} s, {'looks' if self.looks else 'runs ahead'}"


@dataclass
class Outcome:
    """What one case measured. Seconds and bytes; a list has a value for each accepted save unless it says otherwise.

    Attributes:
        bare: step times of the blocks without saves; `saved`: of those with, one for each step.
        call, guard, inserted: the call; the thread's wait before the update; what that put into the device's stream.
        idle_call, idle_guard, idle_inserted: the same of each bare step, which is what measuring takes.
        update, bare_update: of the device's stream, the update itself, after saves and without.
        added: of each block: its time less that of as many bare steps, by accepted save.
        drain: from a save until its bytes had left the device, where the system says so.
        durable: from a save until it was finished on disk, training meanwhile.
        trace: some steps, for a timeline.
        stopped: why there are fewer blocks than asked for, or "".
    """

    case: Case
    batch: int = 0
    saves: int = 0
    skipped: int = 0
    bare: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    guard: list[float] = field(default_factory=list)
    inserted: list[float] = field(default_factory=list)
    idle_call: list[float] = field(default_factory=list)
    idle_guard: list[float] = field(default_factory=list)
    idle_inserted: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    bare_update: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)
    drain: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    trace: list[Step] = field(default_factory=list)
    policy_reason: str = ""
    stopped: str = ""


@dataclass
class Subject:
    """What was found out about one system with one model, beside its cases.

    Attributes:
        setup: seconds until the system was ready, its first save not counted; `first_save`: that one, to the end.
        idle_drain: seconds from a save until its bytes had left the device, nothing else going on.
        sealed: the same until the snapshot was whole and outlived the trainer, for systems that have such a state.
        durable: the same until it was on disk.
        loaded: seconds that bringing it back took, into the running process.
        host, pinned, device: bytes that the system took at most: of host memory (shared, private, page-locked), of
            page-locked memory, of the device's.
        correct: "bit for bit", or what was wrong.
        dirty: snapshots that the system itself found torn.
        failure: why the system did not run, or "".
    """

    peer: str
    model: str
    fsyncs: bool = False
    outlives: str = "nothing"
    nbytes: int = 0
    tensors: int = 0
    parameters: int = 0
    copy_rate: float = 0.0
    load_rate: float = 0.0
    setup: float = 0.0
    first_save: float = 0.0
    idle_drain: list[float] = field(default_factory=list)
    sealed: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    host: int = 0
    pinned: int = 0
    device: int = 0
    correct: str = "not looked at"
    dirty: int = 0
    failure: str = ""
    outcomes: list[Outcome] = field(default_factory=list)


def to_json(subject: Subject) -> dict[str, object]:
    """As plain values, times rounded to nanoseconds."""
    return _rounded(asdict(subject))  # pyright: ignore[reportReturnType]


def from_json(facts: dict) -> Subject:
    outcomes = []
    for one in facts["outcomes"]:
        steps = [Step(**{**step, "device": tuple(step["device"])}) for step in one["trace"]]
        outcomes.append(Outcome(**{**one, "case": Case(**one["case"]), "trace": steps}))
    return Subject(**{**facts, "outcomes": outcomes})


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return value
