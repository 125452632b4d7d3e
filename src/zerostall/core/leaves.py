"""Small values as lines for people: the name of each, and a short text that differs where the value does.

Reads the JSON of a document as it stands, so that values of types this process does not know (torch's, numpy's) are
shown too, and nothing is ever made of what a file says.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

import msgspec

from zerostall.core import codecs, names
from zerostall.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerostall.core.values import Document

_LONGEST = 120
_MOST_ITEMS = 16
_MAX_DEPTH = 220

# Tags whose payload is a plain list of items; of [key, value] pairs; and of one thing, then such a list.
_LISTS = {"$tuple", "$set", "$frozenset"}
_PAIRS = {"$dict", "$ordereddict", "$counter", "$namespace", "$arguments"}
_LED = {"$defaultdict", "$deque"}
_TENSORS = {"$tensor", "$zerostall.array", "$zerostall.composite", "$zerostall.part"}


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """One small value: `optimizer.param_groups[0].lr`, `0.001`."""

    name: str
    text: str


def leaves(document: Document) -> tuple[Leaf, ...]:
    """Return the small values of a record, in their order. FormatError for what is no JSON.

    Tensors are left out. Texts over 120 characters and long lists are shortened, with a digest of the whole.
    """
    try:
        tree = msgspec.json.decode(document)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(f"small values that cannot be read: {error}") from None
    return tuple(_walk(_without_kinds(tree), "", 0))


def _without_kinds(tree: object) -> object:
    """The values of a training state lie below `parts`, each as (kind, values): show them by the part's own name."""
    parts = tree.get("parts") if isinstance(tree, dict) else None
    if not isinstance(parts, dict) or not isinstance(tree, dict):
        return tree
    shown: dict[str, object] = {}
    for name, row in _keyed(parts):
        pair = row.get("$tuple") if isinstance(row, dict) else None
        shown[name] = pair[1] if isinstance(pair, list) and len(pair) == 2 else row
    rest = [(key, value) for key, value in tree.items() if key != "parts" and value is not None]
    return {"$parts": [*shown.items(), *rest]}


def _keyed(node: dict[str, object]) -> Iterator[tuple[str, object]]:
    pairs = node.get("$dict")
    if len(node) == 1 and isinstance(pairs, list):
        for pair in pairs:
            if isinstance(pair, list) and len(pair) == 2:
                yield (pair[0] if isinstance(pair[0], str) else _json(pair[0])), pair[1]
    else:
        yield from node.items()


def _walk(node: object, name: str, depth: int) -> Iterator[Leaf]:
    children = _children(node, name) if depth < _MAX_DEPTH else None
    if children is None:
        if not _is_tensor(node):
            yield Leaf(name, _text(node))
        return
    for below, item in children:
        yield from _walk(item, below, depth + 1)


def _children(node: object, name: str) -> list[tuple[str, object]] | None:
    """What lies below a container that is shown item by item; None for what is one line."""
    if isinstance(node, list):
        return _items(node, name)
    if not isinstance(node, dict):
        return None
    tag = next(iter(node), "")
    payload = node.get(tag)
    if tag == "$parts":
        return cast("list[tuple[str, object]]", payload)
    if tag in _LED and isinstance(payload, list) and len(payload) == 2:
        payload = payload[1]
    if tag in _LISTS or tag == "$deque":
        return _items(payload, name) if isinstance(payload, list) else None
    if tag in _PAIRS or tag == "$defaultdict":
        return _pairs(payload, name)
    if tag.startswith("$") or not node:
        return None
    return [(names.child(name, key), item) for key, item in node.items()]


def _items(items: list[object], name: str) -> list[tuple[str, object]] | None:
    if not items or (len(items) > _MOST_ITEMS and not any(isinstance(item, (dict, list)) for item in items)):
        return None
    return [(f"{name}[{index}]", item) for index, item in enumerate(items)]


def _pairs(payload: object, name: str) -> list[tuple[str, object]] | None:
    if not isinstance(payload, list) or not payload:
        return None
    found: list[tuple[str, object]] = []
    for pair in payload:
        if not isinstance(pair, list) or len(pair) != 2:
            return None
        found.append((_child(name, pair[0]), pair[1]))
    return found


def _child(name: str, key: object) -> str:
    if isinstance(key, str):
        return names.child(name, key)
    return f"{name}[{_json(key)}]"


def _is_tensor(node: object) -> bool:
    return isinstance(node, dict) and len(node) == 1 and next(iter(node)) in _TENSORS


def _text(node: object) -> str:
    if node is None or isinstance(node, (bool, int, float)):
        return repr(node)
    if isinstance(node, str):
        return _short(repr(node), node)
    if isinstance(node, list):
        return f"list of {len(node)} {_digest(node)}" if node else "[]"
    assert isinstance(node, dict)
    if not node:
        return "{}"
    tag = next(iter(node))
    return _tagged(tag.removeprefix("$"), node[tag])


def _tagged(tag: str, payload: object) -> str:
    if tag in ("float", "int"):
        try:
            return repr(codecs.read_float(payload) if tag == "float" else codecs.read_int(payload))
        except (TypeError, ValueError):  # damaged, or an integer too long to be written in decimal
            return _short(f"{tag} {_json(payload)}", payload)
    if isinstance(payload, list) and not payload:
        return f"empty {tag}"
    if tag in ("bytes", "bytearray", "torch.state", "python.bytesio"):
        data = payload["$bytes"] if isinstance(payload, dict) and "$bytes" in payload else payload
        size = len(data) * 3 // 4 - data[-2:].count("=") if isinstance(data, str) else 0
        return f"{tag} of {size} bytes {_digest(payload)}"
    if isinstance(payload, list) and len(payload) > _MOST_ITEMS:
        return f"{tag} of {len(payload)} {_digest(payload)}"
    if isinstance(payload, str):
        return _short(f"{tag} {payload}", payload)
    return _short(f"{tag} {_json(payload)}", payload)


def _short(text: str, whole: object) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]}… {_digest(whole)}"


def _digest(node: object) -> str:
    return f"#{hashlib.sha256(msgspec.json.encode(node)).hexdigest()[:8]}"


def _json(node: object) -> str:
    return msgspec.json.encode(node).decode()
