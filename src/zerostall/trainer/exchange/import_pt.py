"""Files that torch.save wrote in its old way (before release 1.6, or when told so), as a step of a run.

Only torch can read them, and it does so whole, with `weights_only=True`: no code of the file's is run.
"""

from __future__ import annotations

import errno
import os
import pickle
import warnings
from typing import TYPE_CHECKING, cast

import torch

from zerostall.core.mosaic import Tile
from zerostall.errors import FormatError, SnapshotNotFoundError, StateError, StorageError
from zerostall.flow.forest import Forest
from zerostall.flow.importing import Imported, chosen_entry, store_tensors
from zerostall.flow.readable import Plain
from zerostall.flow.torch_archive import Loose
from zerostall.tiers.files import opened, real
from zerostall.trainer.exchange.casting import convert
from zerostall.trainer.state.tensors import DTYPE_NAMES

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.core.exchange import ImportOptions
    from zerostall.flow.catalog import Progress


def import_pt(
    path: Path, where: str | os.PathLike[str], step: int, options: ImportOptions, *, progress: Progress | None = None
) -> Imported:
    """As `flow.importing.import_foreign`. Memory: twice the size of the file."""
    loaded = _Leaves(path).of(_loaded(path))
    harvest = Forest(options, convert).take(chosen_entry(loaded, options.key, path))
    return store_tensors(where, step, harvest, run=options.run, replace=options.replace, progress=progress)


class _Leaves:
    """Puts what describes a tensor in the place of each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return self._loose(value.detach())
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self.of(item)
            return value
        if type(value) in (list, tuple):
            items = [self.of(item) for item in cast("list[object]", value)]
            return items if type(value) is list else tuple(items)
        return value

    def _loose(self, tensor: torch.Tensor) -> Loose:
        dtype = DTYPE_NAMES.get(tensor.dtype)
        if dtype is None or tensor.layout is not torch.strided:
            raise StateError(f"{self._path} holds a tensor that cannot be stored: {tensor.dtype}, {tensor.layout}")
        shape = tuple(tensor.shape)
        place = (tensor.data_ptr(), dtype, shape, tensor.stride())
        whole = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
        source = Plain(cast("memoryview", whole.numpy().data) if tensor.numel() else b"")
        return Loose(dtype, shape, (Tile.whole(shape, 0, 0),), (source,), place)


def _loaded(path: Path) -> object:
    try:
        with opened(real(path)) as fd, os.fdopen(os.dup(fd), "rb") as file, warnings.catch_warnings():
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
    except Exception as error:  # whatever torch stumbles over in a damaged file, struct.error for one
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a seek to where nothing is
            raise StorageError(f"cannot read {path}: {error.strerror or error}", errno=error.errno) from error
        raise FormatError(f"{path} is no torch.save file, or a damaged one: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The sentence that says what is wrong; torch puts advice around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "Unsupported" in line), lines[0] if lines else "")
    told = told[max(0, told.find("Unsupported")) :].split(". ")[0][:200]
    if isinstance(error, (pickle.UnpicklingError, RuntimeError, OSError)) and told:
        return told
    return f"torch stumbles over it ({type(error).__name__}{': ' * bool(told)}{told})"
