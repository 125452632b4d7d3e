"""`RankLocal`: the mark for state that has the same names on several ranks and is not the same."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class RankLocal:
    """What every rank has of its own, although other ranks have tensors of the same names: experts, say.

    >>> Checkpointer("runs/moe", model=RankLocal(model, "layers.*.experts.*"), optimizer=optimizer)

    Each rank's tensors are stored for that rank and come back to the rank of that number, in a world of the same size
    only. Without this mark ranks are taken to hold copies or parts of one tensor, and two that differ are an error.
    The state that an optimizer has for such parameters is marked with them.

    Args:
        value: what a Checkpointer takes: a module, an optimizer, a container ...
        *only: globs of the names below `value` that are meant, `*` being any text, dots too; none: all of it.
    """

    def __init__(self, value: object, *only: str) -> None:
        self.value = value
        self.only = only

    def pattern(self, root: str) -> re.Pattern[str]:
        """Return what the full names of such tensors look like, where `root` is the value's name."""
        globs = [".*".join(map(re.escape, glob.split("*"))) for glob in self.only]
        below = rf"\.(?:{'|'.join(globs)})" if globs else r"(?:[.\[].*)?"
        return re.compile(re.escape(root) + below, re.DOTALL)


def unmarked(roots: dict[str, object]) -> tuple[dict[str, object], Callable[[str], bool]]:
    """Return the roots without marks, and what tells by a tensor's name whether it was marked."""
    patterns = [value.pattern(name) for name, value in roots.items() if isinstance(value, RankLocal)]
    plain = {name: value.value if isinstance(value, RankLocal) else value for name, value in roots.items()}

    def marked(name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in patterns)

    return plain, marked
