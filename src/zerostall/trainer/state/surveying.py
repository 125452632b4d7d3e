"""From what a walk found to the layout of an image, and who may change what while it is read."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core import matching, names
from zerostall.core.boxes import Box
from zerostall.core.layout import Shard, View
from zerostall.core.own import bare, is_own, own_name, owned_name
from zerostall.core.partition import Row
from zerostall.core.shards import tile_name
from zerostall.errors import StateError
from zerostall.trainer.state import tensors
from zerostall.trainer.state.aliasing import DISTINCT, contiguous_strides, share
from zerostall.trainer.state.choice import identity
from zerostall.trainer.state.flat import FlatShard
from zerostall.trainer.state.parts.hooking import watch
from zerostall.trainer.state.sharded import Sharding, sharding, window

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zerostall.core.layout import Layout
    from zerostall.trainer.state.dealing import Dealing
    from zerostall.trainer.state.proving import Proof
    from zerostall.trainer.state.tensors import Holder
    from zerostall.trainer.state.walk import Leaf, Made, Part, Walk
    from zerostall.trainer.world import World

SMALL = 512
"""Tensors in host memory below this many bytes are copied within `save`: guarding them would cost more."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a full walk found.

    Attributes:
        layout: of the image.
        tensors: in the order of layout.entries; strong references.
        at_once: indexes of those that something else than an optimizer's step may change, and of the small ones.
        tracked: for each, whether it is left to be read after `save`, so that changes must be looked for.
        still: of each object, by name, its kind and its small values, where these stay what they are.
        moving: the others, which are asked at each save.
        base: identity of the modules' tensors that are not saved, "" where all are.
        watch: tells whether the containers that hold the tensors are as they were.
        anchors: tells whether tensors that are read through others are in the same memory.
        proof: that other ranks have alike what this one stores a share of; None where there are no others.
    """

    layout: Layout
    tensors: list[Holder]
    at_once: list[int]
    tracked: list[bool]
    still: dict[str, tuple[str, object]]
    moving: list[Part]
    watch: native.Watch
    base: str
    anchors: Anchors
    proof: Proof | None = None


class Anchors:
    """What of the user's is read through another tensor, which would not notice that it has moved.

    That is a second name of memory, a tensor of which the distinct elements or a part are stored, a distributed one,
    which is stored by its local tensor, and one that is made of others (`made`), which it may exchange. `read` are
    those that every capture asks for their memory anyway: a capture follows them wherever they go. So of those that
    are read for another tensor, too, it must be known that both stay (`shared`). Flat shards are views of a tensor that
    has other memory while it is gathered.
    """

    def __init__(
        self, holders: Iterable[Holder], read: Iterable[Holder], made: Sequence[Made], shared: Iterable[Holder]
    ) -> None:
        self._made = made
        asked = set(map(id, read)).difference(id(_moving(holder)) for holder in shared)
        self._distributed: list[Holder] = []
        self._locals: list[Holder] = []
        others: list[Holder] = []
        for holder in holders:
            own = _moving(holder)
            if own is not holder and not isinstance(holder, FlatShard):
                self._distributed.append(holder)
                self._locals.append(own)
            if id(own) not in asked:
                asked.add(id(own))
                others.append(own)
        self._others = native.Tensors(others, [False] * len(others)) if others else None
        self._pointers: list[int] = []
        if self._others is not None:
            self._others.refresh()
            self._pointers = self._others.pointers

    def __bool__(self) -> bool:
        return self._others is not None or bool(self._distributed or self._made)

    def same(self) -> bool:
        """Is all of it where it was? 60 ns a tensor."""
        if not all(map(operator.is_, map(_local, self._distributed), self._locals)):
            return False
        if not all(made.same() for made in self._made):
            return False
        return self._others is None or (not self._others.refresh() and self._others.pointers == self._pointers)


_local = operator.attrgetter("_local_tensor")


def _moving(holder: Holder) -> Holder:
    """What is given other memory where a tensor is."""
    return holder.source if isinstance(holder, FlatShard) else tensors.own(holder)


@dataclass(slots=True)
class Found:
    """The leaves of a walk, each byte of memory once.

    Attributes:
        stored: by the name in the image: the leaves, and
        holders: what of them is stored: all, or what is distinct.
        views: other names, by the name of their base.
        base: identity of the modules' tensors that are not saved, "" where all are.
        guarded: names of those that only an optimizer's step changes.
        shared: id -> a tensor that shares an entry with one that is another object, so that each may leave it alone.
    """

    walk: Walk
    stored: dict[str, Leaf] = field(default_factory=dict)
    holders: dict[str, Holder] = field(default_factory=dict)
    views: dict[str, list[View]] = field(default_factory=dict)
    guarded: set[str] = field(default_factory=set)
    base: str = ""
    shared: dict[int, Holder] = field(default_factory=dict)

    def share(self, one: Holder, other: Holder) -> None:
        """Note that both are stored by the same entry."""
        if one is not other:
            self.shared[id(one)] = one
            self.shared[id(other)] = other

    @property
    def parts(self) -> dict[str, Part]:
        return self.walk.parts


def look(walk: Walk, *, size: int, user_guards: bool) -> Found:
    """Find what is to be stored of what a walk found, on this rank."""
    _refuse_twins(walk.leaves)
    found = Found(walk)
    groups: dict[tuple[str | None, bool], list[Leaf]] = {}
    for leaf in walk.leaves:
        whose = leaf.whose if size > 1 else leaf.whose or None  # one rank's own is all there is where it is alone
        if whose is not None:
            name = owned_name(leaf.name, whose) if whose else own_name(leaf.name)
            leaf = msgspec.structs.replace(leaf, name=name)
        groups.setdefault((whose, tensors.is_distributed(leaf.holder)), []).append(leaf)
    for (_, distributed), leaves in groups.items():
        if distributed:
            _share_distributed(found, leaves)
        else:
            _share_memory(found, leaves)
    _guard(found, user_guards=user_guards)
    found.base = identity(walk.left_out) if walk.left_out else ""
    return found


def _share_memory(found: Found, leaves: list[Leaf]) -> None:
    sharing = share([leaf.name for leaf in leaves], [leaf.where for leaf in leaves])
    for index in sharing.bases:
        found.stored[leaves[index].name] = leaves[index]
        found.holders[leaves[index].name] = leaves[index].holder
    for index in sharing.expanded:
        leaf = leaves[index]
        found.stored[leaf.name + DISTINCT] = leaf
        found.holders[leaf.name + DISTINCT] = tensors.distinct(leaf.holder)
    for view in sharing.views:
        found.views.setdefault(view.base, []).append(view)
    for index, base in sharing.base_of.items():
        found.share(leaves[index].holder, leaves[base].holder)


def _share_distributed(found: Found, leaves: list[Leaf]) -> None:
    """Of distributed tensors only the very same are one: told by the object where nothing of it is here."""
    seen: dict[object, str] = {}
    for leaf in leaves:
        dealt = sharding(leaf.name, leaf.holder)
        keys = [(leaf.owner, dealt), (leaf.where, dealt)] if 0 not in leaf.where.shape else [(leaf.owner, dealt)]
        first = next((seen[key] for key in keys if key in seen), None)
        if first is None:
            found.stored[leaf.name] = leaf
            found.holders[leaf.name] = leaf.holder
            seen.update(dict.fromkeys(keys, leaf.name))
        else:
            shape = tuple(leaf.holder.shape)
            whole = View(leaf.name, first, leaf.where.dtype, shape, contiguous_strides(shape), 0)
            found.views.setdefault(first, []).append(whole)
            found.share(leaf.holder, found.holders[first])


def _guard(found: Found, *, user_guards: bool) -> None:
    """Find what only an optimizer's step changes, or only what the user guards."""
    walk = found.walk
    safe = {leaf.name for leaf in walk.leaves if leaf.owner in walk.guarded or (user_guards and leaf.trainable)}
    for name, leaf in found.stored.items():
        # The same elements under a second name are as safe as under the first.
        shape = tuple(leaf.holder.shape)
        names = [leaf.name, *(view.name for view in found.views.get(name, ()) if view.shape == shape)]
        if any(bare(other) in safe for other in names) and name == leaf.name:
            found.guarded.add(name)


def take(found: Found, world: World, dealing: Dealing) -> Survey:
    """Lay out the image of this rank. With several ranks it may be an exchange, see `Dealing.deal`."""
    boxes = _everything(found) if world.size == 1 else _dealt(found, dealing)
    shards: list[Shard] = []
    views: list[View] = []
    holders: dict[str, Holder] = {}
    guarded: set[str] = set()
    elsewhere: set[int] = set()
    for name, whole, mine in boxes:
        holder = found.holders[name]
        own = tensors.own(holder)
        if not mine:
            elsewhere.add(id(found.stored[name].holder))  # another rank stores all of it
        dtype = found.stored[name].where.dtype
        for number, (box, at) in enumerate(mine):
            entry = tile_name(name, number)
            shards.append(Shard(entry, dtype, box.shape, whole, box.start))
            holders[entry] = window(own, box, at)
            if name in found.guarded:
                guarded.add(entry)
            views += [_placed(view, entry, number, box, whole) for view in found.views.get(name, ())]
    layout = layouts.build(shards, views)
    tracked = [
        entry.name in guarded and (entry.nbytes >= SMALL or tensors.on_device(holders[entry.name]))
        for entry in layout.entries
    ]
    parts = found.parts.values()
    elsewhere.difference_update(found.shared)  # there it is read for its other names, too
    seen = [leaf.holder for leaf in found.walk.leaves if id(leaf.holder) not in elsewhere]
    return Survey(
        layout,
        [holders[entry.name] for entry in layout.entries],
        [index for index, is_tracked in enumerate(tracked) if not is_tracked],
        tracked,
        {part.name: (part.kind, part.values() if part.still else None) for part in parts},
        [part for part in parts if not part.still],
        watch(found.walk.watched, found.walk.hooks, found.walk.kinds),
        found.base,
        Anchors(seen, holders.values(), found.walk.made, found.shared.values()),
        dealing.proof,
    )


def insist_on_shapes(found: Found, expected: Mapping[str, tuple[int, ...]]) -> None:
    """StateError where a tensor of that name has another shape, or there is none.

    An empty placeholder of a tensor whose shards lie elsewhere would be saved without a word.
    """
    if not expected:
        return
    shapes = {leaf.name: tuple(leaf.holder.shape) for leaf in found.walk.leaves}
    wrong = [
        f"{name} has shape {shapes[name]}, expected {shape}"
        if name in shapes
        else f"{name} is not there, expected {shape}"
        for name, shape in expected.items()
        if shapes.get(name) != shape
    ]
    if wrong:
        raise StateError(
            "this state is not what it is expected to be:\n  " + "\n  ".join(wrong),
            hint="gather sharded parameters before they are saved, or mend expect_shapes",
        )


def insist_on_names(walk: Walk, expected: Mapping[str, tuple[int, ...]], finite: str | Sequence[str] | None) -> None:
    """Find slips in names before anything is trained. What a module will have is known; of optimizers and the like,
    which may come to have more, the name of the part is all that can be wrong yet.

    Raises:
        StateError: there is no tensor of a name in `expected`.
        ValueError: a pattern of `finite` fits nothing, where there are no other ranks that it may be meant for.
    """
    known = {leaf.name for leaf in walk.leaves} | walk.meta.keys()
    growing = [part.name for part in walk.parts.values() if part.kind != "module"]
    lost = [name for name in expected if name not in known and not name.startswith(tuple(map(_below, growing)))]
    if lost:
        raise StateError(
            f"expect_shapes: there is no {', '.join(lost)}; {names.roots(known)}",
            hint="names are those that `zerostall show` lists",
        )
    if finite is not None and walk.choice.alone:
        matching.insist_on_use(matching.select(finite, option="require_finite"), known, "require_finite", growing)


def _below(name: str) -> str:
    return name + "."


_Boxes = list[tuple[str, tuple[int, ...], "tuple[tuple[Box, Box], ...]"]]


def _everything(found: Found) -> _Boxes:
    boxes: _Boxes = []
    for name, holder in found.holders.items():
        whole = Box.whole(tuple(holder.shape))
        if tuple(tensors.own(holder).shape) != whole.shape:
            raise StateError(
                f"{name} is distributed over more ranks than this process",
                hint="give Checkpointer the process_group of all ranks that hold it",
            )
        boxes.append((name, whole.shape, ((whole, whole),)))
    return boxes


def _dealt(found: Found, dealing: Dealing) -> _Boxes:
    rows: list[tuple[Row, Sharding]] = []
    boxes: _Boxes = []
    for name, holder in found.holders.items():
        leaf = found.stored[name]
        shape = tuple(holder.shape)
        if is_own(name):
            whole = Box.whole(shape)
            boxes.append((name, shape, ((whole, whole),)))
            continue
        undivided = name != leaf.name or any(
            view.dtype != leaf.where.dtype or view.shape != shape or view.strides != contiguous_strides(shape)
            for view in found.views.get(name, ())
        )
        cut = sharding(name, holder)
        rows.append((Row(name, leaf.where.dtype, shape, 0, undivided, leaf.leads, cut.ahead), cut))
    offered = {row.name for row, _ in rows}
    aliases = [(view.name, base) for base, views in found.views.items() if base in offered for view in views]
    dealt = dealing.deal(rows, aliases, found.holders, found.guarded)
    return boxes + [(part.row.name, part.row.shape, part.boxes) for part in dealt.parts]


def _placed(view: View, base: str, number: int, box: Box, whole: tuple[int, ...]) -> View:
    """A view of a tensor as one of the box that is stored here: a part of a tensor has only whole twins."""
    if box.shape == whole:
        return msgspec.structs.replace(view, base=base)
    return View(tile_name(view.name, number), base, view.dtype, box.shape, contiguous_strides(box.shape), 0)


def _refuse_twins(leaves: list[Leaf]) -> None:
    seen: set[str] = set()
    twice = [leaf.name for leaf in leaves if leaf.name in seen or seen.add(leaf.name)]
    if twice:
        raise StateError(f"two tensors would have the same name: {', '.join(twice[:20])}")
