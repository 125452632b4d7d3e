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
    flat: str = ""


_VALUES = msgspec.json.Decoder(_Values)


def kinds(values: Document) -> dict[str, str]:
    """Name of each part → its kind (`module`, `optimizer`); empty where the values are not those of a state."""
    found = _read(values)
    return {} if found is None else {name: part.pair[0] for name, part in found.parts.items()}


def flat_root(values: Document) -> str:
    """The part below which all lies that was given without a name of its own; empty where all had one."""
    found = _read(values)
    return found.flat if found is not None and found.flat in found.parts else ""


def _read(values: Document) -> _Values | None:
    try:
        return _VALUES.decode(values)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
