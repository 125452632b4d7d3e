"""Looking into a captured image for numbers that are none: training that diverged must not push good steps out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core import matching
from zerostall.core.dtypes import NOT_FINITE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.core.layout import Entry, Layout


class FiniteCheck:
    """Which tensors of a layout must be finite: those with a name that `patterns` take. Looked at where they landed,
    in the background: the training thread pays nothing.

    ValueError where `insist` and a pattern fits no name.
    """

    def __init__(self, layout: Layout, patterns: str | Sequence[str], *, insist: bool = True) -> None:
        names: dict[str, list[str]] = {entry.name: [entry.name] for entry in layout.entries}
        for view in layout.views:
            names[view.base].append(view.name)
        selection = matching.select(patterns)
        if insist:
            matching.insist_on_use(selection, [name for group in names.values() for name in group], "require_finite")
        self._entries: list[Entry] = [
            entry
            for entry in layout.entries
            if entry.dtype in NOT_FINITE and any(map(selection.takes, names[entry.name]))
        ]

    def offenders(self, image: int) -> list[str]:
        """Names of tensors with NaN or infinity in the image at that address. About 10 GB/s."""
        return [entry.name for entry in self._entries if _has_none(image + entry.offset, entry)]


def _has_none(address: int, entry: Entry) -> bool:
    width, mask, value = NOT_FINITE[entry.dtype]
    return native.any_masked(address, entry.nbytes, width=width, mask=mask, value=value)
