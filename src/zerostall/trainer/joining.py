"""How the ranks of one attempt come together: the same choices, one run, and a name for the attempt."""

from __future__ import annotations

import uuid
from dataclasses import fields
from typing import TYPE_CHECKING

import msgspec

import zerostall
from zerostall.core import agreement
from zerostall.errors import RankError, RunMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerostall.trainer.options import Options
    from zerostall.trainer.world import World

_TERMS = dict[str, str]


def agree_on_terms(world: World, where: Path, options: Options, **more: object) -> str:
    """Make sure that every rank was told the same; the name of this attempt, which no other has.

    Raises:
        RankError: a rank differs; names it and the option.
    """
    terms = {"zerostall": zerostall.__version__, "where": repr(str(where))}
    terms |= {name: repr(value) for name, value in more.items()}
    terms |= {field.name: repr(getattr(options, field.name)) for field in fields(options)}

    def decide(all_terms: Sequence[bytes]) -> bytes:
        problem = agreement.difference([msgspec.json.decode(one, type=_TERMS) for one in all_terms])
        if problem:
            raise RankError(f"the ranks' checkpointers differ: {problem}", hint="give every rank the same options")
        return uuid.uuid4().hex.encode()

    return world.decide(msgspec.json.encode(terms), decide, what="Checkpointer(...): options").decode()


def agree_on_run(world: World, where: Path, run: str) -> None:
    """Make sure that the folder is the same for every rank.

    Raises:
        RunMismatchError: it is another run's on some rank.
    """

    def decide(runs: Sequence[bytes]) -> bytes:
        for rank, other in enumerate(runs):
            if other != runs[0]:
                raise RunMismatchError(
                    f"{where} is run {other.decode()} on rank {rank} and run {runs[0].decode()} on rank 0",
                    hint="it must be one folder that all nodes share",
                )
        return b""

    world.decide(run.encode(), decide, what="Checkpointer(...): the run")
