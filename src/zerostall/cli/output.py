"""How commands speak: tables for people, one JSON document for programs, errors with their hint."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.errors import ZerostallError

Json = Annotated[bool, typer.Option("--json", help="print one JSON document instead of text")]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def console() -> Console:
    """Standard output; wide enough for a table when it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def emit_json(value: object) -> None:
    """One JSON document on standard output; NaN and infinities, which JSON lacks, become null."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.buffer.flush()


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """A table; columns whose name begins with `>` stand to the right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def emit_error(error: ZerostallError) -> None:
    """What went wrong and what to do about it, on standard error."""
    message = str(error.args[0]) if error.args else type(error).__name__
    print(f"{type(error).__name__}: {message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


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
