"""A torch.save file, whoever wrote it, as a step of a run.

Read with `weights_only=True`: no code of the file's is run.
"""

from __future__ import annotations

import errno
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from zerostall import native
from zerostall.errors import FormatError, SnapshotNotFoundError, StorageError
from zerostall.flow.importing import Imported, store
from zerostall.tiers.files import opened
from zerostall.trainer.captures import plan_of
from zerostall.trainer.state import State

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerostall.flow.catalog import Progress

REST = "rest"
"""Root of what lies at the outermost level of a file and is neither a tensor nor a container."""


def import_pt(
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
    """Store a torch.save file as a step of the run in `where`.

    A dict of tensors is the state of a module: it becomes `root`, and `restore(only=...)` puts it back into one. A dict
    of such dicts and other things becomes one root each, under the names it has; `key` takes one of them alone, as
    `root`. Memory: three times the size of the file.

    Raises:
        as `flow.importing.import_safetensors`, and
        StateError: it holds something that cannot be stored; names it.
    """
    path = Path(source)
    roots = _roots(_chosen(_loaded(path), key, path), root)
    state = State(roots, rng=False)
    survey = state.survey()
    small = state.values(survey).encode()
    layout = survey.layout

    def fill(segment: native.Segment, pool: native.Pool) -> None:
        sources = native.Tensors(survey.tensors, [False] * len(survey.tensors))
        sources.refresh()
        native.Capture(pool, plan_of(layout), sources, segment.address, at_once=[]).wait(None)
        if progress is not None:
            progress(layout.nbytes, layout.nbytes)

    return store(where, step, layout, small, fill, run=run, replace=replace)


def _loaded(path: Path) -> object:
    try:
        with opened(path.resolve()) as fd, os.fdopen(os.dup(fd), "rb") as file, warnings.catch_warnings():
            # What is sparse is refused further on; what torch says of its cost helps nobody.
            warnings.filterwarnings("ignore", message="Validating sparse tensor")
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise SnapshotNotFoundError(f"{path} does not exist") from None
    except pickle.UnpicklingError as error:
        raise FormatError(
            f"{path} is damaged, or cannot be read without running code from it: {_reason(error)}",
            hint="if you trust it, load it yourself and save a plain dict of tensors",
        ) from None
    except (StorageError, FormatError):
        raise
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a seek to where nothing is
            raise StorageError(f"cannot read {path}: {error.strerror or error}", errno=error.errno) from error
        raise FormatError(f"{path} is no torch.save file, or a damaged one: {_reason(error)}") from None


# What torch.load raises for files that are not what they claim to be.
_DAMAGED = (
    *(RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError),
    *(OSError, OverflowError, MemoryError, zipfile.BadZipFile),
)


def _reason(error: Exception) -> str:
    """The sentence that says what is wrong; torch puts advice around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "Unsupported" in line), lines[0] if lines else "")
    told = told[max(0, told.find("Unsupported")) :].split(". ")[0]
    return told[:200] or type(error).__name__


def _chosen(loaded: object, key: str | None, path: Path) -> object:
    if key is None:
        return loaded
    if not isinstance(loaded, dict) or key not in loaded:
        there = ", ".join(map(str, list(loaded)[:20])) if isinstance(loaded, dict) else f"a {type(loaded).__name__}"
        raise ValueError(f"{path} has no {key!r}; it holds {there}")
    return loaded[key]


def _roots(loaded: object, root: str) -> dict[str, object]:
    if _is_module_state(loaded):
        return {root: _module(cast("Mapping[str, torch.Tensor]", loaded))}
    if not isinstance(loaded, dict):
        return {root: loaded if isinstance(loaded, (list, torch.Tensor)) else {"value": loaded}}
    if not all(type(name) is str and name and not name.startswith("__") for name in loaded):
        return {root: loaded}
    roots: dict[str, object] = {}
    rest: dict[str, object] = {}
    for name, value in loaded.items():
        if _is_module_state(value):
            roots[name] = _module(value)
        elif isinstance(value, (dict, list, torch.Tensor)):
            roots[name] = value
        else:
            rest[name] = value
    if rest:
        roots[_free(REST, roots)] = rest
    return roots


def _free(name: str, taken: Mapping[str, object]) -> str:
    while name in taken:
        name += "_"
    return name


def _is_module_state(value: object) -> bool:
    """Whether a value looks like what a module's state_dict() gives: tensors by dotted names, at least one."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(type(key) is str and isinstance(item, torch.Tensor) for key, item in value.items())
    )


def _module(state: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose state_dict() is this, so that names and aliases come out as those of a real one."""
    outermost = torch.nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        module = outermost
        for part in path:
            # Past register_module and register_buffer, which refuse names that a file may well have.
            child = module._modules.get(part)
            if child is None:
                child = module._modules[part] = torch.nn.Module()
            module = child
        module._buffers[last] = tensor.detach()
    return outermost
