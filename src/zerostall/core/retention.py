"""Which steps of a run stay on a tier and which go: a pure decision, with a reason for each step.

Only steps that are committed in that tier are given in, so a save that fails or still runs never costs an
older step.
Pruning comes after a commit: a tier holds up to one step more than it keeps.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import msgspec

from zerostall.config import parse_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerostall.core.manifest import Manifest


class Keep(msgspec.Struct, frozen=True):
    """What to keep. A step stays if any of these wants it; the newest always does.

    Attributes:
        last: so many of the newest steps.
        every: steps that are a multiple of this, step 0 among them; None for no such rule.
        best: so many of the steps with the best metric; None for no such rule. Of equals the newer is better.
            A step
            with no metric, or NaN, is never among the best.
        mode: whether the best metric is the smallest ("min") or the largest ("max").
        within: steps saved at most so long before the newest one: seconds, or such as "30m", "12h", "7d"; None for no
            such rule. Counted from the newest step, not from now: a run that rests loses nothing.

    ValueError for a number below 1, or what is no time.
    """

    last: int = 3
    every: int | None = None
    best: int | None = None
    mode: Literal["min", "max"] = "min"
    within: float | str | None = None

    def __post_init__(self) -> None:
        for name, number in (("last", self.last), ("every", self.every), ("best", self.best)):
            if number is None and name != "last":
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"keep {name}={number!r}: it must be a whole number of 1 or more")
        if self.mode not in ("min", "max"):
            raise ValueError(f"keep mode={self.mode!r}: it must be 'min' or 'max'")
        self.seconds  # noqa: B018 - checked now, not when it is used

    @property
    def seconds(self) -> float | None:
        return None if self.within is None else parse_seconds(self.within, "keep within")

    def words(self) -> str:
        """What is kept, in words."""
        words = [f"last={self.last}"]
        if self.every is not None:
            words.append(f"every={self.every}")
        if self.best is not None:
            words.append(f"best={self.best} ({self.mode})")
        if self.within is not None:
            words.append(f"within={_span(self.within)}")
        return ", ".join(words)


def _span(within: float | str | None) -> str:
    """As a user would write it."""
    if not isinstance(within, int | float):
        return str(within)
    unit, name = next(((one, of) for one, of in ((86400, "d"), (3600, "h"), (60, "m")) if not within % one), (1, "s"))
    return f"{within / unit:g}{name}"


class StepFacts(msgspec.Struct, frozen=True):
    """What retention knows of a step: its metric if it has one, whether the user pinned it, and when it was saved.

    `created`: seconds since 1970; 0.0 where nobody can say, or no rule asks for it.
    """

    step: int
    metric: float | None = None
    pinned: bool = False
    created: float = 0.0

    @classmethod
    def of(cls, manifest: Manifest) -> StepFacts:
        """What a manifest says; of pins it knows nothing."""
        return cls(manifest.step, manifest.metric, created=manifest.created)


class Decision(msgspec.Struct, frozen=True):
    """What goes and why.

    Attributes:
        evict: steps to remove, oldest first.
        reasons: for every step, the evicted and the kept.
        forget: of the steps set aside by a rewind, those to remove; they go before those of `evict`.
        forget_reasons: for every step set aside.
    """

    evict: tuple[int, ...]
    reasons: dict[int, str]
    forget: tuple[int, ...] = ()
    forget_reasons: dict[int, str] = {}


def decide(
    steps: Iterable[StepFacts],
    keep: Keep,
    protected: frozenset[int] = frozenset(),
    *,
    rewound: Iterable[StepFacts] = (),
) -> Decision:
    """Decide what a tier may lose, by the order of steps alone, never by names or times of files.

    Args:
        steps: the committed steps, in any order.
        keep: the user's wish.
        protected: steps that are being read, copied on, or just written.
        rewound: steps set aside because training went on from an older one. They count for nothing and go
            first: they
            only stay, the newest of them, while there are fewer than `keep.last` steps.

    The newest step, pinned and protected ones stay whatever `keep` says. ValueError for a step given twice.
    """
    facts = _sorted(steps)
    reasons = _kept(facts, keep, protected)
    evict = [fact.step for fact in facts if fact.step not in reasons]
    reasons |= dict.fromkeys(evict, f"{keep.words()} do not want it")
    aside = _sorted(rewound)
    room = max(0, keep.last - len(facts))
    stays = {fact.step: "pinned" for fact in aside if fact.pinned}
    stays |= {fact.step: "in use" for fact in aside if fact.step in protected}
    others = [fact.step for fact in aside if fact.step not in stays]
    spare = others[len(others) - room :] if room < len(others) else others
    stays |= dict.fromkeys(spare, f"set aside, and there are only {len(facts)} others")
    forget = [step for step in others if step not in stays]
    gone = dict.fromkeys(forget, "set aside when training went back")
    return Decision(tuple(evict), dict(sorted(reasons.items())), tuple(forget), stays | gone)


def _sorted(steps: Iterable[StepFacts]) -> list[StepFacts]:
    facts = sorted(steps, key=lambda fact: fact.step)
    for one, other in pairwise(facts):
        if one.step == other.step:
            raise ValueError(f"step {one.step} is given twice")
    return facts


def _kept(facts: list[StepFacts], keep: Keep, protected: frozenset[int]) -> dict[int, str]:
    reasons: dict[int, str] = {}
    if facts:
        reasons[facts[-1].step] = "the newest"
    for fact in facts:
        if fact.pinned:
            reasons.setdefault(fact.step, "pinned")
        elif fact.step in protected:
            reasons.setdefault(fact.step, "in use")
    for fact in facts[-keep.last :]:
        reasons.setdefault(fact.step, f"among the last {keep.last}")
    if keep.every is not None:
        for fact in facts:
            if fact.step % keep.every == 0:
                reasons.setdefault(fact.step, f"a multiple of {keep.every}")
    if keep.seconds is not None and facts:
        for fact in facts:
            if fact.created >= facts[-1].created - keep.seconds:
                reasons.setdefault(fact.step, f"saved within {_span(keep.within)} of the newest")
    if keep.best is not None:
        sign = 1.0 if keep.mode == "min" else -1.0
        ranked = sorted(
            (sign * fact.metric, -fact.step)
            for fact in facts
            if fact.metric is not None and not math.isnan(fact.metric)
        )
        for _, step in ranked[: keep.best]:
            reasons.setdefault(-step, f"among the best {keep.best}")
    return reasons
