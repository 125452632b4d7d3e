"""From what a walk found to the layout of an image, and who may change what while it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core.layout import Shard
from zerostall.errors import StateError
from zerostall.trainer.state import tensors
from zerostall.trainer.state.aliasing import DISTINCT, Sharing, share
from zerostall.trainer.state.choice import identity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerostall.core.layout import Layout
    from zerostall.trainer.state.tensors import Holder
    from zerostall.trainer.state.walk import Leaf, Part, Walk

SMALL = 4096
"""Tensors in host memory below this many bytes are copied within `save`: guarding them would cost more."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a full walk found.

    Attributes:
        layout: of the image.
        tensors: in the order of layout.entries; strong references.
        at_once: indexes of those that something else than an optimizer's step may change, and of the small ones.
        tracked: for each, whether it is left to be read after `save`, so that changes must be looked for.
        parts: the objects, by name.
        base: identity of the modules' tensors that are not saved, "" where all are.
        watch: tells whether the containers that hold the tensors are as they were.
    """

    layout: Layout
    tensors: list[Holder]
    at_once: list[int]
    tracked: list[bool]
    parts: dict[str, Part]
    watch: native.Watch
    base: str


def take(walk: Walk, *, user_guards: bool) -> Survey:
    """Lay out what a walk found."""
    leaves = walk.leaves
    _refuse_twins(leaves)
    sharing = share([leaf.name for leaf in leaves], [leaf.where for leaf in leaves])
    guarded = _guarded(walk, sharing, user_guards=user_guards)
    shards: list[Shard] = []
    holders: dict[str, Holder] = {}
    safe: set[str] = set()
    for index in sharing.bases:
        leaf = leaves[index]
        shards.append(Shard.whole(leaf.name, leaf.where.dtype, leaf.where.shape))
        holders[leaf.name] = leaf.holder
        if index in guarded:
            safe.add(leaf.name)
    for index in sharing.expanded:
        leaf = leaves[index]
        assert isinstance(leaf.holder, torch.Tensor)
        once = tensors.distinct(leaf.holder)
        shards.append(Shard.whole(leaf.name + DISTINCT, leaf.where.dtype, tuple(once.shape)))
        holders[leaf.name + DISTINCT] = once
    layout = layouts.build(shards, sharing.views)
    tracked = [
        entry.name in safe and (entry.nbytes >= SMALL or tensors.on_device(holders[entry.name]))
        for entry in layout.entries
    ]
    return Survey(
        layout,
        [holders[entry.name] for entry in layout.entries],
        [index for index, is_tracked in enumerate(tracked) if not is_tracked],
        tracked,
        walk.parts,
        native.Watch(walk.watched),
        identity(walk.left_out) if walk.left_out else "",
    )


def insist_on_shapes(layout: Layout, expected: Mapping[str, tuple[int, ...]]) -> None:
    """StateError where a tensor of that name has another shape, or there is none.

    An empty placeholder of a tensor whose shards lie elsewhere would be saved without a word.
    """
    found = {entry.name: tuple(entry.global_shape) for entry in layout.entries}
    found.update((view.name, tuple(view.shape)) for view in layout.views)
    wrong = [
        f"{name} has shape {found[name]}, expected {shape}"
        if name in found
        else f"{name} is not there, expected {shape}"
        for name, shape in expected.items()
        if found.get(name) != shape
    ]
    if wrong:
        raise StateError(
            "this state is not what it is expected to be:\n  " + "\n  ".join(wrong),
            hint="gather sharded parameters before they are saved, or mend expect_shapes",
        )


def _guarded(walk: Walk, sharing: Sharing, *, user_guards: bool) -> set[int]:
    """Find the leaves that only an optimizer's step changes, or only what the user guards."""
    leaves = walk.leaves
    found = {
        index for index, leaf in enumerate(leaves) if leaf.owner in walk.guarded or (user_guards and leaf.trainable)
    }
    # The same elements under a second name are as safe as under the first.
    found.update(
        base
        for index, base in sharing.base_of.items()
        if index in found and leaves[index].where.shape == leaves[base].where.shape
    )
    return found


def _refuse_twins(leaves: list[Leaf]) -> None:
    seen: set[str] = set()
    twice = [leaf.name for leaf in leaves if leaf.name in seen or seen.add(leaf.name)]
    if twice:
        raise StateError(f"two tensors would have the same name: {', '.join(twice[:20])}")
