"""The command line: one file a group of commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import zerostall
from zerostall.cli import agent, bench, checking, cluster, listing, moving
from zerostall.cli.doctor import doctor
from zerostall.cli.manager import manager
from zerostall.cli.output import emit_error, say
from zerostall.errors import ZerostallError


def _tell_version(wanted: bool) -> None:
    if wanted:
        say(f"zerostall {zerostall.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="zerostall",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at, check and move checkpoints; see what this machine can do.",
)


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """Options that stand before any command."""


app.command()(listing.ls)
app.command()(listing.show)
app.command()(checking.verify)
app.command()(checking.diff)
app.command()(moving.export)
app.command("import")(moving.import_)
app.command()(listing.pin)
app.command()(listing.unpin)
app.command()(doctor)
app.command()(manager)
app.command()(cluster.status)
app.command()(cluster.top)
app.add_typer(agent.app, name="agent")
app.add_typer(bench.app, name="bench")


def run() -> int:
    """Runs the command line and returns its exit status.

    0: well. 1: something is wrong, with a message and what to do about it. 2: it was called wrongly.
    """
    try:
        app(standalone_mode=True, prog_name="zerostall")
    except (ZerostallError, OSError, MemoryError) as error:
        emit_error(error)
        return 1
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    return 0
