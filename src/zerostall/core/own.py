"""What belongs to one rank alone, while data of that name on other ranks is other data: how it is called.

In a rank's layout it has `[=own]` behind its name, so that ranks with such tensors can share one layout. Where a step
is looked at as a whole it has `[=rank <number>]`, which in format versions 1 and 2 stood in layouts, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zerostall.core.quoting import quote
from zerostall.core.shards import DISTINCT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerostall.core.shards import Entry, Shard, View

_OWN = "[=own]"
_ENDS = (_OWN, _OWN + DISTINCT)
_RANK = re.compile(r"\[=rank ([0-9]+)\]\Z")


def own_name(name: str) -> str:
    """Return what a tensor is called in the layout of the rank that it belongs to alone."""
    return name + _OWN


def is_own(name: str) -> bool:
    """Whether an entry or a view of a layout, by its name there, belongs to the layout's rank alone."""
    return name.endswith(_ENDS)


def local_name(name: str, rank: int) -> str:
    """Return what a tensor is called among those of all ranks that belongs to one of them alone."""
    return f"{name}[=rank {rank}]"


def named_for(name: str, rank: int) -> str:
    """Return the name among those of all ranks of what is called `name` in one rank's layout."""
    if not is_own(name):
        return name
    bare, _, rest = name.rpartition(_OWN)
    return local_name(bare, rank) + rest


def owner(name: str) -> tuple[str, int | None]:
    """Return the user's name of a tensor, and the rank that it belongs to alone, if it does."""
    match = _RANK.search(name) if name.endswith("]") else None
    return (name[: match.start()], int(match[1])) if match else (name, None)


def bare(name: str) -> str:
    """Return the user's name of what is called `name` in a layout."""
    return name.removesuffix(_OWN)


def own_problems(boxes: Sequence[Shard | Entry], views: Sequence[View]) -> Iterator[str]:
    """Yield what is wrong with each that is a rank's own, of a layout that is sound otherwise."""
    for box in boxes:
        if is_own(box.name) and box.shape != box.global_shape:
            yield f"{quote(box.name)}: it is a rank's own, and yet a part"
    for view in views:
        if is_own(view.name) != is_own(view.base):
            yield f"{quote(view.name)}: it looks into {quote(view.base)}, and one of them is a rank's own"
