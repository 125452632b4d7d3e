"""What the raw results say: a page with tables, plots beside it, and a timeline."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers import LABELS, OURS
from benchmarks.report import interval, median, percentile, seconds
from benchmarks.stall.cases import Case, Outcome, Subject, from_json
from benchmarks.stall.goals import CEILING, added, calls, goals, guards, stalls, throughput

COLUMNS = (
    "system",
    "saves",
    "step",
    "call p50 / p99 / max",
    "guard, thread p50 / max",
    "guard, stream p50 / max",
    "stall p50 / p99",
    "added a save",
    "× floor",
    "throughput",
    "drain in training",
)
MORE = (
    "system",
    "bits",
    "survives",
    "fsync",
    "ready in",
    "first save",
    "drain, idle",
    "to sealed",
    "to disk",
    "brought back",
    "host memory",
    "page-locked",
    "on the device",
)


def write(raws: list[Path], target: Path, remarks: list[str]) -> list[Path]:
    """Writes TARGET.md, TARGET.json (raw results of all runs), TARGET-*.png, TARGET.trace.json; returns their paths."""
    from benchmarks.stall import figures, timeline

    facts = []
    for path in raws:
        found = json.loads(path.read_text())
        facts += found if isinstance(found, list) else [found]
    subjects = [from_json(one) for raw in facts for one in raw["subjects"]]
    target.parent.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(subjects, target)
    trace = target.with_name(target.name + ".trace.json")
    trace.write_text(json.dumps(timeline.events(subjects), separators=(",", ":")))
    raw = target.with_name(target.name + ".json")
    raw.write_text(json.dumps(facts, separators=(",", ":")))
    page = target.with_name(target.name + ".md")
    page.write_text(render(facts, subjects, remarks, [path.name for path in [raw, *drawn, trace]]))
    return [page, raw, *drawn, trace]


def render(facts: list[dict], subjects: list[Subject], remarks: list[str], files: list[str]) -> str:
    first = facts[0]
    lines = [f"# What a save costs training: {first['device']}", ""]
    lines += [line for remark in remarks for line in (remark, "")]
    for model in dict.fromkeys(subject.model for subject in subjects):
        lines += of_model(model, [subject for subject in subjects if subject.model == model])
    if reached := goals(subjects) if first["device"] != "cpu" else []:
        lines += ["## Goals", "", "| goal | reached |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in reached)]
        lines.append("")
    lines += ["## Not measured", ""]
    failed = [f"{LABELS[one.peer].replace('*', '')}, {one.model}: {one.failure}" for one in subjects if one.failure]
    left = [line for raw in facts for line in raw["left out"]]
    lines += [f"- {line}" for line in [*failed, *stopped(subjects), *left]] or ["- nothing was left out"]
    lines += ["", "## How", "", *(f"- {note}" for note in NOTES), ""]
    for raw in facts:
        lines.append(" · ".join([f"`{raw['command']}`", raw["date"], str(raw["device"])]))
        lines.append(" · ".join(f"{key} {value}" for key, value in {**raw["hardware"], **raw["versions"]}.items()))
        lines.append("")
    lines.append("Files beside this page: " + ", ".join(f"[{name}]({name})" for name in files))
    return "\n".join(lines) + "\n"


NOTES = (
    "a save every so many steps goes to the memory that a system offers: zerostall's agent and DLRover's outlive the "
    "trainer, lm-resiliency's does not; the others write files, and a save waits until the one before is written. "
    "`apart` is one save a block, to disk, with steps behind it; what is still being written at the block's end is "
    "waited for outside of what is timed",
    "each system at its best known setting: state dicts are built once and handed over again, page-locked memory is "
    "warmed up, torch_checkpointing without direct I/O (its own fails on ext4), DCP's stager kept open by hand and "
    "with a synchronize before each save, since it waits for no stream",
    "call: the save on the training thread. guard: what that thread waits for before the update, and what that puts "
    "into the device's stream, by events around it. stall: call, and the larger of the other two. What the same marks "
    "tell in steps without saves, which is what measuring takes, is taken out of call, guard and stall",
    "added: time of a block with saves less that of as many steps of the blocks without right before and after it, by "
    "the device's clock, by accepted save, with the 95 % interval of the mean; floor: the state's bytes over 4.3 TB/s",
    "a device that was idle computes faster for about a second: steps go before the first block, and there is no pause "
    "between blocks where no file must go",
    "flip asks inside the update: its stream wait is in the update's time, which the goals compare",
    "bits: saved behind 50 ms of queued work, the next update right after it, brought back and compared bit for bit",
    "host memory: what the machine had more in use than before, shared and page-locked memory included; "
    "page-locked: torch's allocator (which rounds up to powers of two), cudaHostRegister, and zerostall's slots",
)


def of_model(model: str, subjects: list[Subject]) -> list[str]:
    ran = [subject for subject in subjects if subject.nbytes]
    if not ran:
        return []
    one = ran[0]
    lines = [
        f"## {model}: {one.parameters / 1e6:.0f} M parameters, "
        f"{one.nbytes / 1e9:.2f} GB of state in {one.tensors} tensors",
        "",
        f"Plain page-locked copy {one.copy_rate / 1e9:.1f} GB/s to the host, {one.load_rate / 1e9:.1f} back. "
        f"Floor of the added time {seconds(one.nbytes / CEILING)}.",
        "",
    ]
    for kind in dict.fromkeys(kind_of(outcome.case) for subject in ran for outcome in subject.outcomes):
        rows = [
            row(subject, outcome)
            for subject in ran
            for outcome in subject.outcomes
            if kind_of(outcome.case) == kind and outcome.saves
        ]
        if rows:
            lines += [f"**{kind}**", "", *table(COLUMNS, rows), ""]
    closer = [more(subject) for subject in ran if subject.peer != "none"]
    return [*lines, *table(MORE, closer), ""]


def kind_of(case: Case) -> str:
    how = f"A save every {case.every} steps" if case.every > 1 else "A save at every step"
    if case.mode == "apart":
        how = f"A save now and then, to disk, {case.every} steps behind it"
    step = f"step of about {seconds(case.target)}" if case.target else "step as long as it takes"
    return f"{how}; {step}; the loop {'looks at the loss' if case.looks else 'runs ahead'}"


def row(subject: Subject, outcome: Outcome) -> tuple[str, ...]:
    mean, _ = interval(outcome.added)
    asked = outcome.saves + outcome.skipped
    both = stalls(outcome)
    drained = f"{subject.nbytes / median(outcome.drain) / 1e9:.1f} GB/s" if outcome.drain else "–"
    nothing = subject.peer == "none"
    return (
        LABELS[subject.peer],
        "–" if nothing else f"{outcome.saves}" + (f" of {asked}" if outcome.skipped else ""),
        seconds(median(outcome.bare)),
        "–" if nothing else " / ".join(seconds(percentile(calls(outcome), share)) for share in (0.5, 0.99, 1.0)),
        "–" if nothing else " / ".join(seconds(percentile(guards(outcome), share)) for share in (0.5, 1.0)),
        "–" if nothing else " / ".join(seconds(percentile(outcome.inserted, share)) for share in (0.5, 1.0)),
        "–" if nothing else " / ".join(seconds(percentile(both, share)) for share in (0.5, 0.99)),
        added(outcome) + (" (noise)" if nothing else ""),
        f"{mean * CEILING / subject.nbytes:.2f}",
        f"{100 * throughput(outcome):.2f} %",
        drained,
    )


def more(subject: Subject) -> tuple[str, ...]:
    def rate(times: list[float], plain: float) -> str:
        if not times:
            return "–"
        found = subject.nbytes / median(times)
        return f"{seconds(median(times))}, {found / 1e9:.1f} GB/s" + (
            f" ({100 * found / plain:.0f} %)" if plain else ""
        )

    correct = subject.correct + (f", {subject.dirty} torn and found" if subject.dirty else "")
    return (
        LABELS[subject.peer],
        correct,
        subject.outlives,
        "yes" if subject.fsyncs else "no",
        seconds(subject.setup),
        seconds(subject.first_save),
        rate(subject.idle_drain, subject.copy_rate),
        seconds(median(subject.sealed)) if subject.sealed else "–",
        seconds(median(subject.durable)) if subject.durable else "–",
        rate(subject.loaded[-1:], subject.load_rate if subject.peer in OURS else 0.0),
        *(f"{nbytes / 1e9:.2f} GB" for nbytes in (subject.host, subject.pinned, subject.device)),
    )


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (columns, ("---",) * len(columns), *rows)]


def stopped(subjects: list[Subject]) -> list[str]:
    return [
        f"{outcome.case.label}: {outcome.stopped}"
        for subject in subjects
        for outcome in subject.outcomes
        if outcome.stopped
    ]
