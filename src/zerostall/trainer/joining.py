"""How the ranks come together: the same choices, one run, and an epoch that none of them has seen before."""

from __future__ import annotations

import socket
from dataclasses import fields
from typing import TYPE_CHECKING

import msgspec

import zerostall
from zerostall.config import runtime_dir
from zerostall.core import agreement
from zerostall.errors import CapabilityError, RankError, RunMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerostall.trainer.options import Options
    from zerostall.trainer.world import World
    from zerostall.wire.messages import Welcome

_TERMS = dict[str, str]


def agree_on_terms(world: World, where: Path | str, options: Options, **more: object) -> None:
    """Make sure that every rank was told the same.

    Raises:
        RankError: a rank differs; names it and the option.
        CapabilityError: a rank is on another node, or has an agent of its own.
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
        if elsewhere := [rank for rank, node in enumerate(nodes) if node != nodes[0]]:
            raise CapabilityError(
                f"rank {elsewhere[0]} runs at {nodes[elsewhere[0]]}, rank 0 at {nodes[0]}: in this version the ranks "
                "of a run share one node, and its agent",
                hint="on one node, give all ranks the same ZEROSTALL_RUNTIME_DIR",
            )
        return b""

    world.decide(msgspec.json.encode(terms | {"node": node}), decide, what="Checkpointer(...): options")


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
