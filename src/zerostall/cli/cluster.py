"""`zerostall status` and `zerostall top`: the cluster as the manager sees it, once or live."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from zerostall import config
from zerostall.cli import agent
from zerostall.cli.arguments import Json, OneRun, place
from zerostall.cli.output import clean, console, emit_json, emit_table, say, size
from zerostall.core.quoting import count
from zerostall.errors import CapabilityError, SnapshotNotFoundError
from zerostall.telemetry import moment
from zerostall.wire import token
from zerostall.wire.manager_link import ManagerLink
from zerostall.wire.state import NodeView, RunView, State

ANSWER_SECONDS = 10.0
_NODES = 20
_EVENTS = 8

Url = Annotated[
    str | None, typer.Option("--manager", help="its URL", show_default="ZEROSTALL_MANAGER, else http://127.0.0.1:7077")
]
TokenFile = Annotated[Path | None, typer.Option(help="the cluster's secret", show_default="ZEROSTALL_TOKEN_FILE")]


def status(run: OneRun = None, manager: Url = None, token_file: TokenFile = None, json: Json = False) -> None:
    """Who is there, what is clean, where training would go back to: of all runs, or of one.

    Without a manager: what this machine's agent holds, and what would be lost if something died now. Exit status 1 when
    a node is lost, a run has nothing clean, or no agent runs.
    """
    if not (manager or token_file or os.environ.get("ZEROSTALL_MANAGER") or config.token_file().exists()):
        agent.status(run, json=json)
        return
    link = _link(manager, token_file)
    try:
        state = link.get("state", State)
    finally:
        link.close()
    if run is not None:
        state = _of_run(state, run)
    if json:
        emit_json(state)
    else:
        _print(state)
    if any(node.health == "lost" for node in state.nodes) or any(run.target is None for run in state.runs):
        raise typer.Exit(1)


def top(
    manager: Url = None,
    token_file: TokenFile = None,
    interval: Annotated[float, typer.Option(help="seconds between looks", min=0.2)] = 1.0,
    looks: Annotated[int | None, typer.Option(help="end after so many", show_default="until Ctrl-C")] = None,
) -> None:
    """What the manager knows, live. Of this machine's agent alone `zerostall status` tells."""
    if not (manager or token_file or os.environ.get("ZEROSTALL_MANAGER") or config.token_file().exists()):
        raise CapabilityError("no manager is set up", hint="`zerostall status` shows what this machine's agent holds")
    link = _link(manager, token_file)
    try:
        number = 0
        while looks is None or number < looks:
            if number:
                time.sleep(interval)
            state = link.get("state", State)
            if sys.stdout.isatty():
                console().clear()
            _print(state)
            number += 1
    except KeyboardInterrupt:
        pass
    finally:
        link.close()


def _of_run(state: State, named: str) -> State:
    """What the manager knows of one run. SnapshotNotFoundError where that is nothing; names those there are."""
    runs = tuple(run for run in state.runs if named == run.run or place(named) == run.where)
    if not runs:
        known = ", ".join(run.where or run.run for run in state.runs) or "none"
        raise SnapshotNotFoundError(f"the manager knows no run at {place(named)}", hint=f"it knows {known}")
    return msgspec.structs.replace(state, runs=runs)


def _link(url: str | None, token_file: Path | None) -> ManagerLink:
    address = url or os.environ.get("ZEROSTALL_MANAGER") or "http://127.0.0.1:7077"
    authorities = os.environ.get("ZEROSTALL_MANAGER_CA")
    return ManagerLink(
        address.rstrip("/"),
        token.read((token_file or config.token_file()).absolute()),
        timeout=ANSWER_SECONDS,
        authorities=Path(authorities) if authorities else None,
    )


def _print(state: State) -> None:
    there = sum(node.health == "alive" for node in state.nodes)
    nodes, runs = count(len(state.nodes), "node"), count(len(state.runs), "run")
    say(f"{there} of {nodes} alive, {runs}, manager up {span(state.uptime)}")
    if state.topology:
        say(f"topology of {clean(state.topology)}")
    if state.nodes:
        columns = ("node", "health", ">heard", ">training", ">replicas", ">memory", ">seals", ">stores", "at", "why")
        emit_table(columns, [_node(node) for node in state.nodes[:_NODES]])
    for node in state.nodes[:_NODES]:
        if node.sent_rate >= 1 and node.pace:
            say(f"{node.name}: {node.pace}")
    if len(state.nodes) > _NODES:
        say(f"and {count(len(state.nodes) - _NODES, 'more node')}; those with trouble come first")
    for run in state.runs:
        _print_run(run)
    rows = [(moment(event.at), event.kind, event.subject, event.text) for event in state.events[:_EVENTS]]
    if rows:
        emit_table(("when", "what", "of", ""), rows)


def _node(node: NodeView) -> tuple[str, ...]:
    return (
        node.name,
        node.health,
        f"{node.silent:.0f} s ago",
        f"{node.training} of {node.ranks}",
        str(node.replicas),
        size(node.host_bytes),
        rate(node.sealed_rate),
        rate(node.stored_rate),
        node.labels or "–",
        "; ".join(filter(None, (*node.damaged, node.error or node.reason or node.stands))) or "–",
    )


def _print_run(run: RunView) -> None:
    ranks = count(run.world, "rank")
    say("")
    say(f"run {clean(run.where or run.run)}: {run.training} of {ranks} in training on {count(run.nodes, 'node')}")
    if run.target is None:
        say(f"nothing to go back to: {run.target_reason}", "bold red")
    else:
        say(f"goes back to step {run.target}, {span(run.rpo or 0.0)} ago: {run.target_reason}")
    for copies in run.copies:
        say(f"replicas: {copies}")
    for fetching in run.fetching:
        say(f"fetching {fetching}")
    for waiting in run.waiting:
        say(f"waiting: {waiting}", "yellow")
    rows = [
        (
            str(snapshot.step),
            snapshot.standing,
            ", ".join(f"{tier} {count}" for tier, count in snapshot.tiers.items()) or "–",
            span(snapshot.age),
            snapshot.reason,
        )
        for snapshot in run.snapshots[:8]
    ]
    if rows:
        emit_table((">step", "standing", f"images of {ranks}", ">age", "why"), rows)


def span(seconds: float) -> str:
    """A length of time in one unit, or two."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def rate(nbytes: float) -> str:
    return f"{size(int(nbytes))}/s" if nbytes >= 1 else "–"
