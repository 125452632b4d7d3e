"""Racks, switches and the nodes at them, as a topology file says it: failure domains, and how far nodes are apart.

    [racks]                              what shares power and cooling
    r1 = ["gpu-[01-08]"]
    r2 = ["gpu-[09-16]"]
    [leaves]                             which nodes' cables go to that leaf switch
    leaf1 = ["gpu-[01-08]"]
    leaf2 = ["gpu-[09-16]"]
    [spines]                             which leaf switches that spine switch ties together
    spine1 = ["leaf1", "leaf2"]

A name stands for itself; `[01-08,11]` in it for these numbers, with as many digits as written. Racks or leaves may be
left out, and spines too. What the file says is checked as a whole; a file with a contradiction is none.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from zerostall.core.quoting import count
from zerostall.core.topology import Place
from zerostall.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_NODES = 1 << 16
_NAMED = 3  # so many problems are named

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RANGE = re.compile(r"([^\[\]]*)\[([0-9,-]+)\]([^\[\]]*)")
_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")

Members = dict[str, list[str]]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    racks: Members = {}
    leaves: Members = {}
    spines: Members = {}


class Fabric(msgspec.Struct, frozen=True):
    """What a topology file says.

    Attributes:
        source: what the file is called in messages.
        places: where each node stands.
        words: how much is in it.
    """

    source: str
    places: Mapping[str, Place]
    words: str

    @classmethod
    def parse(cls, text: str, source: str) -> Fabric:
        """Read a topology file's text.

        Raises:
            FormatError: it is none; the message names what is wrong.
        """
        try:
            file = msgspec.convert(tomllib.loads(text), _File)
        except tomllib.TOMLDecodeError as error:
            raise FormatError(f"{source} is no TOML: {error}") from error
        except msgspec.ValidationError as error:
            raise FormatError(
                f"{source}: {error}", hint="it has tables [racks], [leaves] and [spines], each of lists of names"
            ) from error
        problems: list[str] = []
        racks = _by_member(file.racks, "rack", "node", problems)
        leaves = _by_member(file.leaves, "leaf switch", "node", problems)
        spines = _spines(file, problems)
        for one, other, names in (("rack", "leaf switch", racks), ("leaf switch", "rack", leaves)):
            if racks and leaves:
                others = leaves if names is racks else racks
                problems += [f"node {name} has a {one} and no {other}" for name in sorted(names) if name not in others]
        if not racks and not leaves and not problems:
            problems.append("it names no node")
        if problems:
            more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
            raise FormatError(f"{source}: {'; '.join(problems[:_NAMED])}{more}")
        places = {
            name: Place(racks.get(name, ""), leaf := leaves.get(name, ""), spines=spines.get(leaf, ()))
            for name in sorted(racks.keys() | leaves.keys())
        }
        kinds = (
            (file.racks, "rack", "racks"),
            (file.leaves, "leaf switch", "leaf switches"),
            (file.spines, "spine switch", "spine switches"),
        )
        parts = [count(len(places), "node"), *(count(len(names), *words) for names, *words in kinds if names)]
        return cls(source, places, ", ".join(parts))


class Stand(msgspec.Struct, frozen=True):
    """Where a node stands, and why where there is a file; `doubt` where that and what the node says do not agree."""

    place: Place
    reason: str
    doubt: bool = False


def stand(node: str, labels: Place, fabric: Fabric | None) -> Stand:
    """Decide where a node stands, from its own labels and from the file, which counts more."""
    if fabric is None:
        return Stand(labels, "")
    told = fabric.places.get(node)
    if told is None:
        says = f"its labels count, {labels}" if str(labels) else "it shares a rack and a switch with none"
        return Stand(labels, f"not in {fabric.source}: {says}", doubt=True)
    place = Place(told.rack or labels.rack, told.leaf or labels.leaf, labels.pod, told.spines)
    for what in ("rack", "leaf"):
        own, theirs = getattr(labels, what), getattr(told, what)
        if own and theirs and own != theirs:
            reason = f"its labels say {what}={own}, {fabric.source} says {what}={theirs}: the file counts"
            return Stand(place, reason, doubt=True)
    return Stand(place, f"as {fabric.source} says")


def expand(pattern: str) -> Iterator[str]:
    """The names that `gpu-[01-08]` stands for. ValueError for what is no such pattern."""
    if "[" not in pattern and "]" not in pattern:
        yield pattern
        return
    found = _RANGE.fullmatch(pattern)
    if found is None:
        raise ValueError(f"{pattern!r} is no name, and no pattern such as gpu-[01-08]")
    before, spans, after = found.groups()
    for span in spans.split(","):
        bounds = _SPAN.fullmatch(span)
        first, last = (bounds[1], bounds[2] or bounds[1]) if bounds else ("1", "0")
        if int(first) > int(last) or (len(first) != len(last) and first[0] == "0"):
            raise ValueError(f"{pattern!r}: {span!r} is no range such as 01-08")
        if int(last) - int(first) >= MOST_NODES:
            raise ValueError(f"{pattern!r} stands for more than {MOST_NODES} names")
        for number in range(int(first), int(last) + 1):
            yield f"{before}{number:0{len(first)}}{after}"


def _by_member(groups: Members, kind: str, member: str, problems: list[str]) -> dict[str, str]:
    """Which group each member is in; what is wrong is added to `problems`."""
    found: dict[str, str] = {}
    for group, patterns in groups.items():
        if not _LABEL.fullmatch(group):
            problems.append(f"{group!r} is no name for a {kind}")
        for pattern in patterns:
            try:
                for name in expand(pattern):
                    if not _NODE.fullmatch(name):
                        problems.append(f"{kind} {group}: {name!r} is no name for a {member}")
                    elif name in found:
                        where = (
                            f"twice in {kind} {group}" if found[name] == group else f"in two: {found[name]}, {group}"
                        )
                        problems.append(f"{member} {name} is {where}")
                    elif len(found) >= MOST_NODES:
                        problems.append(f"more than {MOST_NODES} {member}s")
                        return found
                    else:
                        found[name] = group
            except ValueError as error:
                problems.append(f"{kind} {group}: {error}")
    return found


def _spines(file: _File, problems: list[str]) -> dict[str, tuple[str, ...]]:
    """The spine switches of each leaf switch."""
    found: dict[str, set[str]] = defaultdict(set)
    for spine, patterns in file.spines.items():
        if not _LABEL.fullmatch(spine):
            problems.append(f"{spine!r} is no name for a spine switch")
        if spine in file.leaves:
            problems.append(f"{spine} is a leaf switch and a spine switch")
        for leaf in _by_member({spine: patterns}, "spine switch", "leaf switch", problems):
            if leaf not in file.leaves:
                problems.append(f"spine switch {spine} names the leaf switch {leaf}, which has no nodes")
            found[leaf].add(spine)
    if file.spines:
        problems += [f"leaf switch {leaf} is at no spine switch" for leaf in file.leaves if leaf not in found]
    return {leaf: tuple(sorted(spines)) for leaf, spines in found.items()}
