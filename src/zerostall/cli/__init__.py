"""The `zerostall` command. Needs the extra `cli` (typer, rich); the rest of the package does not."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line and returns the exit status: 0 well, 1 something is wrong, 2 it was called wrongly."""
    try:
        from zerostall.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"zerostall: the command needs {error.name}: pip install 'zerostall[cli]'", file=sys.stderr)
        return 2
    return run()
