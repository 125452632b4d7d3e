"""To and from other people's files. The ending says which kind; torch is imported for its own kind only."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.core.exchange import ExportOptions
from zerostall.errors import CapabilityError
from zerostall.flow.export import Exported, export_huggingface, export_safetensors
from zerostall.flow.importing import Imported, import_safetensors
from zerostall.flow.whole_step import opened_step

if TYPE_CHECKING:
    import os

    from zerostall.flow.catalog import Progress

_AS_IT_IS = ExportOptions()


def export(
    where: str | os.PathLike[str],
    step: int | None,
    out: str | os.PathLike[str],
    options: ExportOptions = _AS_IT_IS,
    *,
    progress: Progress | None = None,
) -> Exported:
    """Write a step for other tools: a safetensors file, a Hugging Face folder, or a torch.save file.

    >>> zerostall.export("runs/gpt", None, "gpt.safetensors", zerostall.ExportOptions(weights=True, dtype="bfloat16"))

    What is written is there whole or not at all; every byte is checked on the way. Steps of many ranks come out as if
    one had held all. See docs/interchange.md for how tied weights and odd types are written.

    Args:
        where: the run's folder.
        step: which step; None is the newest clean one.
        out: the file or folder to write.
        options: what of it, under which names, as what type, in which format.
        progress: called with (bytes done, bytes in all).

    Raises:
        SnapshotNotFoundError: no such step.
        CorruptError: the step is damaged.
        StorageError: `out` is there already, or cannot be written.
        ValueError: nothing is chosen, or `out` has an ending that says no format.
    """
    path = Path(out)
    kind = options.format_of(path.name)
    convert = None
    if kind == "torch" or options.dtype is not None:
        _require_torch(f"{path}: the format {kind}" if options.dtype is None else f"{path}: another dtype")
        from zerostall.trainer.exchange.casting import convert
    with opened_step(where, step) as whole:
        match kind:
            case "safetensors":
                return export_safetensors(whole, path, options, convert, progress)
            case "huggingface":
                return export_huggingface(whole, path, options, convert, progress)
            case "torch":
                from zerostall.trainer.exchange.export_pt import export_pt

                return export_pt(whole, path, options, progress)


def import_file(
    source: str | os.PathLike[str],
    where: str | os.PathLike[str],
    step: int,
    *,
    root: str = "model",
    key: str | None = None,
    run: str | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Store a safetensors or torch.save file, whoever wrote it, as a step that `restore` and `load` read.

    >>> zerostall.import_file("gpt.safetensors", "runs/tuned", 0)
    >>> zerostall.Checkpointer("runs/tuned", model=model, optimizer=optimizer).restore(only="model.*")

    Args:
        source: the file; any but `.safetensors` is taken for torch.save's, and read with `weights_only=True`.
        where: the run's folder, created when absent.
        step: as which step.
        root: the name that goes before each tensor's. Empty, for safetensors: the names are whole ones already.
        key: of a torch.save file, take this entry alone.
        run: a name for the run, as `Checkpointer(run=...)` gives it.
        replace: a step of that number may be replaced.
        progress: called with (bytes done, bytes in all).

    Raises:
        SnapshotNotFoundError: there is no such file.
        FormatError: it is none, or damaged, or would need code of its own to be read.
        StepExistsError: the step is there.
        RunMismatchError: the folder belongs to a run of another name.
        RunBusyError: an agent or another import writes to the folder.
    """
    if Path(source).suffix == ".safetensors":
        if key is not None:
            raise ValueError(f"{source} has no entries to choose from: leave out key")
        return import_safetensors(source, where, step, root=root, run=run, replace=replace, progress=progress)
    _require_torch(f"{source}: this kind of file")
    from zerostall.trainer.exchange.import_pt import import_pt

    return import_pt(source, where, step, root=root, key=key, run=run, replace=replace, progress=progress)


def _require_torch(what: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise CapabilityError(f"{what} needs torch, which is not installed", hint="pip install torch")
