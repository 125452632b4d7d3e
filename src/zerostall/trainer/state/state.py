"""The user's objects as named tensors and small values, and the way back.

survey = state.survey()          # a full walk, once and whenever something changed
state.fits(survey)               # at each save: are these still the very same objects?
values = state.values(survey)    # at each save: a copy of what is no tensor
targets = state.targets(stored)  # restore: everything checked, nothing written
state.accept(targets, image)     # restore: the bytes have landed, put back the rest
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

import msgspec

from zerostall import native
from zerostall.core import names, soundness
from zerostall.core import values as core_values
from zerostall.core.values import Document
from zerostall.errors import StateError
from zerostall.trainer.state import returning, stored_step, surveying
from zerostall.trainer.state.asked import EVERYTHING, Asked
from zerostall.trainer.state.assigning import Assignment
from zerostall.trainer.state.choice import Choice
from zerostall.trainer.state.dealing import Dealing
from zerostall.trainer.state.half_written import HalfWritten
from zerostall.trainer.state.parts import rng as generators_of
from zerostall.trainer.state.parts.kinds import part_of, root_part
from zerostall.trainer.state.parts.rng import Generators, GeneratorStates
from zerostall.trainer.state.parts.stateful import classes_of
from zerostall.trainer.state.rank_local import RankLocal, unmarked
from zerostall.trainer.state.returning import Landings, RestoreReport, Targets
from zerostall.trainer.state.stored_step import Owners
from zerostall.trainer.state.surveying import Survey
from zerostall.trainer.state.walk import Later, OutdatedError, Part, Walk
from zerostall.trainer.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from zerostall.tiers.contract import Stored
    from zerostall.trainer.state.returning import Meeting
    from zerostall.trainer.state.spread import Loose
    from zerostall.trainer.state.stored_step import Images
    from zerostall.trainer.state.surveying import Found

__all__ = ["Landings", "OutdatedError", "Rest", "RestoreReport", "State", "Survey", "Targets", "Values"]

_LOOKS = 8
_LARGE = "put large data into tensors or numpy arrays: their bytes are stored as they are"


def _no_part(name: str, value: object) -> str:
    """Why what was handed over under this name is no part of a state."""
    kind = f"is of type {type(value).__name__}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return (
            f'{kind}, which nothing can be put back into; hand over a dict that holds it: progress={{"{name}": {name}}}'
        )
    return f"{kind}, which cannot be restored in place: it has no state_dict() and load_state_dict()"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector still: a walk makes many objects that stay, which it would count again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Values(msgspec.Struct, frozen=True):
    """Small values at one moment. No later change of the user's reaches them; `encode` may be called in any thread."""

    still: dict[str, tuple[str, object]]
    moving: list[tuple[Part, object | Later]]
    generators: GeneratorStates | None
    base: str = ""
    _encoded: list[Document] = []

    def again(self) -> Values:
        """Return what they are at another moment at which nothing but devices' generators may have changed."""
        generators = self.generators
        if generators is None:
            return self
        now = generators.again()
        return self if now is generators else Values(self.still, self.moving, now, self.base)

    def alike(self, other: Values) -> bool:
        """Whether nothing was read anew since then but devices' generators."""
        mine, others = self.generators, other.generators
        if mine is not None and not (others is not None and mine.alike(others)):
            return False
        return len(self.moving) == len(other.moving) and all(
            now[1] is then[1] for now, then in zip(self.moving, other.moving, strict=True)
        )

    def largest(self) -> str:
        """Name of the part with the largest values."""
        trees = self._trees()
        return max(trees, key=lambda name: len(bytes(core_values.encode(trees[name]))), default="")

    def _trees(self) -> dict[str, tuple[str, object]]:
        return self.still | {
            part.name: (part.kind, tree.tree() if isinstance(tree, Later) else tree) for part, tree in self.moving
        }

    def encode(self) -> Document:
        """Return them as a document for the record: once for all saves of a state at rest, which have the same values.

        It holds the interpreter for 0.2 ms beside the forward pass of a model of 80 parameters.
        """
        if self._encoded:
            return self._encoded[0]
        rng = self.generators.tree() if self.generators is not None else None
        tree: dict[str, object] = {"parts": self._trees(), "rng": rng}
        if classes := classes_of(part for part, _ in self.moving):
            tree["classes"] = classes
        self._encoded.append(core_values.encode(tree | {"base": self.base} if self.base else tree))
        return self._encoded[0]


class Rest(msgspec.Struct):
    """What was read of a state, and what tells that the very same would be read now, and the same survey fits.

    Attributes:
        reads: how often the state's values had been read then: whoever reads them begins to look for changes anew.
        complete: whether the values are all there is, with no devices whose generators are to be asked.
    """

    survey: Survey
    still: native.Still
    values: Values
    reads: int
    complete: bool


class State:
    """What the user hands over, by name.

    `optimizers` are those there at first, whose step hooks can guard their tensors. StateError names what cannot be
    stored. Where that is only tensors without memory yet (on the meta device), `survey` and `targets` raise it.

    Args:
        roots: modules, optimizers, objects with state_dict and load_state_dict, generators, and containers of these,
            of tensors, of arrays and of plain values.
        rng: whether this process's random generators belong to it.
        user_guards: whether the user calls the guard before anything changes a parameter, so that the tensors of
            optimizers without torch's hooks, and every trainable parameter, may be read after `save`.
        choice: which of it all is saved and restored. ValueError where a pattern fits nothing.
        expected: name of a tensor -> its global shape; any other, or none of that name, is a StateError at `survey`.
        finite: patterns of names that must fit something.
        world: the ranks that hold the state together.

    Attributes:
        has_owners: whether tensors are marked with an owner's name, so that a restore must ask whose what is stored is.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        *,
        rng: bool = True,
        user_guards: bool = False,
        choice: Choice | None = None,
        expected: Mapping[str, Sequence[int]] | None = None,
        finite: str | Sequence[str] | None = None,
        world: World | None = None,
    ) -> None:
        self._roots, self._rank_local = unmarked(dict(roots))
        self.has_owners = any(isinstance(value, RankLocal) and value.owner for value in roots.values())
        self._world = World.alone() if world is None else world
        self._dealing = Dealing(self._world)
        self._surveyed = False
        self._rng = Generators() if rng else None
        self.reads = 0
        self._half = HalfWritten()
        self._before: Values | None = None  # as they were read the time before
        self._user_guards = user_guards
        self._choice = choice if choice is not None else Choice()
        self._expected = {name: tuple(shape) for name, shape in (expected or {}).items()}
        self._fresh: set[str] = set()
        self.optimizers: list[torch.optim.Optimizer] = []
        walk = self._walk(self._roots)
        if len(walk.problems) > len(walk.meta):
            walk.raise_problems()
        self._choice.insist_on_use(walk.asked)
        surveying.insist_on_names(walk, self._expected, finite)
        self.optimizers = walk.optimizers

    def _walk(self, roots: Mapping[str, object], *, fresh: frozenset[str] = frozenset()) -> Walk:
        hooked = frozenset(map(id, self.optimizers))
        walk = Walk(
            part_of,
            user_guards=self._user_guards,
            fresh=fresh,
            hooked=hooked,
            choice=self._choice,
            rank_local=self._rank_local,
        )
        for name, value in roots.items():
            if type(name) is not str or not name or name.startswith("__"):
                walk.refuse(repr(name), "is no name for a part of the state")
                continue
            walk.root = names.child("", name)
            part = root_part(walk.root, value)
            if part is None:
                walk.refuse(name, _no_part(name, value))
            else:
                walk.add(part)
        walk.finish()
        return walk

    def survey(self) -> Survey:
        """Walk everything. Linear; 100 000 tensors take about 2 s. StateError names all that cannot be stored.

        With several ranks, the first survey, and each that finds other tensors than the one before, is an exchange.
        """
        # All ranks are known to come to the first exchange only: later an error here is this rank's own affair.
        with contextlib.nullcontext() if self._surveyed else self._world.excused("save: a first look at the state"):
            found = self._look()
        survey = surveying.take(found, self._world, self._dealing)
        self._surveyed = True
        return survey

    def _look(self) -> Found:
        for look in range(_LOOKS):
            with _no_collection():
                walk = self._walk(self._roots, fresh=frozenset(self._fresh))
                walk.raise_problems()
                world = self._world
                found = surveying.look(walk, size=world.size, user_guards=self._user_guards)
                surveying.insist_on_shapes(found, self._expected)
            try:
                # Whatever the walk let pass must be encodable, and is so before the first save counts on it.
                said = self._values({}, found.parts.values(), found.base)
                if problem := soundness.values_problem(len(bytes(said.encode()))):
                    raise StateError(f"{problem}: {said.largest()} most", hint=_LARGE)
            except OutdatedError as outdated:
                if look + 1 < _LOOKS:
                    continue
                raise StateError(
                    f"{outdated}: its tensors are others at every look, in number, type or shape",
                    hint="its state_dict() must give the same tensors when nothing has happened in between",
                ) from None
            return found
        raise AssertionError("the last look returns or raises")

    def fits(self, survey: Survey) -> bool:
        """Return whether modules and optimizers hold the very objects that the survey saw. 1000 tensors in 30 us.

        Shapes and addresses are not looked at. Containers and objects with a state_dict are compared by `values`.
        """
        return survey.watch.same() and (not survey.anchors or survey.anchors.same())

    def values(self, survey: Survey) -> Values:
        """Copy the small values. OutdatedError where tensors between them are others than the survey saw."""
        return self._values(survey.still, survey.moving, survey.base)

    def rest(self, survey: Survey, values: Values) -> Rest | None:
        """What tells that these values, which were just read, and the survey still hold.

        None where nothing does, and where the values are others than those read before: then they will be so again.
        """
        before, self._before = self._before, values
        if before is None or survey.anchors or not values.alike(before):
            return None
        processors = values.generators.signs if values.generators is not None else []
        parts = [part.signs() for part, _ in values.moving]
        if processors is None:
            return None
        same: list[native.Watch | native.Block] = [survey.watch, *processors]
        untouched: list[native.Watch] = []
        for signs in parts:
            if signs is None:
                return None
            same += signs.same
            untouched += signs.untouched
        complete = values.generators is None or not generators_of.CUDA
        return Rest(survey, native.Still(same, untouched), values, self.reads, complete)

    def _values(self, still: dict[str, tuple[str, object]], moving: Iterable[Part], base: str) -> Values:
        self.reads += 1
        moved: list[tuple[Part, object]] = []
        try:
            for part in moving:
                moved.append((part, part.values()))
        except OutdatedError as outdated:
            self._fresh.update(outdated.fresh)
            raise
        return Values(still, moved, self._rng.read() if self._rng is not None else None, base)

    def observe(self, survey: Survey | None) -> tuple[Survey, Values]:
        """Return a survey that fits, the given one if it does, and the values of now."""
        if survey is not None and self.fits(survey):
            try:
                return survey, self.values(survey)
            except OutdatedError:
                pass
        survey = self.survey()
        return survey, self.values(survey)

    @_no_collection()
    def targets(self, stored: Stored, asked: Asked = EVERYTHING) -> Targets:
        """Decide where every stored tensor goes. Nothing is written; tensors that do not exist yet are made.

        Raises:
            MismatchError: what is stored and what is here differ; names all that does.
            StateError: something here cannot be restored at all.
            ValueError: `only` or `rename` fits nothing.
        """
        walk = self._walk(self._roots)
        if asked.meta_to is None or not walk.meta:
            return self._aimed(walk, stored, asked)
        assignment = Assignment(asked.meta_to)
        assignment.give(walk.meta)
        try:
            targets = self._aimed(self._walk(self._roots), stored, asked)
        except BaseException:
            assignment.take_back()
            raise
        if left := assignment.take_back(keep=targets.written()):
            targets.rest.aim.warnings.append("still on the meta device, for they are not stored: " + ", ".join(left))
        return targets

    def _aimed(self, walk: Walk, stored: Stored, asked: Asked) -> Targets:
        with self._half.comparing():
            found = returning.aim(walk, stored, asked, rng=self._rng is not None)
            self._half.refuse(found.rest)
        return found

    def meet(self, images: Images, asked: Asked = EVERYTHING) -> Meeting:
        """Compare a step that several ranks stored with what is here.

        What is not expected here may be so on another rank: so nothing of what does not fit is raised yet. `let_go` of
        what comes of it.
        """
        walk = self._walk(self._roots)
        assignment: Assignment | None = None
        if asked.meta_to is not None and walk.meta:
            assignment = Assignment(asked.meta_to)
            assignment.give(walk.meta)
        try:
            if assignment is not None:
                walk = self._walk(self._roots)
            step = stored_step.read(images, self._world.rank, self._world.size, Owners.among(walk))
            met = returning.meet_step(walk, step, asked)
        except BaseException:
            if assignment is not None:
                assignment.take_back()
            raise
        met.assignment = assignment
        return met

    def landings(self, met: Meeting, unexpected: Sequence[str]) -> Landings:
        """Decide what of the step goes where here. Nothing is written; tensors that do not exist yet are made.

        Args:
            unexpected: what is stored and expected on no rank.

        Raises:
            MismatchError: as `targets`.
            CorruptError: a part of a tensor that is wanted is stored nowhere.
        """
        with self._half.comparing():
            found = returning.land(met, unexpected, rng=self._rng is not None)
            self._half.refuse(found.rest)
        return found

    def begin(self) -> None:
        """A restore begins: what became of the one before it the user has been told."""
        self._half = HalfWritten()

    def about_to_write(self, to: Targets | Landings) -> None:
        """Bytes go there from now on. Where that fails, another step must fill all of it."""
        self._half.add(to.written(), to.rest.aim.places)

    def finish(self, landings: Landings) -> RestoreReport:
        """Put back all that is not written byte by byte; every byte has landed."""
        landings.rest.aim.warnings.extend(landings.gathering.settle())
        return returning.finish(landings.rest, landings.gathering.targets)

    def accept(self, targets: Targets, image: memoryview) -> RestoreReport:
        """Put back all that is not written byte by byte. `image`: the whole image, verified, if it is read."""
        return returning.accept(targets, image)

    def settle(self, targets: Targets, loose: Loose) -> RestoreReport:
        """As `accept`, of an image that came chunk by chunk; `loose` is what `targets` gave for it."""
        return returning.settle(targets, loose)
