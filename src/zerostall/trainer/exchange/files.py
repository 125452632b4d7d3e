"""To and from other people's files. The ending says which kind; torch is imported for its own kind only."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.errors import CapabilityError
from zerostall.flow.export import Exported, export_safetensors
from zerostall.flow.importing import Imported, import_safetensors

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from zerostall.flow.catalog import Progress

TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


def export(
    where: str | os.PathLike[str],
    step: int | None,
    out: str | os.PathLike[str],
    *,
    only: str | Sequence[str] | None = None,
    root: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a step as one file for other tools: `.safetensors`, or `.pt` as torch.save does.

    >>> zerostall.export("runs/gpt", None, "gpt.safetensors", root="model")

    The file is there whole or not at all; every byte is checked on the way. See `flow.export` for how tied weights and
    odd types are written, and `export_pt` for the other kind.

    Args:
        where: the run's folder.
        step: which step; None is the newest clean one.
        out: the file to write.
        only: patterns (`model.encoder.*`) of names to take.
        root: take what lies below this name, and leave the name out: the file then has the names of `state_dict()`.
        overwrite: the file may be there already.
        progress: called with (bytes done, bytes in all).

    Raises:
        SnapshotNotFoundError: no such step.
        CorruptError: the step is damaged.
        StorageError: `out` is there already, or cannot be written.
        ValueError: nothing is selected, or `out` has another ending.
    """
    if Path(out).suffix == ".safetensors":
        write = export_safetensors
    elif Path(out).suffix in TORCH_ENDINGS:
        _require_torch(out)
        from zerostall.trainer.exchange.export_pt import export_pt as write
    else:
        raise ValueError(f"{out} ends neither in .safetensors nor in {', '.join(TORCH_ENDINGS)}")
    return write(where, step, out, only=only, root=root, overwrite=overwrite, progress=progress)


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
    _require_torch(source)
    from zerostall.trainer.exchange.import_pt import import_pt

    return import_pt(source, where, step, root=root, key=key, run=run, replace=replace, progress=progress)


def _require_torch(path: str | os.PathLike[str]) -> None:
    if importlib.util.find_spec("torch") is None:
        raise CapabilityError(
            f"{path}: this kind of file needs torch, which is not installed", hint="pip install torch"
        )
