"""`zerostall bench`: what this machine gives, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerostall.cli.arguments import Json, nbytes
from zerostall.cli.output import emit_json, emit_table, say
from zerostall.core.neighbours import Share
from zerostall.flow.disk_speed import Way, measure

app = typer.Typer(no_args_is_help=True, help="Measure what this machine gives, and what is made of it.")


@app.callback()
def _bench() -> None:
    """Keeps `disk` a command of its own."""


@app.command()
def disk(
    where: Annotated[Path, typer.Argument(help="a folder on the disk to measure")] = Path(),
    size: Annotated[str, typer.Option("--size", metavar="BYTES", help="of each of the two files")] = "256MiB",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="how often, taking turns; medians are told")] = 9,
    threads: Annotated[int, typer.Option("--threads", min=1, max=64, help="on both sides; agents have 8")] = 8,
    json: Json = False,
) -> None:
    """Write and read a file past the page cache, bare and with checksums as an agent does, and remove it again."""
    found = measure(where, nbytes(size), rounds=rounds, threads=threads)
    if json:
        emit_json(found)
        return
    rows = [
        ("write and fsync", *_cells(found.bare_write, found.write, found.write_share)),
        ("read", *_cells(found.bare_read, found.read, found.read_share)),
    ]
    emit_table(("", ">disk, bare", ">zerostall", ">share", ">processor s/GB"), rows)
    if found.fell_back:
        say(f"through the page cache: {found.fell_back}", "yellow")


def _cells(bare: Way | None, ours: Way, share: Share | None) -> tuple[str, str, str, str]:
    floor = "–" if bare is None else f"{bare.rate / 1e9:.2f} GB/s"
    return floor, f"{ours.rate / 1e9:.2f} GB/s", "–" if share is None else str(share), f"{ours.processor:.2f}"
