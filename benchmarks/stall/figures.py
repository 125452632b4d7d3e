"""The plots: step times one after the other, stalls side by side, and one drain in its steps."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot

from benchmarks.peers import LABELS, OURS
from benchmarks.plots import WITH, WITHOUT
from benchmarks.report import interval, median, percentile
from benchmarks.stall.cases import Outcome, Subject
from benchmarks.stall.goals import stalls

OTHERS = "#4c6ef5"
SHOWN_STEPS = 24
LEAST = 1e-6  # seconds; shorter than any clock here tells


def draw(subjects: list[Subject], target: Path) -> list[Path]:
    """One file a kind of plot; kinds that nothing was measured for are left out."""
    pairs = [(subject, outcome) for subject in subjects for outcome in subject.outcomes if outcome.saves]
    pairs = [pair for pair in pairs if pair[0].peer != "none"]
    files = []
    for kind, plot in (("steps", step_trace), ("stalls", stall_bars), ("drain", drain_timeline)):
        figure = plot(pairs)
        if figure is not None:
            files.append(target.with_name(f"{target.name}-{kind}.png"))
            figure.savefig(files[-1], dpi=110)
            pyplot.close(figure)
    return files


def name(subject: Subject) -> str:
    return LABELS[subject.peer].replace("*", "")


def like_first(pairs: list[tuple[Subject, Outcome]]) -> list[tuple[Subject, Outcome]]:
    """One case a system: of the model, step time and habit of the first one."""
    found: dict[str, tuple[Subject, Outcome]] = {}
    for subject, outcome in pairs:
        first = pairs[0][1].case
        if (outcome.case.model, outcome.case.target, outcome.case.looks) == (first.model, first.target, first.looks):
            found.setdefault(subject.peer, (subject, outcome))
    return list(found.values())


def step_trace(pairs: list[tuple[Subject, Outcome]]) -> pyplot.Figure | None:
    shown = like_first(pairs)
    if not shown:
        return None
    figure, panels = pyplot.subplots(
        len(shown), 1, figsize=(9, 1.25 * len(shown) + 0.8), sharex=True, squeeze=False, layout="constrained"
    )
    for panel, (subject, outcome) in zip(panels[:, 0], shown, strict=True):
        steps = outcome.trace[:SHOWN_STEPS]
        times = [1e3 * (step.end - step.begin) for step in steps]
        colors = [(WITH if step.saved else WITHOUT) for step in steps]
        panel.bar(range(len(steps)), times, color=colors, width=0.8)
        panel.axhline(1e3 * median(outcome.bare), color="black", linewidth=0.6)
        panel.set_ylabel("ms", fontsize=8)
        panel.set_title(f"{name(subject)}: {outcome.case.label.split(', ', 2)[2]}", fontsize=8, loc="left")
        panel.tick_params(labelsize=7)
    panels[-1][0].set_xlabel("step, saves in red; the line is the median step without saves", fontsize=8)
    return figure


def stall_bars(pairs: list[tuple[Subject, Outcome]]) -> pyplot.Figure | None:
    shown = like_first(pairs)
    if not shown:
        return None
    shown.sort(key=lambda pair: -interval(pair[1].added)[0])
    figure, panel = pyplot.subplots(figsize=(8, 0.45 * len(shown) + 1.4), layout="constrained")
    for at, (subject, outcome) in enumerate(shown):
        both = stalls(outcome)
        color = WITH if subject.peer in OURS else OTHERS
        p50, p99 = (max(LEAST, percentile(both, share)) * 1e3 for share in (0.5, 0.99))
        panel.barh(at - 0.18, p50, height=0.34, color=color, label="stall, p50; line to p99" if not at else None)
        panel.plot([p50, p99], [at - 0.18, at - 0.18], color="black", linewidth=1)
        mean, half = interval(outcome.added)
        added = max(LEAST, mean) * 1e3
        panel.barh(at + 0.18, added, height=0.34, color=color, alpha=0.45, label="added a save" if not at else None)
        if half < mean:
            panel.plot([1e3 * (mean - half), 1e3 * (mean + half)], [at + 0.18, at + 0.18], color="black", linewidth=1)
    panel.set_xscale("log")
    panel.set_xlabel("ms", fontsize=8)
    panel.set_yticks(range(len(shown)), [name(subject) for subject, _ in shown], fontsize=8)
    panel.grid(visible=True, axis="x", which="both", alpha=0.25)
    panel.tick_params(axis="x", labelsize=8)
    panel.legend(fontsize=8)
    return figure


def drain_timeline(pairs: list[tuple[Subject, Outcome]]) -> pyplot.Figure | None:
    """Some steps of ours by the stream's clock, and under them the drains."""
    shown = [pair for pair in pairs if pair[0].peer in OURS and pair[1].trace[0].drained][:4]
    if not shown:
        return None
    figure, panels = pyplot.subplots(
        len(shown), 1, figsize=(9, 1.3 * len(shown) + 0.6), squeeze=False, layout="constrained"
    )
    for panel, (subject, outcome) in zip(panels[:, 0], shown, strict=True):
        steps = outcome.trace[:6]
        zero = steps[0].device[0]
        for at, step in enumerate(steps):
            begin, ready, guarded, updated = (1e3 * (mark - zero) for mark in step.device)
            kinds = ((begin, ready, WITHOUT, "forward and backward"), (ready, guarded, "black", "wait"),
                     (guarded, updated, OTHERS, "update"))  # fmt: skip
            for start, end, color, label in kinds:
                panel.barh(1, end - start, left=start, color=color, height=0.8, label=label if not at else None)
            left = 1e3 * (step.begin - zero)
            label = "drain" if not at else None
            panel.barh(0, 1e3 * step.drained, left=left, color=WITH, height=0.8, label=label, alpha=0.8)
        panel.set_yticks([0, 1], ["copies", "stream"], fontsize=7)
        panel.set_title(f"{name(subject)}: {outcome.case.label.split(', ', 2)[2]}", fontsize=8, loc="left")
        panel.tick_params(axis="x", labelsize=7)
    panels[0][0].legend(fontsize=7, ncols=4, loc="upper right")
    panels[-1][0].set_xlabel("ms", fontsize=8)
    return figure
