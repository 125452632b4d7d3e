"""A short life of a run, driven by hand: every kind of change the agent makes to the run's folder, in a fixed order.

`Act` is one save; `Expected` says what the folder may hold if the agent dies anywhere in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hand import HandTrainer
from images import HandMade, make_layout
from zerostall.core import steps as names
from zerostall.core.candidates import Past
from zerostall.wire import messages as m

LAYOUT = make_layout(90_000, 1001)
OTHER = make_layout(70_000, 30)
KEEP = 2
RULES = m.Rules(keep_last=KEEP)

Contents = dict[int, bytes]


@dataclass(frozen=True)
class Act:
    """One save.

    `aside` are steps of a past that is left with it. `stale`: said to be such, though they are set aside already: a
    trainer says so until it has heard that its first step after going back is on disk.
    """

    name: str
    step: int
    replace: bool = False
    pin: bool = False
    aside: tuple[Past, ...] = ()
    stale: tuple[Past, ...] = ()
    other: bool = False
    seed: int | None = None

    @property
    def layout(self):
        return OTHER if self.other else LAYOUT


LEFT = (Past(4, 1.0 + 44), Past(5, 1.0 + 5))
LIFE = (
    Act("first", 1),
    Act("second", 2),
    Act("pinned, and the first goes", 3, pin=True),
    Act("of another layout, and the second goes", 4, other=True),
    Act("replaced", 4, replace=True, seed=44),
    Act("one more", 5),
    Act("after going back to the third", 4, aside=LEFT, seed=45),
    Act("the one after that", 6, stale=LEFT, seed=46),
    Act("and another, so that the set-aside ones go", 7),
)


@dataclass
class Expected:
    """What is known of the folder, from what the agent has announced.

    Attributes:
        there: content of each step that must be there.
        may: every content that a step may have, were it there.
    """

    there: Contents = field(default_factory=dict)
    may: dict[int, list[bytes]] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)

    def copy(self) -> Expected:
        return Expected(dict(self.there), {step: list(c) for step, c in self.may.items()}, set(self.pinned))

    def begin(self, act: Act, content: bytes) -> None:
        """The save is under way: both what was and what is to be may be found, but nothing of neither."""
        self.may.setdefault(act.step, []).append(content)
        for step in self.going(act):
            self.there.pop(step, None)
        if not act.replace:
            self.there.pop(act.step, None)

    def announced(self, act: Act, content: bytes) -> None:
        """The save is durable."""
        self.may[act.step] = [content]
        self.there[act.step] = content
        for past in act.aside:
            if past.step != act.step:
                self.may.pop(past.step, None)
        if act.pin:
            self.pinned.add(act.step)

    def going(self, act: Act) -> set[int]:
        """Steps that are set aside or that retention may take once `act` is durable."""
        left = {past.step for past in act.aside}
        steps = sorted((set(self.there) - left) | {act.step})
        return (set(self.there) & left) | (set(steps[:-KEEP]) - self.pinned)

    def problem(self, found: Contents) -> str:
        """What is wrong with the clean steps that were found; "" when nothing is."""
        for step, content in found.items():
            if content not in self.may.get(step, []):
                return f"step {step} holds what was never saved as step {step}"
        for step in self.there:
            if step not in found:
                return f"step {step} is lost"
        return ""


def play(runtime: Path, where: Path, expected: Expected, act: Act) -> None:
    """One save by a trainer of its own; what the agent's death makes of the connection is raised."""
    trainer = HandTrainer(runtime, where, rules=RULES)
    trainer.lease(act.layout)
    content = HandMade(act.layout, act.step, seed=act.seed).bytes
    expected.begin(act, content)
    past = act.aside + act.stale
    trainer.seal(act.step, act.layout, seed=act.seed, replace=act.replace, pin=act.pin, aside=past)
    trainer.hear(m.Reached, step=act.step, tier="disk")
    expected.announced(act, content)
    trainer.ask(m.Tidy(id=9))
    trainer.leave()


def found_on_disk(trainer: HandTrainer) -> Contents:
    """The bytes of every step on disk; each must be clean."""
    found: Contents = {}
    for copy in trainer.ask(m.Find(id=4)).copies:
        if copy.tier == "disk":
            assert copy.clean, copy
            found[copy.step] = trainer.fetch(copy.step, "disk")
    return found


def leftovers(where: Path) -> list[str]:
    """What is in a run's folder and is no part of a committed step."""
    odd: list[str] = []
    for path in where.iterdir():
        if names.parse_step(path.name) is not None and (path / names.MANIFEST).exists():
            known = {names.MANIFEST, names.PINNED, names.image_file(0), names.record_file(0)}
            odd += [f"{path.name}/{inner.name}" for inner in path.iterdir() if inner.name not in known]
        elif path.name == names.LAYOUTS:
            kinds = (names.parse_layout, names.parse_spare_layout)
            odd += [inner.name for inner in path.iterdir() if not any(parse(inner.name) for parse in kinds)]
        elif path.name not in (names.RUN, "run.lock") and names.parse_rewound(path.name) is None:
            odd.append(path.name)
    return odd
