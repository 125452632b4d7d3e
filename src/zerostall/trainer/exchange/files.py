"""To and from other people's files. The ending says which kind; torch is imported for its own kind only."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.core.exchange import ExportOptions, ImportOptions
from zerostall.errors import CapabilityError, SnapshotNotFoundError
from zerostall.flow.export import Exported, export_huggingface, export_safetensors
from zerostall.flow.foreign_torch import insist_on_old_way, is_archive
from zerostall.flow.importing import Imported, format_of, import_foreign
from zerostall.flow.present import again
from zerostall.flow.whole_step import opened_step

if TYPE_CHECKING:
    import os

    from zerostall.core.inert import Global, Made
    from zerostall.flow.catalog import Progress

_AS_IT_IS = ExportOptions()
_ALL_OF_IT = ImportOptions()


def export(
    where: str | os.PathLike[str],
    step: int | None,
    out: str | os.PathLike[str],
    options: ExportOptions = _AS_IT_IS,
    *,
    progress: Progress | None = None,
) -> Exported:
    """Write a step for other tools: a safetensors file, a Hugging Face folder, a DCP folder, or a torch.save file.

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
    if not isinstance(options, ExportOptions):
        raise TypeError(f"options={options!r}: say zerostall.ExportOptions(...)")
    path = Path(out)
    kind = options.format_of(path.name)
    convert = None
    if kind in ("dcp", "torch") or options.dtype is not None:
        _require_torch(f"{path}: the format {kind}" if options.dtype is None else f"{path}: another dtype")
        from zerostall.trainer.exchange.casting import convert

    def write() -> Exported:
        with opened_step(where, step) as whole:
            match kind:
                case "safetensors":
                    return export_safetensors(whole, path, options, convert, progress)
                case "huggingface":
                    return export_huggingface(whole, path, options, convert, progress)
                case "torch":
                    from zerostall.trainer.exchange.export_pt import export_pt

                    return export_pt(whole, path, options, progress)
                case "dcp":
                    from zerostall.trainer.exchange.export_dcp import export_dcp

                    return export_dcp(whole, path, options, progress)

    return again(write)


def import_file(
    source: str | os.PathLike[str],
    where: str | os.PathLike[str],
    step: int,
    options: ImportOptions = _ALL_OF_IT,
    *,
    progress: Progress | None = None,
) -> Imported:
    """Store somebody's checkpoint, a file or a folder, as a step that `restore` and `load` read. No code of it is run.

    >>> zerostall.import_file("gpt.safetensors", "runs/tuned", 0)
    >>> zerostall.Checkpointer("runs/tuned", model=model, optimizer=optimizer).restore(only="model.*")

    Args:
        source: a safetensors or torch.save file, or a folder of Hugging Face, DCP or torch_checkpointing.
        where: the run's folder, created when absent.
        step: as which step.
        options: what of it, under which names, as what type.
        progress: called with (bytes done, bytes in all).

    Raises:
        SnapshotNotFoundError: there is no such file or folder.
        FormatError: it is not what it claims to be, or damaged, or would need code of its own to be read.
        StateError: it holds something that cannot be stored; names it.
        StepExistsError: the step is there.
        RunMismatchError: the folder belongs to a run of another name.
        RunBusyError: an agent or another import writes to the folder.
        ValueError: nothing is chosen.
    """
    if not isinstance(options, ImportOptions):
        raise TypeError(f"options={options!r}: say zerostall.ImportOptions(...)")
    path = Path(source)
    if not path.exists():
        raise SnapshotNotFoundError(f"{path} does not exist")
    if format_of(path, options) == "torch" and not is_archive(path):
        insist_on_old_way(path)
        _require_torch(f"{path}: a file that torch.save wrote in its old way")
        from zerostall.trainer.exchange.import_pt import import_pt

        return import_pt(path, where, step, options, progress=progress)
    convert = None
    if options.dtype is not None:
        _require_torch(f"{path}: another dtype")
        from zerostall.trainer.exchange.casting import convert
    return import_foreign(path, where, step, options, convert=convert, inert=_inert, progress=progress)


def _inert(value: Made | Global) -> object:
    _require_torch(f"a value of torch's ({'.'.join(value.name)})")
    from zerostall.trainer.exchange.casting import inert

    return inert(value)


def _require_torch(what: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise CapabilityError(f"{what} needs torch, which is not installed", hint="pip install torch")
