"""A step of several ranks as a restore sees it: one state, whatever ranks its parts lie with.

Tensors are whole ones, put together from all images. Small values are this rank's own: those of the rank of its number,
and what only other ranks have said (the stages of a pipeline, shares of an optimizer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from zerostall.core import leaves, pieces
from zerostall.core.dtypes import DTYPES
from zerostall.core.kinds import kinds
from zerostall.core.layout import Layout, View
from zerostall.core.own import owner, shared_by
from zerostall.core.shards import Entry
from zerostall.trainer.state import refs
from zerostall.trainer.state.stored import StoredPart, StoredState, read_values

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from zerostall.core.kinds import Kind
    from zerostall.core.manifest import Record
    from zerostall.core.pieces import Whole
    from zerostall.tiers.contract import Stored
    from zerostall.trainer.state.walk import Walk

_NAMED = 8

Tree = dict[str, object]


@dataclass(frozen=True, slots=True)
class Images:
    """What is known of all ranks' images before one of them is read.

    Attributes:
        kinds: all ranks, sorted by their layouts.
        world: how many ranks stored them.
        records: of the ranks whose small values are looked at.
    """

    kinds: Sequence[Kind]
    world: int
    records: Mapping[int, Record]

    @classmethod
    def of(cls, stored: Sequence[Stored]) -> Images:
        """Of all ranks, in order."""
        records = {rank: one.record for rank, one in enumerate(stored)}
        return cls(kinds((rank, one.layout) for rank, one in enumerate(stored)), len(stored), records)


@dataclass(frozen=True, slots=True)
class StoredStep:
    """What all ranks' images of one step hold.

    Attributes:
        world: how many ranks stored it.
        state: all of it as one state: its layout's entries are whole tensors that lie nowhere.
        wholes: name of such an entry -> where its parts are.
        strangers: names of tensors that have owners of whom nothing was taken, one for each.
        warnings: what the user should know.
    """

    world: int
    state: StoredState
    wholes: dict[str, Whole]
    strangers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Owners:
    """Whose the tensors of this rank are that are somebody's.

    Attributes:
        of: by name; "" is this rank alone.
        every: all owners that have a name.
        below: by the name below which an optimizer keeps what it has of a tensor.
        marked: tells by a name the owner that a mark names.
    """

    of: Mapping[str, str] = field(default_factory=dict)
    every: frozenset[str] = frozenset()
    below: Mapping[str, str] = field(default_factory=dict)
    marked: Callable[[str], str | None] = lambda name: None

    @classmethod
    def among(cls, walk: Walk) -> Owners:
        of = {leaf.name: leaf.whose for leaf in walk.leaves if leaf.whose is not None}
        return cls(of, frozenset(filter(None, of.values())), walk.owned_below, walk.rank_local)

    def choose(self, name: str, stored: Collection[str]) -> str | None:
        """Of the owners under whom a tensor is stored the one that this rank is; None where that is not clear.

        What is not here yet, an optimizer's state, is its parameter's owner's, else that of whoever its own mark names;
        where it has another name here, that owner's of whom this rank has other tensors.
        """
        whose = self.of.get(name)
        above = name
        while whose is None and above:
            above = above.rpartition(".")[0]
            whose = self.below.get(above)
        if whose is None:
            whose = self.marked(name) or None  # without a name it may be that of several ranks
        if whose is not None:
            return whose if whose in stored else None
        mine = self.every.intersection(stored)
        return next(iter(mine)) if len(mine) == 1 else None


NOBODY = Owners()


def read(images: Images, rank: int, size: int, owners: Owners = NOBODY) -> StoredStep:
    """Read a step for one of `size` ranks, whose tensors are these owners'.

    FormatError where the ranks' images contradict each other. Whether every part is there is not looked at yet.
    """
    mine = size == images.world
    # Where nothing of it can be taken over, one rank of each kind tells the names.
    found = pieces.gathered(images.kinds, (rank,) if mine else {kind.ranks[0] for kind in images.kinds})
    names: dict[str, str] = {}
    refused: dict[str, str] = {}
    owned: dict[str, dict[str, str]] = {}
    for name in [*found.wholes, *found.views]:
        bare, whose = owner(name)
        if whose is None:
            bare, who = shared_by(name)
            if who is None:
                names[name] = name
            else:
                owned.setdefault(bare, {})[who] = name
        elif mine and whose == rank:
            names[name] = bare
        elif not mine:
            refused[bare] = f"is each rank's own (RankLocal), saved by {images.world} ranks; {size} cannot take it over"
    strangers: dict[str, str] = {}
    for bare, under in owned.items():
        who = owners.choose(bare, under)
        if who is not None:
            names[under[who]] = bare
        else:
            refused[bare] = _unclear(under, owners.of.get(bare))
        for other, name in under.items():
            strangers.setdefault(other, name)
    for name in names:
        strangers.pop(shared_by(name)[1] or "", None)
    wholes = {names[name]: whole for name, whole in found.wholes.items() if name in names}
    entries = tuple(_entry(name, whole) for name, whole in wholes.items())
    views = tuple(
        View(names[view.name], names[view.base], view.dtype, view.shape, view.strides, view.start)
        for view in found.views.values()
        if view.name in names and view.base in names
    )
    own = _like(images, rank, owners)
    parts, rng, base = read_values(images.records[own].values)
    if own != rank % images.world:
        rng = read_values(images.records[rank % images.world].values)[1]
    state = StoredState(Layout(entries, views, b"", 0, ""), parts, rng, base, refused)
    state.index()
    for other, record in sorted(images.records.items()):
        if other != own:
            _add(parts, read_values(record.values)[0])
    for name in [name for name, part in parts.items() if any(ref not in state for ref in refs.names_in(part.tree))]:
        parts[name] = replace(parts[name], tree=_without_strangers(parts[name].tree, state))
    warnings = [] if mine else _differences(images, own)
    if rank >= images.world:
        state.rng = None
        warnings.append(f"no random generators were saved for rank {rank}: they stay as they are")
    return StoredStep(images.world, state, wholes, sorted(strangers.values()), warnings)


def _unclear(stored: Iterable[str], here: str | None) -> str:
    """Why none of the owners under whom a tensor is stored is this rank, in words."""
    shown = sorted(stored)
    more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
    mine = f"{here!r}'s" if here else "nobody's" if here is None else "this rank's own"
    return f"is stored as that of {', '.join(map(repr, shown[:_NAMED]))}{more} (RankLocal); here it is {mine}"


def _like(images: Images, rank: int, owners: Owners) -> int:
    """The rank whose small values this one takes over: that of its number, or one of the same owner where it is not."""
    same = rank % images.world
    if not owners.every:
        return same
    others: list[int] = []
    for kind in images.kinds:
        whose = {shared_by(entry.name)[1] for entry in kind.layout.entries} - {None}
        if same in kind.ranks and (not whose or whose & owners.every):
            return same
        if whose & owners.every:
            others += [other for other in kind.ranks if other in images.records][:1]
    return others[0] if others else same


def _entry(name: str, whole: Whole) -> Entry:
    nbytes = math.prod(whole.shape) * DTYPES[whole.dtype].itemsize
    return Entry(name, whole.dtype, whole.shape, whole.shape, (0,) * len(whole.shape), 0, nbytes)


def _add(parts: dict[str, StoredPart], others: dict[str, StoredPart]) -> None:
    """Take in what another rank has said and this one has not."""
    for name, part in others.items():
        known = parts.get(name)
        if known is None:
            parts[name] = part
        elif known.kind == part.kind == "optimizer":
            _add_optimizer(cast("Tree", known.tree), cast("Tree", part.tree))
        elif known.kind == part.kind == "module" and isinstance(part.tree, dict) and part.tree:
            composites = cast("Tree", cast("Tree", known.tree).setdefault("composites", {}))
            for key, ref in cast("Tree", part.tree.get("composites", {})).items():
                composites.setdefault(key, ref)


def _add_optimizer(mine: Tree, theirs: Tree) -> None:
    """Parameters that only the other rank's optimizer knows, with the options of their groups and their state."""
    groups = cast("list[Tree]", mine["groups"])
    known = {label for row in groups for label in cast("list[str]", row["params"])}
    for row in cast("list[Tree]", theirs["groups"]):
        new = [label for label in cast("list[str]", row["params"]) if label not in known]
        if new:
            shapes = {label: shape for label, shape in cast("Tree", row["shapes"]).items() if label in new}
            groups.append({**row, "params": new, "shapes": shapes})
            known.update(new)
    for what in ("state", "extra"):
        for key, value in cast("Tree", theirs[what]).items():
            cast("Tree", mine[what]).setdefault(key, value)
    for what in ("keys", "host"):
        have = cast("list[str]", mine[what])
        have += [key for key in cast("list[str]", theirs[what]) if key not in have]


def _without_strangers(tree: object, state: StoredState) -> object:
    """A tree without what refers to tensors that are other ranks' own."""
    if isinstance(tree, dict):
        kept = {key: item for key, item in tree.items() if not _strange(item, state)}
        return {key: _without_strangers(item, state) for key, item in kept.items()}
    return tree


def _strange(value: object, state: StoredState) -> bool:
    names = list(refs.names_in(value))
    return bool(names) and all(name not in state for name in names)


def _differences(images: Images, own: int) -> list[str]:
    """Values that ranks have said otherwise: in another world some rank's must be taken, and which is told."""
    mine = images.records[own].values
    texts = {leaf.name: leaf.text for leaf in leaves.leaves(mine)}
    odd: dict[str, int] = {}
    for rank, record in sorted(images.records.items()):
        if rank == own or record.values == mine:
            continue
        for leaf in leaves.leaves(record.values):
            if not leaf.name.startswith("rng") and texts.get(leaf.name, leaf.text) != leaf.text:
                odd.setdefault(leaf.name, rank)
    if not odd:
        return []
    named = ", ".join(f"{name} (rank {rank})" for name, rank in list(odd.items())[:_NAMED])
    more = f" and {len(odd) - _NAMED} more" if len(odd) > _NAMED else ""
    return [f"values differ between the {images.world} ranks that saved; those of rank {own} are taken: {named}{more}"]
