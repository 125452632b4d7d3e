"""Whether the stored state of an optimizer is one that another optimizer can go on with: a pure decision.

What an optimizer's step reads are the options of its groups and the keys of its state. So these decide. The names of
classes tell what fields cannot: a class may be moved or derived from another, and two may have the same fields and mean
something else by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how a step is computed, and not what."""

# Options that torch has added to classes that were there already: a step from before has none of them.
_ADDED = HOW | {"maximize", "decoupled_weight_decay"}
# Options that torch's schedulers add to the groups.
_SCHEDULERS = frozenset({"initial_lr", "base_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})


class Fields(msgspec.Struct, frozen=True):
    """What tells one kind of optimizer from another.

    Attributes:
        lineage: public names of its class and of those it is derived from, nearest first; empty where a step does not
            say, for it is older than this record of it, or was imported.
        own: options that its class gives every group; of a step that does not say, all that its groups have.
        state: keys of a parameter's state; empty before the first step.
    """

    lineage: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    state: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Its class."""
        return self.lineage[0] if self.lineage else "an optimizer whose class the step does not say"


class Verdict(msgspec.Struct, frozen=True):
    """Whether the state fits, and what is to be said of it: why not, or what the user should know.

    Attributes:
        doubtful: no field contradicts it; the names of the classes alone do.
    """

    fits: bool
    reason: str = ""
    doubtful: bool = False


def compare(
    stored: Fields, here: Fields, options: Sequence[Mapping[str, object]], fixed: Mapping[str, object]
) -> Verdict:
    """Decide whether `here` can go on with what `stored` had kept.

    Args:
        options: the stored groups' options, by name.
        fixed: options of `here` that its constructor does not take: they are what the class is.
    """
    title = f"stored by {stored.name}, and here it is {here.name}"
    if stored.name == here.name:
        return Verdict(True)
    for key, value in fixed.items():
        if not isinstance(value, bool) or key in HOW:
            continue  # others need not even be hashable
        if any(isinstance(group.get(key), bool) and group[key] != value for group in options):
            return Verdict(False, f"{title}: {key} is {value} in that class, and {not value} is stored")
    kin = _kin(stored.lineage, here.lineage)
    if kin and _bare(stored.name) != _bare(here.name):
        return Verdict(True, f"{title}: it gets that one's options")
    if kin:
        return Verdict(True)
    lost, lacking = stored.own - here.own - _ADDED - _SCHEDULERS, here.own - stored.own - _ADDED
    apart = bool(stored.state and here.state and stored.state != here.state)
    if not stored.lineage:
        # Groups may have options of the user's own, and lack what newer classes have: only both together tell.
        return Verdict(False, f"{title}: {_fields(stored, here)}") if (lost and lacking) else Verdict(True)
    if lost or lacking or apart:
        return Verdict(False, f"{title}: {_fields(stored, here)}")
    if _bare(stored.name) == _bare(here.name):
        return Verdict(True)
    return Verdict(False, f"{title}: their fields have the same names; strict=False takes them for the same", True)


def _kin(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether one class is derived from the other, or both from one of which they are another make."""
    names = {_bare(one[0]), _bare(other[0])} if one and other else set()
    return any(_bare(name) in names for name in set(one) & set(other))


def _bare(name: str) -> str:
    return name.rpartition(".")[2]


def _fields(stored: Fields, here: Fields) -> str:
    """How they differ, in words."""
    sides = [
        ("options stored and not here", stored.own - here.own - HOW - _SCHEDULERS),
        ("options here and not stored", here.own - stored.own - HOW),
        ("state stored", stored.state - here.state),
        ("state here", here.state - stored.state),
    ]
    return "; ".join(f"{what}: {', '.join(sorted(names))}" for what, names in sides if names)
