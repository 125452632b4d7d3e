"""Steps, calls, guards and drains as a timeline for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from benchmarks.stall.cases import Outcome, Subject

ROWS = {1: "training thread", 2: "training stream", 3: "copies to the host"}
Event = dict[str, object]


def events(subjects: list[Subject]) -> dict[str, object]:
    """In the Trace Event Format; a case is a process, and its times begin at zero."""
    found: list[Event] = []
    outcomes = [outcome for subject in subjects for outcome in subject.outcomes if outcome.trace]
    for number, outcome in enumerate(outcomes, 1):
        found.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": outcome.case.label}})
        found += [
            {"ph": "M", "pid": number, "tid": row, "name": "thread_name", "args": {"name": name}}
            for row, name in ROWS.items()
        ]
        found += of_case(number, outcome)
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def of_case(number: int, outcome: Outcome) -> list[Event]:
    found: list[Event] = []
    steps = sorted(outcome.trace, key=lambda step: step.begin)
    zero = min(steps[0].begin, steps[0].device[0])

    def add(row: int, name: str, begin: float, end: float) -> None:
        if end > begin:
            found.append({
                "ph": "X", "pid": number, "tid": row, "name": name,
                "ts": round(1e6 * (begin - zero), 3), "dur": round(1e6 * (end - begin), 3),
            })  # fmt: skip

    for step in steps:
        add(1, "step with a save" if step.saved else "step", step.begin, step.end)
        add(1, "save" if step.saved else "no save", step.begin, step.called)
        add(1, "forward and backward, launched", step.called, step.ready)
        add(1, "guard", step.ready, step.guarded)
        add(1, "update, launched", step.guarded, step.updated)
        add(1, "looks at the loss", step.updated, step.end)
        begin, ready, guarded, updated = step.device
        add(2, "forward and backward", begin, ready)
        add(2, "wait", ready, guarded)
        add(2, "update", guarded, updated)
        if step.drained:
            add(3, "drain", step.begin, step.begin + step.drained)
    return found
