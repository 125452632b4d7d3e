"""A stored state as a restore sees it: names, shapes, and the tree of small values of each part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import msgspec

from zerostall.core import values
from zerostall.core.own import bare
from zerostall.core.values import TensorRef
from zerostall.errors import FormatError
from zerostall.trainer.state import refs
from zerostall.trainer.state.aliasing import DISTINCT
from zerostall.trainer.state.parts.optimizer_class import read_fields

if TYPE_CHECKING:
    from zerostall.core.layout import Entry, Layout, View
    from zerostall.core.optimizers import Fields
    from zerostall.core.values import Document
    from zerostall.tiers.contract import Stored


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What was stored of one object: its kind, and its small values with refs where tensors go.

    `fields`: of an optimizer that says itself what its state is, what tells its class.
    """

    name: str
    kind: str
    tree: object
    fields: Fields | None = None


def read_values(document: Document) -> tuple[dict[str, StoredPart], object, str]:
    """Return the parts, the generators' states and the base of a record. FormatError where no survey writes such."""
    tree = values.decode(document, TensorRef)
    if type(tree) is not dict or type(tree.get("parts")) is not dict:
        raise FormatError("the record's values are not those of a training state")
    parts: dict[str, StoredPart] = {}
    classes = tree.get("classes")
    classes = classes if isinstance(classes, dict) else {}
    for name, row in cast("dict[object, object]", tree["parts"]).items():
        if type(name) is not str or type(row) is not tuple or len(row) != 2 or type(row[0]) is not str:
            raise FormatError("the record's values are not those of a training state")
        parts[name] = StoredPart(name, row[0], row[1], read_fields(classes.get(name)))
    base = tree.get("base", "")
    if type(base) is not str:
        raise FormatError("the record's values are not those of a training state")
    return parts, tree.get("rng"), base


def _unmarked(layout: Layout) -> Layout:
    """One process has all that there is, so that whose it was is no question; of several, names stay apart."""
    if not any(entry.name.endswith("]") for entry in layout.entries):
        return layout
    replace = msgspec.structs.replace
    entries = tuple(replace(entry, name=bare(entry.name)) for entry in layout.entries)
    views = tuple(replace(view, name=bare(view.name), base=bare(view.base)) for view in layout.views)
    if len({one.name for one in (*entries, *views)}) != len(entries) + len(views):
        return layout
    return replace(layout, entries=entries, views=views)


@dataclass(slots=True)
class StoredState:
    """A stored state, indexed.

    Attributes:
        refused: names that are stored and cannot be restored here, and why.
    """

    layout: Layout
    parts: dict[str, StoredPart]
    rng: object
    base: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    entries: dict[str, int] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    _named: list[str] = field(default_factory=list)
    _of: dict[str, Entry | View] = field(default_factory=dict)

    @staticmethod
    def read(stored: Stored) -> StoredState:
        """Index a layout and a record. FormatError where the values are not what a survey writes."""
        parts, rng, base = read_values(stored.record.values)
        state = StoredState(_unmarked(stored.layout), parts, rng, base)
        state.index()
        for part in parts.values():
            for name in refs.names_in(part.tree):
                if name not in state:
                    raise FormatError(f"the values of {part.name} refer to a tensor {name} that is not stored")
        return state

    def index(self) -> None:
        """Find entries and views by name."""
        self.entries.update((entry.name, index) for index, entry in enumerate(self.layout.entries))
        self.views.update((view.name, view) for view in self.layout.views)
        self._of = {entry.name: entry for entry in self.layout.entries} | self.views
        self._named = [name for name in self.entries if not name.endswith(DISTINCT)]
        self._named.extend(self.views)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __getitem__(self, name: str) -> Entry | View:
        """What says the shape and the type of the tensor of that name. KeyError where there is none."""
        return self._of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor of that name. KeyError where there is none."""
        return self._of[name].shape

    def dtype(self, name: str) -> str:
        """Name of its data type. KeyError where there is none."""
        return self._of[name].dtype

    def names(self) -> list[str]:
        """Every name a user gave; not those made for expanded tensors."""
        return self._named

    def below(self, name: str) -> list[str]:
        """Names of the tensors below a part of that name."""
        starts = (name + ".", name + "[")
        return [other for other in self.names() if other.startswith(starts)]
