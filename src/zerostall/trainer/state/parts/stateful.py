"""Objects that say what their state is: anything with state_dict() and load_state_dict(), and generators.

What they hold is known only to them, so what is stored decides what is restored: tensors they have at the same place
with the same shape and type are filled in place, others are made, and the whole is handed to `put`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from zerostall.core.optimizers import Fields, compare
from zerostall.trainer.state.parts.optimizer_class import (
    acting_of,
    fields_of_any,
    fixed_options,
    said,
    stored_options,
)
from zerostall.trainer.state.refs import Composite, names_in
from zerostall.trainer.state.tree import LiveTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from zerostall.trainer.state.aim import Aim, Landing
    from zerostall.trainer.state.stored import StoredPart
    from zerostall.trainer.state.walk import Part, Walk


class StatefulPart:
    """An object's state, read by `get` and written by `put`.

    `dotted`: keys of the outermost dict are names with dots, as those of a module's state_dict().
    `optimizer`: a torch optimizer that is stored this way and has torch's step hooks.
    `stepper`: an optimizer of any kind: of what class it is, is stored beside its state.
    `optimizer_like`: its tensors change in its own step only, so a guard called by the user covers them.
    """

    still = False

    def __init__(
        self,
        name: str,
        get: Callable[[], object],
        put: Callable[[object], object],
        *,
        kind: str = "stateful",
        dotted: bool = False,
        optimizer_like: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        stepper: object = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self._optimizer_like = optimizer_like
        self._optimizer = optimizer
        self._stepper = stepper
        self._get = get
        self._put = put
        self._tree = LiveTree(name, own_states=True, dotted=dotted)
        self._stored: object = None
        self._aimed = False

    def gather(self, walk: Walk) -> None:
        first = len(walk.leaves)
        self._tree.gather(walk, self._get())
        if self._optimizer is not None:
            walk.guard(self._optimizer)
        if self._optimizer_like and walk.user_guards:
            walk.guarded.update(leaf.owner for leaf in walk.leaves[first:])

    def values(self) -> object:
        return self._tree.copy(self._get())

    def signs(self) -> None:
        return None

    def aim(self, aim: Aim) -> None:
        self._aimed = False
        stored = aim.whole(self)
        if stored is None:
            return
        aim.leave(stored)
        if aim.takes_part(self.name):
            if self._stepper is not None:
                self._compare(aim, stored)
            self._aimed = True
            self._stored = stored.tree
            aim.tree(stored, stored.tree, self.name)

    def classes(self) -> dict[str, object] | None:
        """Return what is stored of its class; None for what is no optimizer."""
        return None if self._stepper is None else said(fields_of_any(self._stepper))

    def _compare(self, aim: Aim, stored: StoredPart) -> None:
        acting = acting_of(self._stepper)
        options = cast("list[Mapping[str, object]]", stored_options(stored.tree))
        fields = stored.fields
        if fields is None:  # of before this was stored, or imported
            if not options:
                return
            fields = Fields((), frozenset(key for group in options for key in group))
        fixed = fixed_options(acting) if isinstance(acting, torch.optim.Optimizer) else {}
        verdict = compare(fields, fields_of_any(acting), options, fixed)
        if not (verdict.fits or (verdict.doubtful and aim.lenient)):
            aim.differs(self.name, verdict.reason)
        elif verdict.reason:
            aim.warnings.append(f"{self.name}: {verdict.reason}")

    def accept(self, landing: Landing) -> None:
        if not self._aimed:
            return
        # Where a tensor subclass was filled in place, it is handed over itself, not the parts it is made of.
        outer = {
            next(names_in(ref)): held
            for held, ref in zip(self._tree.held, self._tree.refs, strict=True)
            if isinstance(ref, Composite)
        }
        self._put(landing.resolve(self._stored, outer))
        self._stored = None
        self._aimed = False


def classes_of(parts: Iterable[Part]) -> dict[str, object]:
    """Return what is stored of the classes of optimizers that say themselves what their state is, by part."""
    found = ((part.name, part.classes()) for part in parts if isinstance(part, StatefulPart))
    return {name: said for name, said in found if said is not None}
