"""How the ranks come together: the same choices, one run, and an epoch that none of them has seen before."""

from __future__ import annotations

import os
import socket
from dataclasses import fields
from typing import TYPE_CHECKING

import msgspec

import zerostall
from zerostall import config
from zerostall.config import runtime_dir, umask
from zerostall.core import agreement
from zerostall.errors import CapabilityError, RankError, RunMismatchError
from zerostall.wire.messages import PROTOCOL, Hello, Meeting, Nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from zerostall.trainer.link import Link
    from zerostall.trainer.options import Options
    from zerostall.trainer.world import World
    from zerostall.wire.messages import Welcome

_TERMS = dict[str, str]


def agree_on_terms(world: World, where: Path | str, options: Options, **more: object) -> Nodes | None:
    """Make sure that every rank was told the same; and find out who is on this rank's node, where not all are.

    Raises:
        RankError: a rank differs; names it and the option.
        CapabilityError: ranks are on several nodes, and have no folder.
    """
    node = f"{socket.gethostname()}:{runtime_dir()}"
    terms = {"zerostall": zerostall.__version__, "where": repr(str(where))}
    terms |= {name: repr(value) for name, value in more.items()}
    terms |= {field.name: repr(getattr(options, field.name)) for field in fields(options)}

    def decide(all_terms: Sequence[bytes]) -> bytes:
        told = [msgspec.json.decode(one, type=_TERMS) for one in all_terms]
        nodes = [one.pop("node") for one in told]
        problem = agreement.difference(told)
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
        return msgspec.json.encode([numbers.setdefault(node, len(numbers)) for node in nodes])

    what = "Checkpointer(...): options"
    node_of = msgspec.json.decode(
        world.decide(msgspec.json.encode(terms | {"node": node}), decide, what=what), type=list[int]
    )
    if not any(node_of):
        return None
    here = tuple(rank for rank, number in enumerate(node_of) if number == node_of[world.rank])
    return Nodes(here=here, host=config.host_for_nodes())


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
