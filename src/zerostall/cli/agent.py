"""`zerostall agent`: the process that keeps snapshots in memory, one a node and user."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import msgspec
import typer

from zerostall.cli.arguments import Json, OneRun, place
from zerostall.cli.output import emit_json, emit_table, say, size, steps
from zerostall.config import runtime_dir
from zerostall.core import policy
from zerostall.core.quoting import count
from zerostall.errors import AgentError, SnapshotNotFoundError
from zerostall.flow.node_agent import ANSWER_SECONDS, ask, ask_status
from zerostall.wire import messages as m
from zerostall.wire import rendezvous
from zerostall.wire.channel import Channel, ClosedError, peer, process_lives

app = typer.Typer(no_args_is_help=True, help="The process that keeps snapshots in memory; it starts by itself.")


@app.command()
def start(json: Json = False) -> None:
    """Start the agent, unless it runs already."""
    channel = rendezvous.connect_or_start(runtime_dir())
    report = ask_status(channel)
    channel.close()
    if json:
        emit_json(_facts(report))
    else:
        say(f"agent {report.pid} serves {runtime_dir()}")


@app.command()
def status(run: OneRun = None, json: Json = False) -> None:
    """What the agent holds, of all runs or of one; exit status 1 when no agent runs."""
    channel = rendezvous.connect(runtime_dir())
    if channel is None:
        if json:
            emit_json({"running": False, "runtime_dir": str(runtime_dir())})
        else:
            say(f"no agent runs in {runtime_dir()}; training starts one by itself")
        raise typer.Exit(1)
    report = ask_status(channel)
    channel.close()
    if run is not None:
        report = _of_run(report, place(run))
    if json:
        emit_json(_facts(report))
        return
    say(
        f"agent {report.pid}, version {report.version}, up {report.uptime:.0f} s in {runtime_dir()}: "
        f"{size(report.host_bytes)} of {size(report.host_budget)} lent"
    )
    upkeep = report.upkeep
    say(
        f"images in memory: {upkeep.words}; {size(upkeep.checked)} checked so far, {upkeep.damaged} found damaged, "
        f"{upkeep.mended} made again"
    )
    if upkeep.pace:
        say(upkeep.pace)
    rows = [
        (
            rank.where,
            f"{rank.rank} of {rank.world}",
            str(rank.trainer_pid or "–"),
            size(rank.segment_bytes),
            steps(rank.host_steps),
            steps(rank.disk_steps),
            "–" if rank.trickling is None else str(rank.trickling),
            "; ".join((*rank.damaged, *filter(None, [rank.last_error]))) or "–",
        )
        for rank in report.ranks
    ]
    if rows:
        columns = ("run", ">rank", ">trainer", ">memory", "in memory", "on disk", ">writing", "last error")
        emit_table(columns, rows)
    firsts = sorted((rank for rank in report.ranks if rank.rank == 0), key=_rest)
    for number, rank in enumerate(firsts):
        if number and rank.trainer_pid is None:  # there may be many of those
            say(f"and {count(len(firsts) - number, 'run')} that nobody trains: `zerostall status RUN` tells of one")
            break
        _emit_tiers(rank)


def _rest(rank: m.RankReport) -> tuple[bool, float]:
    """Runs in training come first, then the one that saved last."""
    return rank.trainer_pid is None, -max((tier.created for tier in rank.tiers), default=0.0)


def _of_run(report: m.Report, where: str) -> m.Report:
    """What a report says of one run. SnapshotNotFoundError where that is nothing; names those there are."""
    ranks = tuple(rank for rank in report.ranks if rank.where == where)
    if not ranks:
        known = ", ".join(sorted({rank.where for rank in report.ranks})) or "nothing"
        raise SnapshotNotFoundError(f"the agent holds nothing of {where}", hint=f"it holds {known}")
    return msgspec.structs.replace(report, ranks=ranks)


def _emit_tiers(rank: m.RankReport) -> None:
    """A run's tiers, and what would be lost if something died now."""
    now = time.time()
    columns = ("tier", "where", ">newest", ">saved", ">steps", ">every", "keeps", ">going there", "trouble")
    rows = [
        (
            tier.tier,
            tier.where,
            "–" if tier.newest is None else str(tier.newest),
            f"{max(0.0, now - tier.created):.0f} s ago" if tier.created else "–",
            str(tier.steps),
            f"{tier.every:.0f} s" if tier.every else "each",
            tier.keep,
            "–" if tier.moving is None else f"{tier.moving}, {tier.waits}" if tier.waits else str(tier.moving),
            tier.last_error or "–",
        )
        for tier in rank.tiers
    ]
    emit_table(columns, rows, title=f"the tiers of {rank.where}")
    training = rank.trainer_pid is not None
    say(f"{'' if training else 'nobody is training; '}what would be lost if this died now:")
    for loss in losses_of(rank, now):
        if training or loss.what != policy.PROCESS:
            say(f"  {loss.what}: {words(loss, training=training)}")


def losses_of(rank: m.RankReport, now: float) -> tuple[policy.Loss, ...]:
    """What would be lost of a run if something died at `now`."""
    tiers = [policy.Newest(tier.tier, tier.newest, tier.created) for tier in rank.tiers]
    return policy.losses(tiers, now, training=rank.trainer_pid is not None)


def words(loss: policy.Loss, *, training: bool) -> str:
    """What would be lost, as a sentence goes on."""
    if loss.seconds is None:
        return "everything; no step is kept elsewhere"
    if training:
        return f"the last {loss.seconds:.0f} s; training goes on from step {loss.step} in the tier {loss.tier}"
    lost = f"what came after step {loss.step}, {loss.seconds:.0f} s of training" if loss.seconds else "nothing"
    return f"{lost}; step {loss.step} is in the tier {loss.tier}"


@app.command()
def stop(
    force: Annotated[bool, typer.Option("--force", help="even while trainers are attached")] = False,
    json: Json = False,
) -> None:
    """Stop the agent. What it holds in memory only is lost."""
    channel = rendezvous.connect(runtime_dir())
    if channel is not None:
        ask(channel, m.Stop(id=1, force=force))
        _until_gone(channel)
    if json:
        emit_json({"stopped": channel is not None})
    else:
        say("stopped" if channel is not None else f"no agent runs in {runtime_dir()}")


def _facts(report: m.Report) -> dict[str, object]:
    """A report as a JSON document; what only the connection needs is left out."""
    now = time.time()
    facts = {name: value for name, value in msgspec.to_builtins(report).items() if name not in ("id", "type")}
    losses = {rank.where: msgspec.to_builtins(losses_of(rank, now)) for rank in report.ranks if rank.rank == 0}
    return {"running": True, "runtime_dir": str(runtime_dir()), **facts, "losses": losses}


def _until_gone(channel: Channel[m.FromAgent]) -> None:
    """Returns when the agent has ended, so that a new one could start at once.

    Raises:
        AgentError: it did not end within `ANSWER_SECONDS`.
    """
    pid, _ = peer(channel.socket)
    with contextlib.suppress(ClosedError):
        while True:
            channel.receive()
    channel.close()
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        if not process_lives(pid):
            return
        time.sleep(0.01)
    raise AgentError(f"agent {pid} was told to stop and has not ended", hint="see agent.log in its folder")
