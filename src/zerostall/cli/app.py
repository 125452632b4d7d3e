"""The command line: one file a group of commands."""

from __future__ import annotations

import typer

from zerostall.cli import agent
from zerostall.cli.doctor import doctor
from zerostall.cli.output import emit_error
from zerostall.errors import ZerostallError

app = typer.Typer(
    name="zerostall",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at, check and move checkpoints; see what this machine can do.",
)
app.command()(doctor)
app.add_typer(agent.app, name="agent")


def run() -> int:
    """Runs the command line; errors of zerostall become a message and exit status 1."""
    try:
        app(standalone_mode=True)
    except ZerostallError as error:
        emit_error(error)
        return 1
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    return 0
