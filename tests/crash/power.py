"""What a disk still holds after the power went: of a trace of file calls, only what was synced.

The strictest disk that POSIX allows: a file's bytes are there once it was fsynced after its last write, else it is
empty; a name is there once its folder was fsynced after the name was given.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shim.faults import Call


@dataclass(eq=False)
class Node:
    """A file or a folder: what it is now, and what would be left of it."""

    folder: bool
    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    synced: bool = False
    number: int = 0


class Disk:
    """Lives through calls below `root`, a folder that was there before.

    `contents` are the bytes of each file by its number: files count in the order in which they were created.
    """

    def __init__(self, root: Path, contents: dict[int, bytes] | None = None) -> None:
        self.contents = {} if contents is None else contents
        self._root = root
        self._top = Node(folder=True)
        self._files = 0

    def live(self, calls: Iterable[Call]) -> None:
        for call in calls:
            if call.result >= 0:
                self._one(call)

    def learn(self) -> None:
        """Note the bytes of every file that is there now."""
        self._learn(self._top, self._root)

    def left(self, target: Path) -> tuple[str, ...]:
        """Write what would be left into a folder; the names of it, with the number of bytes."""
        target.mkdir()
        return tuple(self._leave(self._top, target, ""))

    def _one(self, call: Call) -> None:
        parent, name = self._parent(call.path)
        if call.op == "open" and call.argument & os.O_CREAT:
            if name not in parent.entries:
                self._files += 1
                parent.entries[name] = Node(folder=False, number=self._files)
            elif call.argument & os.O_TRUNC:
                parent.entries[name].synced = False
        elif call.op in ("write", "truncate", "allocate"):
            parent.entries[name].synced = False
        elif call.op in ("fsync", "fdatasync"):
            node = parent.entries[name] if name else self._top
            node.synced, node.durable = True, dict(node.entries)
        elif call.op == "mkdir":
            parent.entries[name] = Node(folder=True)
        elif call.op == "rename":
            target, new = self._parent(call.second)
            target.entries[new] = parent.entries.pop(name)
        elif call.op in ("unlink", "rmdir"):
            del parent.entries[name]

    def _parent(self, path: str) -> tuple[Node, str]:
        *folders, name = Path(path).relative_to(self._root).parts or ("",)
        node = self._top
        for folder in folders:
            node = node.entries[folder]
        return node, name

    def _learn(self, node: Node, path: Path) -> None:
        if node.folder:
            for name, entry in node.entries.items():
                self._learn(entry, path / name)
        else:
            self.contents[node.number] = path.read_bytes()

    def _leave(self, node: Node, target: Path, path: str) -> Iterable[str]:
        for name, entry in sorted(node.durable.items()):
            if entry.folder:
                (target / name).mkdir()
                yield f"{path}{name}/"
                yield from self._leave(entry, target / name, f"{path}{name}/")
            else:
                data = self.contents[entry.number] if entry.synced else b""
                (target / name).write_bytes(data)
                yield f"{path}{name} {len(data)} {hash(data)}"
