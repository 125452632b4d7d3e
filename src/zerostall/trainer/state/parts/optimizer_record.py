"""What is stored of an optimizer beside its tensors, and which stored tensors are whose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from zerostall.core import names
from zerostall.core.optimizers import Fields
from zerostall.errors import FormatError
from zerostall.trainer.state.parts.optimizer_class import said
from zerostall.trainer.state.parts.options import options_of
from zerostall.trainer.state.refs import names_in, resolve
from zerostall.trainer.state.walk import Later

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerostall.trainer.state.refs import Resolver
    from zerostall.trainer.state.stored import StoredPart, StoredState


_UNSAID = Fields()
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A parameter group.

    Attributes:
        labels: of its parameters, in order.
        shapes: label -> shape, of those parameters that only their place identifies.
        options: learning rate and the like; tensors among them are refs.
    """

    labels: list[str]
    shapes: dict[str, list[int]]
    options: dict[str, object]


@dataclass(slots=True)
class OptimizerValues(Later):
    """What an optimizer has beside tensors; `options` may still have what is no option."""

    groups: list[GroupRecord]
    options: list[dict[object, object]]
    state: dict[str, object]
    extra: object
    keys: list[str]
    host: list[str]
    fields: Fields

    def tree(self) -> object:
        rows = [
            {"params": record.labels, "shapes": record.shapes, "options": options_of(options)}
            for record, options in zip(self.groups, self.options, strict=True)
        ]
        return {
            "groups": rows,
            "state": self.state,
            "extra": self.extra,
            "keys": self.keys,
            "host": self.host,
            "class": said(self.fields),
        }


@dataclass(slots=True)
class Slots:
    """The state of one parameter: tensors by key, and what of it is values or nests tensors.

    `nested`: names of the tensors that `values` refers to.
    """

    label: str
    tensors: dict[str, str] = field(default_factory=dict)
    values: object = None
    nested: list[str] = field(default_factory=list)

    def state(self, found: Resolver, keys: Sequence[str]) -> object:
        """Return the state as the optimizer holds it, with its keys in this order."""
        if self.values is None and self.tensors.keys() <= set(keys):  # nearly all: tensors alone
            return {key: found.holder(self.tensors[key]) for key in keys if key in self.tensors}
        values = resolve({} if self.values is None else self.values, found)
        if not isinstance(values, dict):
            return values
        whole = {**{key: found.holder(name) for key, name in self.tensors.items()}, **values}
        return {key: whole[key] for key in [*keys, *(key for key in whole if key not in keys)] if key in whole}


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """An optimizer's small values.

    Attributes:
        groups: its parameter groups.
        state: label -> what of a parameter's state is no plain tensor directly in it.
        extra: state under keys that are no parameters.
        keys: every key of a parameter's state, in the order the optimizer made them.
        host: keys of state tensors that lay in host memory while their parameter did not.
        fields: what tells its class from others.
    """

    groups: list[GroupRecord]
    state: dict[str, object]
    extra: dict[object, object]
    keys: list[str]
    host: frozenset[str]
    fields: Fields = _UNSAID

    @staticmethod
    def read(stored: StoredPart) -> OptimizerRecord:
        """Read what an OptimizerPart's values() wrote. FormatError for anything else."""
        tree = _dict(stored, stored.tree)
        groups: list[GroupRecord] = []
        for item in _list(stored, tree.get("groups")):
            row = _dict(stored, item)
            labels = _texts(stored, row.get("params"))
            shapes = cast("dict[str, list[int]]", _dict(stored, row.get("shapes")))
            options = cast("dict[str, object]", _dict(stored, row.get("options")))
            groups.append(GroupRecord(labels, shapes, options))
        state = cast("dict[str, object]", _dict(stored, tree.get("state")))
        keys, host = _texts(stored, tree.get("keys")), _texts(stored, tree.get("host"))
        if (own := tree.get("class")) is not None:
            said = _dict(stored, own)
            lineage, options = _texts(stored, said.get("lineage")), frozenset(_texts(stored, said.get("own")))
        else:  # of before this was stored, or imported
            lineage, options = [], frozenset(key for row in groups for key in row.options)
        fields = Fields(tuple(lineage), options, frozenset(keys))
        return OptimizerRecord(groups, state, _dict(stored, tree.get("extra")), keys, frozenset(host), fields)

    def labels(self) -> list[str]:
        """Labels of all parameters known when this was saved, groups first."""
        grouped = [label for group in self.groups for label in group.labels]
        return list(dict.fromkeys([*grouped, *self.state]))

    def shape(self, label: str) -> tuple[int, ...] | None:
        """Shape of a parameter that only its place identifies."""
        for group in self.groups:
            if label in group.shapes:
                return tuple(group.shapes[label])
        return None

    def named_options(self) -> list[dict[str, object]]:
        """Return the stored options of every group."""
        return [row.options for row in self.groups]

    def options(self) -> dict[str, dict[str, object]]:
        """Return the stored options of every parameter."""
        return {label: row.options for row in self.groups for label in row.labels}

    def slots(self, state: StoredState, stored: StoredPart) -> dict[str, Slots]:
        """Find each parameter's state: its tensors are the names below `part.label`."""
        slots = {label: Slots(label) for label in self.labels()}
        for label, values in self.state.items():
            slots[label].values = values
            slots[label].nested.extend(names_in(values))
        referred = set(names_in(stored.tree))
        start = len(stored.name)
        for name in state.below(stored.name):
            if name in referred:
                continue
            label, key = _split(name[start:], slots)
            if key is None:
                raise FormatError(f"{name} is no state of any parameter that {stored.name} knows")
            if label not in slots:
                slots[label] = Slots(label)
            slots[label].tensors[key] = name
        return slots

    def device(self, key: str, group: Mapping[str, object], param: torch.Tensor) -> torch.device:
        """Where torch would keep this state tensor: step counters in host memory, unless a kernel reads them."""
        counts = key == "step"
        if not (counts or key in self.host) or group.get("capturable") or (counts and group.get("fused")):
            return param.device
        return _HOST


def _split(rest: str, slots: Mapping[str, Slots]) -> tuple[str, str | None]:
    """Split what stands behind an optimizer's name into a parameter's label and the key of its state."""
    at = rest.rfind(".")
    label = rest[:at].removeprefix(".")
    if label in slots and rest[at - 1] != "\\":
        return label, rest[at + 1 :]
    path = names.split(rest.removeprefix("."))
    key = path[-1]
    return (names.join(path[:-1]), key) if len(path) > 1 and isinstance(key, str) else ("", None)


def _dict(stored: StoredPart, value: object) -> dict[object, object]:
    if type(value) is not dict:
        raise FormatError(f"the values of {stored.name} are not those of an optimizer")
    return value


def _list(stored: StoredPart, value: object) -> list[object]:
    if type(value) is not list:
        raise FormatError(f"the values of {stored.name} are not those of an optimizer")
    return value


def _texts(stored: StoredPart, value: object) -> list[str]:
    items = _list(stored, value)
    if not all(type(item) is str for item in items):
        raise FormatError(f"the values of {stored.name} are not those of an optimizer")
    return cast("list[str]", items)
