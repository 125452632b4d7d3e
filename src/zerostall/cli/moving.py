"""`zerostall export` and `import`: to and from other people's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from zerostall.cli.arguments import Json, Only, Step, Where
from zerostall.cli.output import emit_json, progress, say, size
from zerostall.trainer.exchange import files as exchange


def export(
    where: Where,
    step: Step,
    out: Annotated[Path, typer.Argument(help="file to write: .safetensors or .pt", show_default=False)],
    only: Only = None,
    root: Annotated[
        str | None, typer.Option("--root", metavar="NAME", help="take what is below this name, and leave the name out")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="the file may be there already")] = False,
    json: Json = False,
) -> None:
    """Write a step as one file for other tools. Every byte is checked; the file is there whole or not at all."""
    with progress("exporting", json=json) as meter:
        done = exchange.export(where, step, out, only=only or None, root=root, overwrite=overwrite, progress=meter)
    if json:
        emit_json(msgspec.to_builtins(done))
        return
    say(f"step {done.step} → {done.path}: {done.tensors} tensors, {size(done.nbytes)}")
    for alias, name in done.aliases.items():
        say(f"  {alias} is {name}, stored once and noted in the metadata")


def import_(
    source: Annotated[Path, typer.Argument(help="file of safetensors or torch.save", show_default=False)],
    where: Where,
    step: Annotated[int, typer.Option("--step", min=0, help="as which step", show_default=False)],
    root: Annotated[
        str, typer.Option("--root", metavar="NAME", help="name that goes before each tensor's; '' for whole names")
    ] = "model",
    key: Annotated[
        str | None, typer.Option("--key", metavar="NAME", help="of a torch.save file, take this entry alone")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="a name for the run")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="a step of that number may be replaced")] = False,
    json: Json = False,
) -> None:
    """Store somebody's file as a step of a run, for `restore(only="model.*")` and `load`. No code of it is run."""
    with progress("importing", json=json) as meter:
        done = exchange.import_file(source, where, step, root=root, key=key, run=run, replace=replace, progress=meter)
    if json:
        emit_json(msgspec.to_builtins(done))
    else:
        say(f"{source} → step {done.step} of {done.where}: {done.tensors} tensors, {size(done.nbytes)}")
