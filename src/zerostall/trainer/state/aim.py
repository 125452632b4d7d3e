"""What a restore will do, decided before a byte is written: which stored tensor goes where, and what does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zerostall.core import names
from zerostall.trainer.state import refs, tensors
from zerostall.trainer.state.refs import Composite
from zerostall.trainer.state.writes import view_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerostall.core.matching import Selection
    from zerostall.trainer.state.refs import Ref
    from zerostall.trainer.state.stored import StoredPart, StoredState
    from zerostall.trainer.state.tensors import Holder
    from zerostall.trainer.state.walk import Part, Walk


class Aim:
    """Collects from all parts what they want; parts whose state the snapshot decides claim what they take.

    Attributes:
        wanted: name -> the target's tensor, to be filled from the stored tensor of that name.
        direct: (stored name, target), already agreed.
        claimed: stored names that some part answers for, taken or left.
        values: name of a value, parameter or part that is wanted -> whether it is stored.
        different: name -> what differs, in words.
        warnings: what is told and does not stop a restore.
        replaced: name -> the array that takes a read-only one's place.
        places: of each tensor that the walk has found, by its id, where it is.
        lenient: what fits is restored and what does not is told.
    """

    def __init__(
        self, stored: StoredState, walk: Walk, selection: Selection, *, prefixes: bool, lenient: bool = False
    ) -> None:
        self.stored = stored
        self.selection = selection
        self.prefixes = prefixes
        self.lenient = lenient
        self.wanted: dict[str, Holder] = {}
        self.direct: list[tuple[str, Holder]] = []
        self.claimed: set[str] = set()
        self.values: dict[str, bool] = {}
        self.unexpected: list[str] = []
        self.different: dict[str, str] = {}
        self.warnings: list[str] = []
        self.replaced: dict[str, Holder] = {}
        self._leaves = walk.leaves  # their ids stay theirs for as long as they live
        self.places = {id(leaf.holder): leaf.where for leaf in walk.leaves}
        self._live = {leaf.name: leaf.holder for leaf in reversed(walk.leaves)}
        self._used: set[str] = set()
        self._made: dict[str, torch.Tensor] = {}

    def takes_part(self, name: str) -> bool:
        """Return whether a whole part is asked for."""
        return self.selection.takes_part(name)

    def want(self, name: str) -> None:
        """Ask for the stored tensor of that name, to be written into the target's own."""
        holder = self._live[name]
        if not isinstance(holder, torch.Tensor) and not holder.flags.writeable:
            holder = holder.copy()
            self.replaced[name] = holder
        self.wanted[name] = holder

    def want_value(self, name: str, *, stored: bool) -> None:
        """Ask for what is no tensor; the part itself will put it back."""
        self.values[name] = stored

    def differs(self, name: str, how: str) -> None:
        """Note what cannot be restored into the target as it is, if it is asked for at all."""
        if self.takes_part(name):
            self.different[name] = how

    def part(self, part: Part) -> StoredPart | None:
        """Find what was stored of a part: of the same kind, under its name or what that is renamed to."""
        stored = self.stored.parts.get(self.selection.stored_name(part.name))
        if stored is None and self.prefixes:
            stored = self.stored.parts.get(names.strip_wrappers(part.name))
        if stored is None:
            return None
        self._used.add(stored.name)
        return stored if stored.kind == part.kind else None

    def whole(self, part: Part) -> StoredPart | None:
        """Find what was stored of a part that is restored as a whole; note where it is missing or another kind."""
        stored = self.part(part)
        other = self.stored.parts.get(self.selection.stored_name(part.name))
        if stored is None and other is not None:
            self.differs(part.name, f"stored as {other.kind}, the target is {part.kind}")
        self.want_value(part.name, stored=other is not None)
        self.want_value(part.name + ".", stored=True)
        return stored

    def tensor(self, name: str, holder: Holder | None, device: torch.device | None = None) -> None:
        """Take the stored tensor of that name into `holder` if it fits, else into a new one."""
        self.claimed.add(name)
        kept = self.stored[name]
        if holder is None or tensors.dtype_name(holder) != kept.dtype or tuple(holder.shape) != kept.shape:
            holder = self._make(name, device)
        self.direct.append((name, holder))

    def _make(self, name: str, device: torch.device | None) -> torch.Tensor:
        """Return a new tensor for a stored one; aliases of one entry share memory, as they did."""
        made = self._made.get(name)
        if made is None:
            view = self.stored.views.get(name)
            if view is not None and view.base in self._made:
                made = view_of(self._made[view.base], view)
            else:
                dtype = tensors.torch_dtype(self.stored.dtype(name))
                made = torch.empty(self.stored.shape(name), dtype=dtype, device=device)
            self._made[name] = made
        return made

    def tree(self, stored: StoredPart, tree: object, name: str | None = None) -> None:
        """Take every tensor of a stored tree; those that the part `name` has at the same place are filled."""
        for found in sorted(refs.names_in(tree), key=self.stored.views.__contains__):
            live = None if name is None else self._live.get(name + found[len(stored.name) :])
            self.tensor(found, live)

    def leave(self, stored: StoredPart) -> None:
        """Claim all of a part, so that what is not taken of it is not called unexpected."""
        self.claimed.update(refs.names_in(stored.tree))

    def composites(self, part: Part, live: Mapping[str, Ref]) -> None:
        """Refuse tensor subclasses whose metadata is not what was stored: it cannot be changed in place."""
        stored = self.part(part)
        tree = stored.tree if stored is not None else None
        known = tree.get("composites", {}) if isinstance(tree, dict) else {}
        for name, ref in live.items():
            other = known.get(self.selection.stored_name(name))
            if isinstance(other, Composite) and not same(ref, other):
                self.differs(name, f"stored as {other.kind} with other metadata than the target's")

    def unused_parts(self) -> list[str]:
        """Names of stored parts that nothing asked for and that no tensor's name would tell of."""
        return [
            part.name
            for part in self.stored.parts.values()
            if part.name not in self._used
            and part.kind not in ("module", "container")
            and next(refs.names_in(part.tree), None) is None
        ]


def same(one: object, other: object) -> bool:
    """Return whether two tensor subclasses agree in what is not bytes."""
    return (
        isinstance(one, Composite)
        and isinstance(other, Composite)
        and one.inner.keys() == other.inner.keys()
        and bool(one.context == other.context)
    )


class Landing:
    """What landed, for the parts to put into place."""

    def __init__(self, aim: Aim, received: Mapping[str, Holder]) -> None:
        self.aim = aim
        self.selection = aim.selection
        self.warnings = aim.warnings
        self._received = received
        self.resolver = refs.Resolver(self.holder)

    def has(self, name: str) -> bool:
        """Return whether a stored tensor has landed."""
        return name in self._received

    def holder(self, name: str) -> Holder:
        """Return what the stored tensor of that name landed in."""
        return self._received[name]

    def resolve(self, tree: object, outer: Mapping[str, object] | None = None) -> object:
        """Return a stored tree with what landed in place of its refs.

        `outer`: name of the first tensor within a tensor subclass -> the subclass's tensor that was filled in place.
        """
        return refs.resolve(tree, refs.Resolver(self.holder, outer=outer) if outer else self.resolver)
