"""`zerostall verify` and `diff`: whether bytes are right, and which ones differ."""

from __future__ import annotations

import msgspec
import typer

from zerostall.cli.arguments import AnyStep, Json, NamedStep, Where, place, step_there
from zerostall.cli.output import emit_json, emit_table, progress, say, size
from zerostall.core.quoting import count
from zerostall.errors import SnapshotNotFoundError
from zerostall.flow import catalog
from zerostall.flow.difference import Changed, Difference

_SHOWN = 40


class Verified(msgspec.Struct, frozen=True):
    """What `verify` found of one step."""

    step: int
    clean: bool
    nbytes: int
    problems: tuple[str, ...]


def verify(
    where: Where,
    step: AnyStep = None,
    json: Json = False,
) -> None:
    """Read every byte of a step, of all steps if none is given, and check it. Exit status 1 when one is damaged.

    The agent of this machine is told of what is damaged in a folder that it holds: it makes that again from a good copy
    where there is one (`zerostall agent status`). A restore takes none of it either way.
    """
    chosen = None if step is None else step_there(where, step)
    with progress("verifying", json=json) as meter:
        verdicts = catalog.verify(where, chosen, progress=meter)
    if not verdicts:
        raise SnapshotNotFoundError(f"nothing is saved in {where}")
    clean, told = all(verdict.clean for verdict in verdicts), any(verdict.agent_told for verdict in verdicts)
    if json:
        rows = [Verified(verdict.step, verdict.clean, verdict.nbytes, verdict.problems) for verdict in verdicts]
        emit_json({"where": place(where), "clean": clean, "steps": rows, "agent_told": told})
    else:
        rows = [(str(verdict.step), size(verdict.nbytes), "ok" if verdict.clean else "damaged") for verdict in verdicts]
        emit_table((">step", ">read", "verdict"), rows)
        for verdict in verdicts:
            for problem in verdict.problems:
                say(f"step {verdict.step}: {problem}", "red")
        if told:
            say("the agent is told, and makes it again if anybody has a good copy: see `zerostall agent status`")
    if not clean:
        raise typer.Exit(1)


def diff(where: Where, a: NamedStep, b: NamedStep, json: Json = False) -> None:
    """Show how the second step differs from the first: names, shapes, types, elements of each tensor, small values."""
    before, after = (step_there(where, step) for step in (a, b))
    with progress("comparing", json=json) as meter:
        found = catalog.diff(where, before, after, progress=meter)
    if json:
        emit_json({"where": place(where), "same": found.same, **msgspec.to_builtins(found)})
    elif found.same:
        say(f"steps {found.a} and {found.b} are the same, bit for bit: {count(found.equal, 'tensor')}")
    else:
        _print(found)


def _print(found: Difference) -> None:
    for step, names in ((found.a, found.only_a), (found.b, found.only_b)):
        if names:
            emit_table((f"only in step {step}",), _capped([(name,) for name in names], 1))
    if found.reshaped:
        rows = [(row.name, row.a, row.b) for row in found.reshaped]
        emit_table(("tensor", f"step {found.a}", f"step {found.b}"), _capped(rows, 3))
    if found.changed:
        rows = [
            (
                row.name,
                row.dtype,
                str(row.changed_elements),
                str(row.elements),
                _share(row.changed_elements, row.elements),
            )
            for row in found.changed
        ]
        emit_table(("tensor", "type", ">changed", ">of", ">share"), _capped(rows, 5))
    if found.values:
        rows = [(row.name, row.a or "–", row.b or "–") for row in found.values]
        emit_table(("value", f"step {found.a}", f"step {found.b}"), _capped(rows, 3))
    say(f"{count(len(found.changed), 'tensor')} changed, {found.equal} equal bit for bit")


def _changed(row: Changed) -> tuple[str, ...]:
    share = _share(row.changed_elements, row.elements)
    return (row.name, row.dtype, str(row.changed_elements), str(row.elements), share)


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.1f} %" if share >= 0.05 else "< 0.1 %"


def _capped(rows: list[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """The first rows, and how many more there are; all are in the JSON document."""
    if len(rows) <= _SHOWN:
        return rows
    return [*rows[:_SHOWN], (f"and {len(rows) - _SHOWN} more (--json has all)", *[""] * (width - 1))]
