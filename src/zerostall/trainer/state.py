"""The user's objects as named tensors and small values, and the way back.

survey = state.survey()          # a full walk, once and whenever something changed
state.fits(survey)               # at each save: are these still the very same objects?
values = state.values(survey)    # at each save: a copy of what is no tensor
targets = state.targets(stored)  # restore: everything checked, nothing written
state.accept(targets, image)     # restore: the bytes have landed, put back the rest
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core import values as core_values
from zerostall.core.layout import Shard
from zerostall.errors import StateError
from zerostall.trainer import returning, tensors
from zerostall.trainer.aliasing import DISTINCT, share
from zerostall.trainer.parts.kinds import part_of, root_part
from zerostall.trainer.parts.rng import GeneratorStates
from zerostall.trainer.returning import RestoreReport, Targets
from zerostall.trainer.walk import OutdatedError, Part, Walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zerostall.core.layout import Layout
    from zerostall.core.values import Document
    from zerostall.tiers.contract import Stored
    from zerostall.trainer.tensors import Holder
    from zerostall.trainer.walk import Leaf

__all__ = ["OutdatedError", "RestoreReport", "State", "Survey", "Targets", "Values"]

_LOOKS = 8
SMALL = 4096
"""Tensors below this many bytes are copied within `save`: guarding them would cost more."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a full walk found.

    Attributes:
        layout: of the image.
        tensors: in the order of layout.entries; strong references.
        at_once: indexes of those that something else than an optimizer's step may change, and of the small ones.
        tracked: for each, whether it is left to be read after `save`, so that changes must be looked for.
        parts: the objects, by name.
        watch: tells whether the containers that hold the tensors are as they were.
    """

    layout: Layout
    tensors: list[Holder]
    at_once: list[int]
    tracked: list[bool]
    parts: dict[str, Part]
    watch: native.Watch


@dataclass(frozen=True, slots=True)
class Values:
    """Small values at one moment. No later change of the user's reaches them; `encode` may be called in any thread."""

    parts: dict[str, tuple[str, object]]
    generators: GeneratorStates | None

    def encode(self) -> Document:
        """Return them as a document for the record."""
        rng = self.generators.tree() if self.generators is not None else None
        return core_values.encode({"parts": self.parts, "rng": rng})


class State:
    """What the user hands over, by name.

    `optimizers` are those whose step hooks guard their tensors.

    Args:
        roots: modules, optimizers, objects with state_dict and load_state_dict, generators, and containers of these,
            of tensors, of arrays and of plain values.
        rng: whether this process's random generators belong to it.
        user_guards: whether the user calls the guard before anything changes a parameter, so that the tensors of
            optimizers without torch's hooks, and every trainable parameter, may be read after `save`.
    """

    def __init__(self, roots: Mapping[str, object], *, rng: bool = True, user_guards: bool = False) -> None:
        self._roots = dict(roots)
        self._rng = rng
        self._user_guards = user_guards
        self._fresh: set[str] = set()
        self.optimizers: list[torch.optim.Optimizer] = self._walk(self._roots).optimizers

    def _walk(self, roots: Mapping[str, object], *, fresh: frozenset[str] = frozenset()) -> Walk:
        walk = Walk(part_of, user_guards=self._user_guards, fresh=fresh)
        for name, value in roots.items():
            if type(name) is not str or not name or name.startswith("__"):
                walk.refuse(repr(name), "is no name for a part of the state")
                continue
            part = root_part(name, value)
            if part is None:
                walk.refuse(name, f"is a {type(value).__name__}, which cannot be restored in place")
            else:
                walk.add(part)
        walk.finish()
        return walk

    def survey(self) -> Survey:
        """Walk everything. Linear; 100 000 tensors take about 2 s. StateError names all that cannot be stored."""
        for look in range(_LOOKS):
            walk = self._walk(self._roots, fresh=frozenset(self._fresh))
            walk.raise_problems()
            survey = _survey(walk, user_guards=self._user_guards)
            try:
                # Whatever the walk let pass must be encodable, and is so before the first save counts on it.
                self.values(survey).encode()
            except OutdatedError as outdated:
                if look + 1 < _LOOKS:
                    continue
                raise StateError(
                    f"{outdated}: its tensors are others at every look, in number, type or shape",
                    hint="its state_dict() must give the same tensors when nothing has happened in between",
                ) from None
            return survey
        raise AssertionError("the last look returns or raises")

    def fits(self, survey: Survey) -> bool:
        """Return whether modules and optimizers hold the very objects that the survey saw. 1000 tensors in 30 us.

        Shapes and addresses are not looked at. Containers and objects with a state_dict are compared by `values`.
        """
        return survey.watch.same()

    def values(self, survey: Survey) -> Values:
        """Copy the small values. OutdatedError where tensors between them are others than the survey saw."""
        try:
            parts = {name: (part.kind, part.values()) for name, part in survey.parts.items()}
        except OutdatedError as outdated:
            self._fresh.update(outdated.fresh)
            raise
        return Values(parts, GeneratorStates.read() if self._rng else None)

    def observe(self, survey: Survey | None) -> tuple[Survey, Values]:
        """Return a survey that fits, the given one if it does, and the values of now."""
        if survey is not None and self.fits(survey):
            try:
                return survey, self.values(survey)
            except OutdatedError:
                pass
        survey = self.survey()
        return survey, self.values(survey)

    def targets(
        self,
        stored: Stored,
        *,
        only: str | Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
        prefixes: bool = False,
    ) -> Targets:
        """Decide where every stored tensor goes. Nothing is written; tensors that do not exist yet are made.

        Raises:
            MismatchError: what is stored and what is here differ; names all that does.
            StateError: something here cannot be restored at all.
            ValueError: `only` or `rename` fits nothing.
        """
        walk = self._walk(self._roots)
        return returning.aim(walk, stored, only=only, rename=rename, strict=strict, prefixes=prefixes, rng=self._rng)

    def accept(self, targets: Targets, image: memoryview) -> RestoreReport:
        """Put back all that is not written byte by byte. `image`: the whole image, verified."""
        return returning.accept(targets, image)


def _survey(walk: Walk, *, user_guards: bool) -> Survey:
    leaves = _unique(walk)
    sharing = share([leaf.name for leaf in leaves], [tensors.geometry(leaf.holder) for leaf in leaves])
    holders: dict[str, Holder] = {}
    guarded: set[str] = set()
    guards = walk.guarded
    owners: dict[int, bool] = {}
    for index, base in sharing.base_of.items():
        # The same elements under a second name are as safe as under the first.
        if leaves[index].owner in guards and leaves[index].holder.shape == leaves[base].holder.shape:
            owners[base] = True
    shards: list[Shard] = []
    for index in [*sharing.bases, *sharing.expanded]:
        leaf = leaves[index]
        holder, name = leaf.holder, leaf.name
        if index in sharing.expanded_set:
            assert isinstance(holder, torch.Tensor)
            holder, name = tensors.distinct(holder), name + DISTINCT
        dtype = tensors.dtype_name(holder)
        assert dtype is not None
        shards.append(Shard.whole(name, dtype, tuple(holder.shape)))
        holders[name] = holder
        if leaf.owner in guards or index in owners or (user_guards and leaf.trainable):
            guarded.add(name)
    layout = layouts.build(shards, sharing.views)
    tracked = [entry.name in guarded and entry.nbytes >= SMALL for entry in layout.entries]
    return Survey(
        layout,
        [holders[entry.name] for entry in layout.entries],
        [index for index, is_tracked in enumerate(tracked) if not is_tracked],
        tracked,
        walk.parts,
        native.Watch(walk.watched),
    )


def _unique(walk: Walk) -> list[Leaf]:
    """Return the leaves; StateError where two have one name."""
    seen: set[str] = set()
    twice = [leaf.name for leaf in walk.leaves if leaf.name in seen or seen.add(leaf.name)]
    if twice:
        raise StateError(f"two tensors would have the same name: {', '.join(twice[:20])}")
    return walk.leaves
