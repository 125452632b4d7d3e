"""What belongs to one rank or to some ranks, while data of that name on other ranks is other data: how it is called.

What is one rank's alone has `[=own]` behind its name in that rank's layout, so that ranks with such tensors can share
one layout. Where a step is looked at as a whole it has `[=rank <number>]`, which in format versions 1 and 2 stood in
layouts, too. What some ranks hold together, each a part or all of it, has `[=owner <who>]` everywhere: to the format
that is a tensor of another name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zerostall.core.quoting import quote
from zerostall.core.shards import DISTINCT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zerostall.core.shards import Entry, Shard, View

_OWN = "[=own]"
_ENDS = (_OWN, _OWN + DISTINCT)
_RANK = re.compile(r"\[=rank ([0-9]+)\]\Z")
_OWNED = re.compile(r"\[=owner ([^\[\]]+)\]\Z")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ :/-]{0,63}")
_RANKS = "ranks "


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
    return shared_by(name.removesuffix(_OWN))[0]


def owner_problem(who: str) -> str:
    """Say why this cannot name an owner, or return ''."""
    if not isinstance(who, str):
        return "is no text"
    if who.startswith(_RANKS):
        return f"begins with {_RANKS!r}, as owners do that have no name"
    return "" if _PLAIN.fullmatch(who) else "is not 1 to 64 letters, digits, spaces and _ : / -, the first no sign"


def owned_name(name: str, who: str) -> str:
    """Return what a tensor is called that some ranks hold together."""
    return f"{name}[=owner {who}]"


def shared_by(name: str) -> tuple[str, str | None]:
    """Return the user's name of a tensor, and the owner of it, if it has one."""
    match = _OWNED.search(name) if name.endswith("]") else None
    return (name[: match.start()], match[1]) if match else (name, None)


def first_owner(names: Iterable[str]) -> str | None:
    """Return the owner whose name comes first of those that tensors of these names have."""
    return min(filter(None, (shared_by(name)[1] for name in names)), default=None)


def unnamed_owner(ranks: Sequence[int], size: int) -> str:
    """Who these ranks of `size` are together, where the user has no name for it: nobody in any other world."""
    runs: list[list[int]] = []  # first, last, step
    for rank in sorted(ranks):
        last = runs[-1] if runs else None
        if last is not None and (last[0] == last[1] or rank - last[1] == last[2]):
            last[1:] = rank, rank - last[1]
        else:
            runs.append([rank, rank, 1])
    return f"{_RANKS}{' '.join(map(_run, runs))} of {size}"


def _run(run: Sequence[int]) -> str:
    first, last, step = run
    return f"{first}" if first == last else f"{first}-{last}" + (f"/{step}" if step > 1 else "")


def own_problems(boxes: Sequence[Shard | Entry], views: Sequence[View]) -> Iterator[str]:
    """Yield what is wrong with each that is a rank's own, of a layout that is sound otherwise."""
    for box in boxes:
        if is_own(box.name) and box.shape != box.global_shape:
            yield f"{quote(box.name)}: it is a rank's own, and yet a part"
    for view in views:
        if is_own(view.name) != is_own(view.base):
            yield f"{quote(view.name)}: it looks into {quote(view.base)}, and one of them is a rank's own"
