"""Tells, in microseconds, whether dicts and lists still hold the very objects they held."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})


class Watch:
    """Remembers the items of some containers, strongly. Where a plain value was, another of its type may be."""

    def __init__(self, containers: Sequence[dict[object, object] | list[object]]) -> None:
        self._dicts = [container for container in containers if isinstance(container, dict)]
        self._lists = [container for container in containers if isinstance(container, list)]
        self._held = list(self._items())

    def _items(self) -> Iterator[object]:
        # All of it in C: there are thousands of dicts.
        values = chain.from_iterable(map(dict.values, self._dicts))
        return chain(chain.from_iterable(self._dicts), values, chain.from_iterable(self._lists))

    def same(self) -> bool:
        """Return whether every container holds what it held."""
        now = list(self._items())
        if len(now) != len(self._held):
            return False
        if all(map(is_, now, self._held)):
            return True
        return all(
            one is other or (type(one) is type(other) and type(one) in _ATOMS)
            for one, other in zip(now, self._held, strict=True)
        )
