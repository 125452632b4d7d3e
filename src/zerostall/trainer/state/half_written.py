"""What a restore has begun to write into and not ended: another step must fill all of it, or is refused."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from zerostall.errors import MismatchError
from zerostall.trainer.state import tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from zerostall.trainer.state.returning import Rest
    from zerostall.trainer.state.tensors import Geometry, Holder

_NAMED = 8
_OVERWRITTEN = "a step that turned out to be damaged has overwritten part of this state"
_ANEW = "make the state anew before you train on it, or restore(step=...) a step that is whole"


class HalfWritten:
    """Tensors of the user's that may hold part of a step that turned out to be damaged."""

    def __init__(self) -> None:
        self._places: set[Geometry] = set()

    def add(self, holders: Iterable[Holder], places: Mapping[int, Geometry]) -> None:
        """Note that these are written into; `places` as for `tensors.geometries`."""
        self._places.update(place for place in tensors.geometries(holders, places) if 0 not in place.shape)

    @contextlib.contextmanager
    def comparing(self) -> Iterator[None]:
        """Whoever is told that a step does not fit hears, too, that the state is not as it was."""
        try:
            yield
        except MismatchError as error:
            if self._places:
                error.args = (f"{error.args[0]}\n{_OVERWRITTEN}",)
                error.hint = f"{error.hint}; {_ANEW}" if error.hint else _ANEW
            raise

    def refuse(self, rest: Rest) -> None:
        """MismatchError where a step leaves any of it as it is, for it has no tensor of that name.

        Nobody could tell from the outcome that these are of no step at all.
        """
        wanted = rest.aim.wanted
        left = tuple(
            name for name in rest.match.missing if name in wanted and tensors.geometry(wanted[name]) in self._places
        )
        if left:
            more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
            raise MismatchError(f"not stored: {', '.join(left[:_NAMED])}{more}", missing=left)
