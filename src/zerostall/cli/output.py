"""How commands speak: tables for people, plain columns for pipes, one JSON document for programs, errors with hints."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from zerostall.errors import ZerostallError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# Names and values come from files: nothing in them may steer the terminal.
_UNSHOWABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
_STYLES = {
    "ok": "green",
    "clean": "green",
    "yes": "green",
    "limited": "yellow",
    "no": "bold red",
    "damaged": "bold red",
}
_NO_TERMINAL = 100_000  # columns: lines in a pipe are never broken


def console() -> Console:
    """Standard output; lines are broken only on a terminal."""
    return Console(width=None if sys.stdout.isatty() else _NO_TERMINAL, highlight=False, soft_wrap=True)


def clean(text: str) -> str:
    """The text with everything escaped that could steer a terminal."""
    return _UNSHOWABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def say(text: str, style: str = "") -> None:
    """One line of text, taken as it is."""
    console().print(Text(clean(text), style=style))


def emit_json(value: object) -> None:
    """One JSON document on standard output; NaN and infinities, which JSON lacks, become null."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.buffer.flush()


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """A table; columns whose name begins with `>` stand to the right. In a pipe, columns two spaces apart."""
    if not sys.stdout.isatty():
        _emit_columns(columns, rows)
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        # What is short and has a meaning only as a whole keeps its line; long names are folded.
        table.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell), style=_STYLES.get(cell, "")) for cell in row))
    console().print(table)


def _emit_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    cleaned = [[column.lstrip(">") for column in columns], *([clean(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in cleaned) for index in range(len(columns))]
    for row in cleaned:
        cells = (
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        )
        print("  ".join(cells).rstrip())


def emit_error(error: Exception) -> None:
    """What went wrong and what to do about it, on standard error."""
    message = str(error.args[0]) if isinstance(error, ZerostallError) and error.args else str(error)
    print(f"{type(error).__name__}: {_lines(message)}", file=sys.stderr)
    if isinstance(error, ZerostallError) and error.hint:
        print(f"hint: {_lines(error.hint)}", file=sys.stderr)


def _lines(text: str) -> str:
    return "\n".join(clean(line) for line in text.split("\n"))


@contextlib.contextmanager
def progress(what: str, *, json: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, to be told (bytes done, bytes in all); nothing where nobody looks."""
    if json or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def size(nbytes: int) -> str:
    """A number of bytes in the largest unit that leaves a whole part: 1.50 GiB."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {_UNITS[unit]}" if unit else f"{nbytes} B"


def steps(numbers: Sequence[int]) -> str:
    """Steps in a few words: the newest three and how many there are."""
    if not numbers:
        return "–"
    newest = ", ".join(str(step) for step in sorted(numbers)[-3:])
    return newest if len(numbers) <= 3 else f"{newest} ({len(numbers)} in all)"
