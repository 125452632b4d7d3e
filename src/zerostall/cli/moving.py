"""`zerostall export` and `import`: to and from other people's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import msgspec
import typer

from zerostall.cli.arguments import NEWEST, CastTo, Json, Only, Rename, Where, nbytes, renames, step_or_newest
from zerostall.cli.output import emit_json, progress, say, size
from zerostall.core.exchange import ExportFormat, ExportOptions, ImportFormat, ImportOptions
from zerostall.core.quoting import count
from zerostall.trainer.exchange import files as exchange


def export(
    where: Where,
    step: Annotated[
        str,
        typer.Argument(metavar="STEP", help="which step, or newest; may be left out for that", show_default=False),
    ],
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="file or folder", show_default=False)] = None,
    only: Only = None,
    rename: Rename = None,
    dtype: CastTo = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="modules alone, named as state_dict() names what they hold")
    ] = False,
    root: Annotated[
        str | None, typer.Option("--root", metavar="NAME", help="take what is below this name, and leave the name out")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help=f"what to write: {', '.join(get_args(ExportFormat))}",
            show_default="by the ending; a folder: huggingface",
        ),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option("--shard-size", metavar="BYTES", help="of a Hugging Face folder, such as 2GB", show_default="5GB"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="what is there already may be replaced")] = False,
    json: Json = False,
) -> None:
    """Write a step for other tools: .safetensors, a Hugging Face or DCP folder, .pt. Every byte is checked."""
    chosen, path = _step_and_out(step, out)
    options = ExportOptions(
        only=tuple(only) if only else None,
        rename=renames(rename),
        dtype=dtype,
        weights=weights,
        root=root,
        format=cast("ExportFormat | None", format),
        shard_size=None if shard_size is None else nbytes(shard_size),
        overwrite=overwrite,
    )
    with progress("exporting", json=json) as meter:
        done = exchange.export(where, chosen, path, options, progress=meter)
    if json:
        emit_json(msgspec.to_builtins(done))
        return
    files = f" in {done.files} files" if done.files > 1 else ""
    say(f"step {done.step} → {done.path}: {count(done.tensors, 'tensor')}, {size(done.nbytes)}{files}")
    for alias, name in done.aliases.items():
        say(f"  {alias} is {name}, stored once and noted in the metadata")


def _step_and_out(step: str, out: Path | None) -> tuple[int | None, Path]:
    """The step, None for the newest clean one, and where it goes; of two arguments the first may have been left out."""
    if out is not None:
        return step_or_newest(step), out
    if step == NEWEST or step.isdecimal():
        raise typer.BadParameter(f"{step}: a step, and no file or folder to write it to")
    return None, Path(step)


def import_(
    source: Annotated[Path, typer.Argument(help="file, or folder of files", show_default=False)],
    where: Where,
    step: Annotated[int, typer.Option("--step", min=0, help="the number that the step gets", show_default=False)],
    only: Only = None,
    rename: Rename = None,
    dtype: CastTo = None,
    root: Annotated[
        str, typer.Option("--root", metavar="NAME", help="name that goes before each tensor's; '' for whole names")
    ] = "model",
    key: Annotated[
        str | None, typer.Option("--key", metavar="NAME", help="of a checkpoint of several things, take this one alone")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help=f"what it is: {', '.join(get_args(ImportFormat))}",
            show_default="what it looks like",
        ),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="a name for the run")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="take the place of a step of that number")] = False,
    json: Json = False,
) -> None:
    """Store somebody's checkpoint as a step, for `restore(only="model.*")` and `load`. No code of it is run.

    Of safetensors and torch.save files, Hugging Face folders, and folders of DCP and torch_checkpointing.
    """
    options = ImportOptions(
        only=tuple(only) if only else None,
        rename=renames(rename),
        dtype=dtype,
        root=root,
        key=key,
        format=cast("ImportFormat | None", format),
        run=run,
        replace=replace,
    )
    with progress("importing", json=json) as meter:
        done = exchange.import_file(source, where, step, options, progress=meter)
    if json:
        emit_json(msgspec.to_builtins(done))
    else:
        say(f"{source} → step {done.step} of {done.where}: {count(done.tensors, 'tensor')}, {size(done.nbytes)}")
