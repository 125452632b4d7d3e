"""One walk over the user's state: what it finds, and where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast

import msgspec
import torch

from zerostall.core import names
from zerostall.core.values import TensorRef
from zerostall.errors import StateError
from zerostall.trainer.state import tensors
from zerostall.trainer.state.choice import Choice
from zerostall.trainer.state.flat import FlatShard, members_of
from zerostall.trainer.state.refs import ArrayRef, Composite
from zerostall.trainer.state.sharded import holders_of
from zerostall.trainer.state.tensors import Geometry, Holder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zerostall import native
    from zerostall.trainer.state.aim import Aim, Landing
    from zerostall.trainer.state.refs import Ref

_LISTED = 20

Watched: TypeAlias = dict[object, object] | list[object] | set[str] | tuple[object, str]
"""What a `native.Watch` looks at; a tuple is an attribute, its owner and its name."""


class OutdatedError(Exception):
    """The user's objects are not those that the survey saw: survey again. Never leaves this package.

    `fresh`: names of tensors that are new objects, like the old ones but for that.
    """

    def __init__(self, name: str, fresh: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.fresh = fresh


class Later(ABC):
    """Small values that were copied, and are put in order by whoever wants to see them, in any thread."""

    __slots__ = ()

    @abstractmethod
    def tree(self) -> object: ...


class Signs(NamedTuple):
    """What tells that something would be read again as it was read last.

    Attributes:
        same: what must hold the same.
        untouched: what must not even have been written to.
    """

    same: list[native.Watch | native.Block]
    untouched: list[native.Watch]


class Part(Protocol):
    """One object of the user's state.

    | verb | when | what it does |
    |---|---|---|
    | gather | survey, before a restore | tells the walk its tensors; remembers where they were |
    | still | survey | whether `values` gives the same for as long as the survey fits |
    | values | each save | returns a copy of its small values; OutdatedError where the tensors are others now |
    | signs | after values | what tells that it would give the very same again; None where nothing does |
    | aim | restore, nothing written yet | says which stored tensors go where, and what does not fit |
    | accept | restore, the bytes have landed | puts the small values back |
    """

    name: str

    @property
    def kind(self) -> str: ...
    @property
    def still(self) -> bool: ...

    def gather(self, walk: Walk) -> None: ...
    def values(self) -> object | Later: ...
    def signs(self) -> Signs | None: ...
    def aim(self, aim: Aim) -> None: ...
    def accept(self, landing: Landing) -> None: ...


class Leaf(msgspec.Struct, frozen=True):
    """A tensor or array found.

    Attributes:
        holder: as the user sees it; of a distributed tensor the whole of it, of which a part is here.
        where: in which memory its elements are, and how.
        owner: id of the tensor the user sees: of the outer one where this lies within a tensor subclass.
        trainable: whether a gradient is asked for.
        whose: None where all ranks have the same under its name; "" where it is this rank's own, whatever others have;
            or the owner's name, where the ranks that name the same one hold it together.
        leads: where several ranks have it, the first one's counts.
    """

    name: str
    holder: Holder
    where: Geometry
    owner: int
    trainable: bool
    whose: str | None = None
    leads: bool = False


class Made(NamedTuple):
    """A tensor that is made of others, and what it said it is made of."""

    whole: torch.Tensor
    inner: dict[str, Holder]
    context: object

    def same(self) -> bool:
        """Whether it says so still, of the very same tensors."""
        attributes, context = self.whole.__tensor_flatten__()  # type: ignore[attr-defined]
        return (
            len(attributes) == len(self.inner)
            and all(getattr(self.whole, one) is self.inner.get(one) for one in attributes)
            and context == self.context
        )


@dataclass(slots=True)
class Walk:
    """What one walk has found so far.

    Attributes:
        part_of: finds the kind of an object: (name, object) -> its part, or None.
        watched: containers whose items must stay the very same objects for the survey to fit, and
        hooks: those of what changes what modules say of themselves.
        kinds: classes of the modules that are asked for their tensors.
        optimizers: those whose step hooks guard their tensors.
        guarded: ids of the tensors that only an optimizer's step changes.
        labels: id of a parameter -> its names, each as (the root module's name, what stands behind it).
        hooked: ids of the optimizers whose steps call the guard.
        fresh: names of tensors that are other objects at every look, so that what is read of them is kept aside.
        choice: what of it all is saved.
        root: the root that is being looked at.
        asked: names that the choice was asked about.
        left_out: tensors of modules that are not saved.
        meta: those tensors that have no data, by name; a part of problems.
        rank_local: tells by a tensor's name whose it is, as `Leaf.whose`.
        owned: id of each tensor that is somebody's -> whose.
        owned_below: name below which an optimizer keeps what it has of such a tensor -> whose.
        leading: what is found now is the first rank's (the buffers that DistributedDataParallel hands out).
        inheriting: whose that tensor is to which what is found now belongs.
        made: tensors that are made of others, which they may exchange.
        flats: id of what an optimizer holds of FSDP1 -> the parameters that are in it.
    """

    part_of: Callable[[str, object], Part | None]
    user_guards: bool = False
    fresh: frozenset[str] = frozenset()
    hooked: frozenset[int] = frozenset()
    leaves: list[Leaf] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    watched: list[Watched] = field(default_factory=list)
    hooks: list[Watched] = field(default_factory=list)
    kinds: set[type] = field(default_factory=set)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    guarded: set[int] = field(default_factory=set)
    labels: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    meta: dict[str, torch.Tensor] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)
    root: str = ""
    asked: list[str] = field(default_factory=list)
    left_out: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    rank_local: Callable[[str], str | None] = lambda name: None
    owned: dict[int, str] = field(default_factory=dict)
    owned_below: dict[str, str] = field(default_factory=dict)
    leading: bool = False
    inheriting: str | None = None
    flats: dict[int, list[FlatShard]] = field(default_factory=dict)
    made: list[Made] = field(default_factory=list)
    _late: list[Part] = field(default_factory=list)

    def refuse(self, name: str, why: str) -> None:
        """Note that the object of that name cannot be stored, and go on: all of them are named at once."""
        self.problems.append((name, why))

    def visit(self, name: str, value: object) -> bool:
        """Take in an object that is a part of its own; False where it is none."""
        part = self.part_of(name, value)
        if part is None:
            return False
        self.add(part)
        return True

    def add(self, part: Part) -> None:
        """Take in a part. Optimizers wait until every module has told its parameters' names."""
        if part.kind != "module" and not self.takes(part.name):
            return
        self.parts[part.name] = part
        if part.kind == "optimizer":
            self._late.append(part)
        else:
            part.gather(self)

    def takes(self, name: str) -> bool:
        """Return whether what has this name is saved."""
        if not self.choice.by_name:
            return True
        self.asked += (name, name + ".")
        return self.choice.takes(self.root, name)

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that only this optimizer's step changes its parameters and the tensors of its state."""
        self.optimizers.append(optimizer)
        if id(optimizer) not in self.hooked and not self.user_guards:
            return  # one that came later: nothing is called before its steps
        for group in optimizer.param_groups:
            self.guarded.update(map(id, self.members(group["params"])))
        for state in optimizer.state.values():
            if isinstance(state, dict):
                self.guarded.update(id(value) for value in state.values() if isinstance(value, torch.Tensor))

    def members(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What an optimizer holds, with the parameters in the place of flat ones."""
        return members_of(self.flats, params)

    def finish(self) -> None:
        """Gather what waited for all the others."""
        for part in self._late:
            part.gather(self)
        self._late.clear()

    def tensor(self, name: str, holder: Holder) -> Ref | None:
        """Take in a tensor or array; return what stands for it among the values, None where it cannot be stored."""
        return self._tensor(name, holder, id(holder), isinstance(holder, torch.Tensor) and holder.requires_grad)

    def ordinary(self, name: str, holder: Holder) -> bool:
        """Take in an ordinary tensor that nothing among the values stands for; False where it is another: see `tensor`.

        Nearly all are such, and there are many.
        """
        where = tensors.ordinary(holder)
        if where is not None:
            owner = id(holder)
            whose = self._whose(name, holder, owner)
            trainable = cast("torch.Tensor", holder).requires_grad
            self.leaves.append(Leaf(name, holder, where, owner, trainable, whose, self.leading))
        return where is not None

    def _whose(self, name: str, holder: Holder, owner: int) -> str | None:
        whose = self.rank_local(name) if self.inheriting is None else self.inheriting
        if whose is not None:
            whose = self.owned[owner] = whose or holders_of(holder)
        return whose

    def _tensor(self, name: str, holder: Holder, owner: int, trainable: bool) -> Ref | None:
        why = tensors.problem(holder)
        if why is not None:
            self.refuse(name, why)
            if isinstance(holder, torch.Tensor) and holder.is_meta:
                self.meta[name] = holder
            return None
        if tensors.is_plain(holder):
            whose = self._whose(name, holder, owner)
            where = tensors.geometry(holder)
            self.leaves.append(Leaf(name, holder, where, owner, trainable, whose, self.leading))
            return TensorRef(name) if isinstance(holder, torch.Tensor) else ArrayRef(name)
        assert isinstance(holder, torch.Tensor)
        attributes, context = holder.__tensor_flatten__()  # type: ignore[attr-defined]
        inner: dict[str, object] = {}
        parts: dict[str, Holder] = {attribute: getattr(holder, attribute) for attribute in attributes}
        self.made.append(Made(holder, parts, dict(context) if type(context) is dict else context))
        for attribute, part in parts.items():
            ref = self._tensor(names.child(name, attribute), part, owner, trainable)
            if ref is None:
                return None
            inner[attribute] = ref
        kind = type(holder)
        return Composite(f"{kind.__module__}.{kind.__qualname__}", inner, context)

    def raise_problems(self) -> None:
        """StateError with every path that cannot be stored, if there is one."""
        if not self.problems:
            return
        lines = [f"{name} {why}" for name, why in self.problems[:_LISTED]]
        if len(self.problems) > _LISTED:
            lines.append(f"and {len(self.problems) - _LISTED} more")
        raise StateError(
            "this state cannot be saved so that it can be restored:\n  " + "\n  ".join(lines),
            hint="leave these out, or put what matters of them into tensors, numbers, strings and containers of those",
        )
