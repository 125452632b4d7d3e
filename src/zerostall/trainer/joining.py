"""How the ranks come together: the same choices, one run, and an epoch that none of them has seen before."""

from __future__ import annotations

import os
import socket
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import zerostall
from zerostall import config
from zerostall.config import runtime_dir, umask
from zerostall.core import agreement
from zerostall.core.heirs import Holding, elder
from zerostall.errors import CapabilityError, RankError, RunMismatchError
from zerostall.telemetry import log
from zerostall.tiers.files import storage_errors
from zerostall.tiers.holding import holding_of
from zerostall.wire.messages import PROTOCOL, Hello, Meeting, Nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerostall.trainer.link import Link
    from zerostall.trainer.options import Options
    from zerostall.trainer.world import World
    from zerostall.wire.messages import Welcome


class _Told(msgspec.Struct, frozen=True):
    """What a rank chose, by name; where it is; and what its folder holds."""

    terms: dict[str, str]
    node: str
    holds: Holding | None


class _Agreed(msgspec.Struct, frozen=True):
    """The number of each rank's node; and, where there are several, what their folders hold, and why."""

    node_of: list[int]
    elder: Holding | None = None
    reason: str = ""


def agree_on_terms(
    world: World, where: Path | str, options: Options, *, run: str | None, **more: object
) -> Nodes | None:
    """Make sure that every rank was told the same; and find out who is on this rank's node, where not all are.

    Raises:
        RankError: a rank differs; names it and the option.
        CapabilityError: ranks are on several nodes, and have no folder.
        RunMismatchError: rank 0's folder is empty, and the others' are not of one run, or of another than is meant.
        FormatError, StorageError: the folder does not say what it is of, or cannot be looked at.
    """
    what = "Checkpointer(...): options"
    holds: Holding | None = None
    if world.size > 1 and isinstance(where, Path):
        with world.excused(what), storage_errors(where, "the run's folder", 0, doing="read"):
            holds = holding_of(where)
    node = f"{socket.gethostname()}:{runtime_dir()}"
    terms = {"zerostall": zerostall.__version__, "where": repr(str(where))}
    terms |= {name: repr(value) for name, value in {"run": run, **more}.items()}
    terms |= {field.name: repr(getattr(options, field.name)) for field in fields(options)}

    def decide(all_terms: Sequence[bytes]) -> bytes:
        told = [msgspec.json.decode(one, type=_Told) for one in all_terms]
        nodes = [one.node for one in told]
        problem = agreement.difference([one.terms for one in told])
        if problem:
            raise RankError(f"the ranks' checkpointers differ: {problem}", hint="give every rank the same options")
        elsewhere = [rank for rank, node in enumerate(nodes) if node != nodes[0]]
        if elsewhere and isinstance(where, str):
            raise CapabilityError(
                f"rank {elsewhere[0]} runs at {nodes[elsewhere[0]]}, rank 0 at {nodes[0]}: ranks on several nodes need "
                f"a folder that all of them share, and {where} is none",
                hint="give that folder, and remote= for the store; on one node, give all ranks the same "
                "ZEROSTALL_RUNTIME_DIR",
            )
        numbers: dict[str, int] = {}
        node_of = [numbers.setdefault(node, len(numbers)) for node in nodes]
        if not elsewhere:
            return msgspec.json.encode(_Agreed(node_of))
        found = elder([one.holds for one in told], run or "")
        if found.clash:
            raise RunMismatchError(
                f"{where}: {found.reason}",
                hint="move the folders that are not of this run aside, each on its node: an empty one goes on with the "
                "others' run",
            )
        return msgspec.json.encode(_Agreed(node_of, found.holding, found.reason))

    mine = msgspec.json.encode(_Told(terms, node, holds))
    agreed = msgspec.json.decode(world.decide(mine, decide, what=what), type=_Agreed)
    node_of = agreed.node_of
    if not any(node_of):
        return None
    if holds is None and agreed.elder is not None:
        log.warning("%s is empty here and goes on with the others': %s", where, agreed.reason)
    here = tuple(rank for rank, number in enumerate(node_of) if number == node_of[world.rank])
    return Nodes(here=here, host=config.host_for_nodes(), elder=agreed.elder)


def hello_of(world: World, where: Path | str, options: Options, run: str | None, nodes: Nodes | None) -> Hello:
    """What this rank says to its node's agent first."""
    return Hello(
        id=0,
        protocol=PROTOCOL,
        pid=os.getpid(),
        where=os.fsencode(str(where)),
        rank=world.rank,
        world=world.size,
        rules=options.rules(world.patience),
        run=run,
        umask=umask(),
        remote=options.remote_rules(),
        nodes=nodes,
    )


def link_up(world: World, connect: Callable[[Nodes | None], Link], nodes: Nodes | None) -> Link:
    """Connect to this node's agent. Where there are several, that of rank 0's node says where the others meet it."""
    what = "Checkpointer(...)"
    if nodes is None:
        with world.excused(what):
            return connect(None)
    link: Link | None = None
    if nodes.seat:
        with world.excused(what):
            link = connect(nodes)
    meeting = link.welcome.meeting if link is not None else None
    try:
        answer = world.decide(msgspec.json.encode(meeting), lambda every: every[0], what="Checkpointer(...): nodes")
    except BaseException:
        if link is not None:
            link.close()
        raise
    if link is not None:
        return link
    with world.excused(what):
        return connect(msgspec.structs.replace(nodes, meeting=msgspec.json.decode(answer, type=Meeting)))


class _Found(msgspec.Struct, frozen=True):
    """What a rank's agent knows of the run."""

    run: str
    epoch: int


def agree_on_run(world: World, where: Path | str, welcome: Welcome) -> int:
    """Make sure that the folder is the same for every rank; the epoch that begins now, newer than all before.

    Raises:
        RunMismatchError: it is another run's on some rank.
    """

    def decide(everything: Sequence[bytes]) -> bytes:
        found = [msgspec.json.decode(one, type=_Found) for one in everything]
        for rank, other in enumerate(found):
            if other.run != found[0].run:
                raise RunMismatchError(
                    f"{where} is run {other.run} on rank {rank} and run {found[0].run} on rank 0",
                    hint="it must be one folder that all nodes share",
                )
        return msgspec.json.encode(max(one.epoch for one in found) + 1)

    mine = msgspec.json.encode(_Found(welcome.run_id, welcome.epoch))
    return msgspec.json.decode(world.decide(mine, decide, what="Checkpointer(...): the run"), type=int)
