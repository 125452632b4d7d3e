"""Putting a stored state back: everything is checked first, then bytes land, then the small values follow."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from zerostall.core import matching
from zerostall.errors import MismatchError
from zerostall.trainer.state import gathering, pages, tensors, writes
from zerostall.trainer.state.aim import Aim, Landing
from zerostall.trainer.state.choice import identity
from zerostall.trainer.state.parts.module import ModulePart
from zerostall.trainer.state.parts.rng import restore_generators
from zerostall.trainer.state.spread import Loose, alone
from zerostall.trainer.state.stored import StoredState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zerostall.core.layout import View
    from zerostall.core.matching import Match
    from zerostall.tiers.contract import Stored
    from zerostall.trainer.state.asked import Asked
    from zerostall.trainer.state.assigning import Assignment
    from zerostall.trainer.state.gathering import Gathering
    from zerostall.trainer.state.stored_step import StoredStep
    from zerostall.trainer.state.tensors import Holder
    from zerostall.trainer.state.walk import Part, Walk
    from zerostall.trainer.state.writes import Writes

_log = logging.getLogger(__name__)
_VALUE = ("value", ())
# Optimizers first: a scheduler's state counts on the options of the groups.
_ORDER = {"module": 0, "module state": 1, "container": 2, "optimizer": 3}


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        tensors: how many were filled.
        nbytes: bytes of these.
        missing: asked for and not stored; only with strict=False or "stored".
        unexpected: stored and not asked for; only with strict=False.
        warnings: what the user should know.
    """

    tensors: int
    nbytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.tensors} tensors, {self.nbytes} bytes"
        if self.missing or self.unexpected:
            text += f", {len(self.missing)} missing, {len(self.unexpected)} unexpected"
        return text


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the bytes of a stored state go. All checks are done.

    Attributes:
        entries: indexes in the stored layout's entries whose bytes are needed.
        tensors: parallel to entries: what these are written into; no two overlap.
        views: aliases, stored once, that are apart here (or overlap another): `accept` copies them from the image.
    """

    entries: list[int]
    tensors: list[Holder]
    views: list[tuple[View, Holder]]
    stored: StoredState
    writes: Writes
    rest: Rest

    @property
    def reads_image(self) -> bool:
        """Whether `accept` looks into the image, beyond what lands in `tensors`."""
        return bool(self.views or self.writes.shared)

    def loose(self, chunk_bytes: int) -> Loose:
        """What `accept` would look for in the image, to be filled as its chunks come; then `settle` is called."""
        found = Loose(chunk_bytes)
        single = alone(self.written()) if self.reads_image else frozenset()
        for view, holder in self.views:
            found.add(self._offset(view), view, holder, alone=tensors.geometry(holder).storage in single)
        for view, holder in self.writes.shared:
            found.add(self._offset(view), view, holder, alone=False, compared=view.name)
        return found

    def _offset(self, view: View) -> int:
        return self.stored.layout.entries[self.stored.entries[view.base]].offset

    def written(self) -> list[Holder]:
        """Everything whose bytes will be written, once where several names are one tensor."""
        return [*self.tensors, *(holder for _, holder in [*self.views, *self.writes.shared])]


@dataclass(frozen=True, slots=True)
class Landings:
    """Where the bytes of a step of several ranks go. All checks are done but those of the bytes.

    Attributes:
        gathering: what is read of which rank's image.
        rest: what is put back when that has been read.
    """

    gathering: Gathering
    rest: Rest

    def written(self) -> list[Holder]:
        """Everything whose bytes will be written."""
        return self.gathering.targets


@dataclass(frozen=True, slots=True)
class Rest:
    """What is put back when the bytes have landed."""

    aim: Aim
    parts: list[Part]
    received: dict[str, Holder]
    match: Match
    rng: object


def aim(
    walk: Walk,
    stored: Stored,
    asked: Asked,
    *,
    rng: bool,
) -> Targets:
    """Decide where everything goes; see `State.targets`."""
    state = StoredState.read(stored)
    met = _meet(walk, state, asked)
    planned = writes.plan(state, met.pairs, met.target.places)
    entries = sorted(planned.targets)
    rest = met.rest(planned.refused, rng=rng)
    return Targets(entries, [planned.targets[index] for index in entries], planned.copies, state, planned, rest)


def meet_step(walk: Walk, step: StoredStep, asked: Asked) -> Meeting:
    """Compare a step of several ranks with what is here; see `State.meet`."""
    met = _meet(walk, step.state, asked, step.strangers)
    met.target.warnings.extend(step.warnings)
    met.step = step
    return met


def land(met: Meeting, unexpected: Sequence[str], *, rng: bool) -> Landings:
    """Decide where everything of a step of several ranks goes; see `State.landings`."""
    assert met.step is not None
    met.match = msgspec.structs.replace(met.match, unexpected=tuple(unexpected))
    matching.raise_for(met.match)
    planned = gathering.plan(met.step, met.pairs)
    rest = met.rest(planned.refused, rng=rng)
    if left := met.let_go(keep=planned.targets):
        met.target.warnings.append("still on the meta device, for they are not stored: " + ", ".join(left))
    return Landings(planned, rest)


@dataclass(slots=True)
class Meeting:
    """What is stored and what is here, compared.

    Attributes:
        pairs: (stored name, target of its shape and type).
        match: what fits and what does not.
        whole: nothing is left out.
        step: of several ranks, that is compared.
        assignment: memory that was given to tensors that had none.
    """

    target: Aim
    parts: list[Part]
    pairs: list[tuple[str, Holder]]
    match: Match
    whole: bool
    step: StoredStep | None = None
    assignment: Assignment | None = None

    def let_go(self, keep: Iterable[Holder] = ()) -> list[str]:
        """Take memory back that was given for this, but from what is kept; names of the others."""
        assignment, self.assignment = self.assignment, None
        return assignment.take_back(keep=keep) if assignment is not None else []

    def rest(self, refused: Mapping[str, str], *, rng: bool) -> Rest:
        """What comes after the bytes. MismatchError where there is anything that does not fit."""
        refused = dict(refused) | pages.read_only(self.pairs)
        match = msgspec.structs.replace(self.match, different=self.match.different | refused)
        matching.raise_for(match)
        states = self.target.stored.rng if rng and self.whole else None
        return Rest(self.target, self.parts, dict(reversed(self.pairs)), match, states)


def _meet(walk: Walk, state: StoredState, asked: Asked, strangers: Sequence[str] = ()) -> Meeting:
    _refuse_meta(walk)
    walk.raise_problems()
    only = asked.globs
    selection = matching.select(only, asked.rename)
    target = Aim(state, walk, selection, prefixes=asked.prefixes, lenient=asked.strict is False)
    parts = sorted(walk.parts.values(), key=lambda part: _ORDER.get(part.kind, 4))
    for part in parts:
        part.aim(target)
    match = _match(state, target, asked, only)
    pairs = [(name, target.wanted[wanted]) for name, wanted in match.pairs if wanted in target.wanted]
    pairs += target.direct
    refused = {name: state.refused[name] for name in match.missing if name in state.refused}
    match = msgspec.structs.replace(
        match,
        unexpected=(*filter(walk.choice.covers, match.unexpected), *(strangers if only is None else ())),
        different=match.different | target.different | refused,
    )
    if state.base and only is None:
        _compare_base(walk, target, match)
    return Meeting(target, parts, pairs, match, only is None)


def _compare_base(walk: Walk, target: Aim, match: Match) -> None:
    """Tell the user where what was not saved is something else here."""
    modules = {name for part in walk.parts.values() if isinstance(part, ModulePart) for name in part.tensors}
    here = [
        (name, holder) for name in match.missing if name in modules and (holder := target.wanted.get(name)) is not None
    ]
    named = [(target.selection.stored_name(name), holder) for name, holder in [*walk.left_out, *here]]
    found = identity((name, holder) for name, holder in named if isinstance(holder, torch.Tensor))
    if found != target.stored.base:
        target.warnings.append(
            "the base differs: the tensors that were not saved are others here than those this was saved over"
        )


def _refuse_meta(walk: Walk) -> None:
    if walk.meta:
        names = ", ".join(list(walk.meta)[:20]) + (" ..." if len(walk.meta) > 20 else "")
        raise MismatchError(
            f"{len(walk.meta)} tensors are on the meta device and have no memory to restore into: {names}",
            different=dict.fromkeys(walk.meta, "on the meta device"),
            hint="restore(meta_to=...) gives them memory on a device, and so does module.to_empty(device=...)",
        )


def _match(stored: StoredState, target: Aim, asked: Asked, only: list[str] | None) -> Match:
    have: dict[str, matching.Facts] = {
        name: (stored.dtype(name), stored.shape(name)) for name in stored.names() if name not in target.claimed
    }
    want: dict[str, matching.Facts] = {}
    for name, holder in target.wanted.items():
        want[name] = (tensors.dtype_name(holder) or "", tuple(holder.shape))
    for name, is_stored in target.values.items():
        want[name] = _VALUE
        if is_stored:
            have[target.selection.stored_name(name)] = _VALUE
    have.update(dict.fromkeys([*target.unused_parts(), *target.unexpected], _VALUE))
    if not want and only is None:
        return matching.Match((), (), tuple(have), {}, {}, asked.strict)
    found = matching.match(have, want, only=only, rename=asked.rename, strict=asked.strict, prefixes=asked.prefixes)
    # Whatever else a pattern may say, a part is one thing: its second name is there for `only` alone.
    return msgspec.structs.replace(
        found,
        missing=tuple(name for name in found.missing if not name.endswith(".")),
        unexpected=tuple(name for name in found.unexpected if not name.endswith(".")),
    )


def accept(targets: Targets, image: memoryview) -> RestoreReport:
    """Put back all that is not written byte by byte; see `State.accept`."""
    if targets.reads_image:
        data = writes.as_bytes(image)
        for view, holder in targets.views:
            writes.copy_into(holder, writes.read_view(targets.stored, data, view))
        for name in writes.contradictions(targets.stored, targets.writes, data):
            targets.rest.aim.warnings.append(writes.contradiction(name))
    return finish(targets.rest, targets.tensors)


def settle(targets: Targets, loose: Loose) -> RestoreReport:
    """As `accept`, when all chunks of the image have come."""
    targets.rest.aim.warnings.extend(map(writes.contradiction, loose.settle()))
    return finish(targets.rest, targets.tensors)


def finish(rest: Rest, written: Sequence[Holder]) -> RestoreReport:
    """Put back what is no tensor, when all that was `written` into has its bytes."""
    warnings = rest.aim.warnings
    _count_changes(written)
    landing = Landing(rest.aim, rest.received)
    for part in rest.parts:
        part.accept(landing)
    if rest.rng is not None:
        warnings.extend(restore_generators(rest.rng))
    for warning in warnings:
        _log.warning("%s", warning)
    filled = rest.received
    return RestoreReport(
        len(filled),
        sum(tensors.own(holder).nbytes for holder in filled.values()),
        rest.match.missing,
        rest.match.unexpected,
        tuple(warnings),
    )


def _count_changes(written: Sequence[Holder]) -> None:
    """Tell autograd that tensors changed: bytes written behind its back leave no trace."""
    owns = (tensors.own(holder) for holder in written)
    changed = [holder for holder in owns if isinstance(holder, torch.Tensor) and not holder.is_inference()]
    torch.autograd.graph.increment_version(changed)
