"""The layouts of a run's folder: every step needs one of them, so each is there twice."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from zerostall.core import layout as layouts
from zerostall.core import steps as names
from zerostall.errors import CorruptError, FormatError, StorageError
from zerostall.telemetry import say_once
from zerostall.tiers.files import fsync_folder, read_file, write_whole
from zerostall.tiers.modes import OWN

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerostall.core.layout import Layout


class LayoutFiles:
    """Reads each layout once, and makes sure once that both of its files are good."""

    def __init__(self, where: Path) -> None:
        self.modes = OWN
        self._where = where
        self._known: dict[str, Layout] = {}
        self._sound: set[str] = set()

    def get(self, digest: str, begins: Sequence[int]) -> Layout:
        """The layout of that digest and of the rank that has these begins, checked.

        Raises:
            CorruptError, FormatError: neither file is good, or they are of other begins; says what is wrong with the
                first.
        """
        if digest not in self._known:
            self._known[digest] = self._read(digest, begins)
        return layouts.moved(self._known[digest], begins, source=str(self._paths(digest)[0]))

    def check(self, digest: str, begins: Sequence[int]) -> None:
        """Read both files anew. CorruptError, FormatError: one is damaged or missing."""
        for path in self._paths(digest):
            _decoded(path, digest, begins)

    def write_again(self, layout: Layout) -> None:
        """Have both files there, whole and durable, whatever was known of them."""
        self._sound.discard(layout.digest)
        self.write(layout)

    def write(self, layout: Layout) -> None:
        """Have both files there, whole and durable."""
        first, spare = self._paths(layout.digest)
        if layout.digest in self._sound and first.exists():
            return
        with contextlib.suppress(FileExistsError):
            first.parent.mkdir()
            self.modes.folder(first.parent)
        data = layouts.encode(layout)
        for path in (first, spare):
            if not _holds(path, data):
                write_whole(path, data, self.modes)
        fsync_folder(self._where)
        self._known[layout.digest] = layout
        self._sound.add(layout.digest)

    def _paths(self, digest: str) -> tuple[Path, Path]:
        folder = self._where / names.LAYOUTS
        return folder / names.layout_file(digest), folder / names.spare_layout_file(digest)

    def _read(self, digest: str, begins: Sequence[int]) -> Layout:
        first, spare = self._paths(digest)
        try:
            return _decoded(first, digest, begins)
        except (FormatError, StorageError) as damage:
            try:
                found = _decoded(spare, digest, begins)
            except (FormatError, StorageError):
                raise damage from None
            say_once(f"layout:{first}", "%s; its spare is used, the next save mends it", damage.args[0])
            return found


def _decoded(path: Path, digest: str, begins: Sequence[int]) -> Layout:
    try:
        data = read_file(path)
    except FileNotFoundError:
        raise CorruptError(f"{path} is missing") from None
    decoded = layouts.decode(data, begins, source=str(path))
    if decoded.digest != digest:
        raise CorruptError(f"{path} holds another layout than its name says")
    return decoded


def _holds(path: Path, data: bytes) -> bool:
    try:
        return read_file(path) == data
    except (FileNotFoundError, FormatError, StorageError):
        return False
