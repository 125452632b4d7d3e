"""Which parts a step's small values say that its state has, without reading the values themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from zerostall.core.values import Document


class _Part(msgspec.Struct):
    pair: tuple[str, msgspec.Raw] = msgspec.field(name="$tuple")


class _Values(msgspec.Struct):
    parts: dict[str, _Part]


_VALUES = msgspec.json.Decoder(_Values)


def kinds(values: Document) -> dict[str, str]:
    """Name of each part → its kind (`module`, `optimizer`); empty where the values are not those of a state."""
    try:
        found = _VALUES.decode(values)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    return {name: part.pair[0] for name, part in found.parts.items()}
