"""What was to be reached on one H200, beside what was."""

from __future__ import annotations

import math
import statistics

from benchmarks.peers import BARE, OURS
from benchmarks.report import interval, median, percentile, seconds
from benchmarks.stall.cases import Outcome, Subject

CEILING = 4.3e12  # bytes a second read from the device's memory
ADDED = 1.5  # times the floor


def net(samples: list[float], idle: list[float]) -> list[float]:
    """Times less what the same marks tell in steps without saves, which is what measuring takes."""
    base = median(idle) if idle else 0.0
    return [max(0.0, sample - base) for sample in samples]


def calls(outcome: Outcome) -> list[float]:
    return net(outcome.call, outcome.idle_call)


def guards(outcome: Outcome) -> list[float]:
    return net(outcome.guard, outcome.idle_guard)


def stalls(outcome: Outcome) -> list[float]:
    """Of each save: the call, and the larger of what the thread and the stream waited for before the update."""
    waits = zip(calls(outcome), guards(outcome), net(outcome.inserted, outcome.idle_inserted), strict=True)
    return [call + max(guard, inserted) for call, guard, inserted in waits]


def added(outcome: Outcome) -> str:
    mean, half = interval(outcome.added)
    return f"{seconds(mean)} ± {seconds(half) if half < math.inf else '?'}"


def throughput(outcome: Outcome) -> float:
    """Share of the steps a second without saves that is left with them."""
    bare = statistics.fmean(outcome.bare)
    lost = interval(outcome.added)[0] * outcome.saves / max(1, len(outcome.saved))
    return bare / (bare + lost)


def goals(subjects: list[Subject]) -> list[tuple[str, str]]:
    """Each goal that these results can speak about, and what was found."""
    found = []
    for subject in subjects:
        if subject.peer not in OURS:
            continue
        size = f"{subject.nbytes / 1e9:.1f} GB"
        for outcome in subject.outcomes:
            if outcome.saves and outcome.case.mode == "every":
                found += of_case(f"{outcome.case.label}, {size}", subject, outcome, subjects)
        if subject.idle_drain:
            share = subject.nbytes / median(subject.idle_drain) / subject.copy_rate
            found.append((f"{subject.peer}, {size}: drain ≥ 95 % of the plain copy", f"{100 * share:.1f} %"))
        if subject.loaded:
            share = subject.nbytes / subject.loaded[-1] / subject.load_rate
            found.append((f"{subject.peer}, {size}: restore ≥ 90 % of the plain copy", f"{100 * share:.1f} %"))
    return found


def of_case(label: str, subject: Subject, outcome: Outcome, subjects: list[Subject]) -> list[tuple[str, str]]:
    p50, p99 = (percentile(calls(outcome), share) for share in (0.5, 0.99))
    mean, _ = interval(outcome.added)
    floor = subject.nbytes / CEILING
    fits = subject.nbytes / subject.copy_rate < 0.9 * median(outcome.bare)
    found = [
        (f"{label}: call p50 ≤ 100 µs, p99 ≤ 1 ms", f"{seconds(p50)}, {seconds(p99)}"),
        (f"{label}: stall < {'0.2 ms, the drain fits' if fits else '1 ms, the drain does not fit'}",
         f"p50 {seconds(median(stalls(outcome)))}, p99 {seconds(percentile(stalls(outcome), 0.99))}"),
        (f"{label}: added ≤ {seconds(ADDED * floor)}", added(outcome)),
        (f"{label}: training slows ≤ 2 % while it drains", slowed(outcome, mean)),
        (f"{label}: least added of all, a tenth of torch_checkpointing's", beside(outcome, mean, subjects)),
    ]  # fmt: skip
    if outcome.case.every == 1:
        found.append((f"{label}: throughput ≥ 99 %", f"{100 * throughput(outcome):.2f} %"))
    if subject.peer == "flip" and outcome.update and outcome.bare_update:
        ratio = median(outcome.update) / median(outcome.bare_update)
        found.append((f"{label}: that update takes ≤ 15 % longer", f"{100 * (ratio - 1):+.1f} %"))
    return found


def slowed(outcome: Outcome, mean: float) -> str:
    if not outcome.drain:
        return "not known"
    return f"{100 * mean / median(outcome.drain):.1f} %"


def beside(outcome: Outcome, mean: float, subjects: list[Subject]) -> str:
    """Against each other system's added time in a loop of the same step time and habit."""
    others = {
        other.peer: interval(one.added)[0]
        for other in subjects
        if other.peer not in (*OURS, *BARE)
        for one in other.outcomes
        if one.saves
        and (one.case.model, one.case.target, one.case.looks)
        == (outcome.case.model, outcome.case.target, outcome.case.looks)
    }
    return ", ".join(f"{peer} {seconds(its)} ({its / mean:.1f} ×)" for peer, its in others.items()) or "alone"
