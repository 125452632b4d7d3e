"""`RankLocal`: the mark for state that has the same names on several ranks and is not the same."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zerostall.core.own import owner_problem

if TYPE_CHECKING:
    from collections.abc import Callable


class RankLocal:
    """What every rank has of its own, although other ranks have tensors of the same names: experts, say.

    >>> Checkpointer("runs/moe", model=RankLocal(model, "layers.*.experts.*"), optimizer=optimizer)

    Each rank's tensors are stored for that rank and come back to the rank of that number, in a world of the same size
    only. A tensor that is itself dealt out over some ranks (an expert under FSDP2) belongs to these together, and comes
    back to the same ranks of as many. Without this mark ranks are taken to hold copies or parts of one tensor, and two
    that differ are an error. The state that an optimizer has for such parameters is marked with them.

    With `owner`, all ranks that name the same owner hold copies or parts of the same tensors, and whoever names that
    owner gets them back, on any number of ranks and dealt out in any way:

    >>> RankLocal(model, "layers.*.experts.*", owner=f"expert {mesh['ep'].get_local_rank()}")

    Args:
        value: what a Checkpointer takes: a module, an optimizer, a container ...
        *only: globs of the names below `value` that are meant, `*` being any text, dots too; none: all of it.
        owner: whose it is on this rank; up to 64 letters, digits, spaces and `_ : / -`. ValueError for anything else.
    """

    def __init__(self, value: object, *only: str, owner: str = "") -> None:
        if owner and (problem := owner_problem(owner)):
            raise ValueError(f"owner {owner!r} {problem}")
        self.value = value
        self.only = only
        self.owner = owner

    def pattern(self, root: str) -> re.Pattern[str]:
        """Return what the full names of such tensors look like, where `root` is the value's name."""
        globs = [".*".join(map(re.escape, glob.split("*"))) for glob in self.only]
        below = rf"\.(?:{'|'.join(globs)})" if globs else r"(?:[.\[].*)?"
        return re.compile(re.escape(root) + below, re.DOTALL)


def unmarked(roots: dict[str, object]) -> tuple[dict[str, object], Callable[[str], str | None]]:
    """Return the roots without marks, and what tells by a tensor's name the owner that its mark names.

    "" is this rank, and None that there is no mark.
    """
    patterns = [(value.pattern(name), value.owner) for name, value in roots.items() if isinstance(value, RankLocal)]
    plain = {name: value.value if isinstance(value, RankLocal) else value for name, value in roots.items()}

    if not patterns:
        return plain, lambda name: None

    def marked(name: str) -> str | None:
        return next((owner for pattern, owner in patterns if pattern.fullmatch(name)), None)

    return plain, marked
