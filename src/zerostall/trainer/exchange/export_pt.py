"""A step as a torch.save file that `torch.load(weights_only=True)` reads, for people who do not have zerostall."""

from __future__ import annotations

import argparse
import os
import types
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, cast

import torch

from zerostall.core.dtypes import DTYPES
from zerostall.errors import CapabilityError, StorageError
from zerostall.flow.export import Chosen, Exported, chosen, refuse_inside
from zerostall.flow.new_file import NewFile, new_file
from zerostall.telemetry import log
from zerostall.trainer.exchange.casting import convert
from zerostall.trainer.state import tensors
from zerostall.trainer.state.load import tree

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.core.exchange import ExportOptions
    from zerostall.flow.catalog import Progress
    from zerostall.flow.readable import Readable
    from zerostall.flow.whole_step import WholeStep

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size}
)
_DICTS = (dict, Counter)


def export_pt(step: WholeStep, out: Path, options: ExportOptions, progress: Progress | None = None) -> Exported:
    """Write a step as one torch.save file.

    Where names are neither chosen nor changed, what was saved, as nested dicts and lists:
    `{"model": {...}, "optimizer": {...}}`, with `root` the one below that name. Values of types that such files may not
    hold become the nearest that they may: a deque a list, a path a text. Else a flat dict of the tensors with such
    names. Aliases share memory, as they did. Memory: twice the size of the step.

    Raises:
        as `flow.export.export_safetensors`.
    """
    refuse_inside(step, out)
    if options.only is not None or options.rename or options.weights:
        found = chosen(step, options, convert)
        state: object = _flat(found)
        nbytes = sum(piece.nbytes for piece in found.pieces.values())
    else:
        state, nbytes = _nested(step, options), 0
    size = sum(stored.record.nbytes for stored in step.ranks)
    if progress is not None:
        progress(size, size)
    with new_file(out, overwrite=options.overwrite, nbytes=nbytes) as file:
        _save(state, file)
    return Exported(str(out.absolute()), step.step, _count(state), {}, out.stat().st_size)


def _save(state: object, file: NewFile) -> None:
    with os.fdopen(os.dup(file.fd), "wb") as stream:
        try:
            torch.save(state, stream)
        except RuntimeError as error:  # its writer hides what the disk said
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            raise StorageError(f"cannot write {file.path}: {str(reason).splitlines()[0]}") from error


def _nested(step: WholeStep, options: ExportOptions) -> object:
    merged = step.merged()
    found = tree(merged, step.image(merged), step.ranks)
    root = options.root
    if root is not None and root not in found:
        raise ValueError(f"root {root}: names begin with {', '.join(found) or 'nothing'}")
    plain = Plain(options)
    state = plain.of(found if root is None else found[root])
    if plain.changed:
        kinds = ", ".join(sorted(plain.changed))
        log.info("in this kind of file, values of these types become plainer ones: %s", kinds)
    return state


def _flat(found: Chosen) -> dict[str, torch.Tensor]:
    state = {name: read(piece) for name, piece in found.pieces.items()}
    return state | {alias: state[name] for alias, name in found.aliases.items()}


def read(piece: Readable) -> torch.Tensor:
    """A piece as a tensor in new memory of its own."""
    try:
        dtype = tensors.torch_dtype(DTYPES[piece.dtype].name)
    except AttributeError:
        raise CapabilityError(
            f"{piece.name} is of type {piece.dtype}, which this torch ({torch.__version__}) does not have"
        ) from None
    if not piece.nbytes:
        return torch.empty(piece.shape, dtype=dtype)
    data = bytearray(piece.nbytes)
    piece.read_into(memoryview(data), 0)
    return torch.frombuffer(data, dtype=dtype).reshape(piece.shape)


class Plain:
    """Makes of values what such a file may hold, and notes the types that this changes."""

    def __init__(self, options: ExportOptions) -> None:
        self.changed: set[str] = set()
        self._options = options
        self._cast: dict[tuple[object, ...], torch.Tensor] = {}

    def of(self, value: object) -> object:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value if kind is torch.Tensor else value.detach().clone())
        if kind in _PLAIN:
            return value
        if tensors.is_array(value):
            return self._array(value)
        if isinstance(value, OrderedDict):
            return OrderedDict((self._key(key), self.of(item)) for key, item in value.items())
        if isinstance(value, _DICTS):
            if kind is not dict:
                self.changed.add(kind.__name__)
            return {self._key(key): self.of(item) for key, item in value.items()}
        if kind in (list, deque):
            if kind is deque:
                self.changed.add("deque")
            return [self.of(item) for item in cast("list[object]", value)]
        if kind is tuple:
            return tuple(self.of(item) for item in cast("tuple[object, ...]", value))
        if kind in (set, frozenset):
            return {self.of(item) for item in cast("set[object]", value)}
        self.changed.add(kind.__name__)
        if isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
            return self.of(vars(value))
        item = getattr(value, "item", None)
        return item() if callable(item) else str(value)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        wanted = self._options.cast(str(tensor.dtype).removeprefix("torch."))
        dtype = tensors.torch_dtype(wanted)
        if dtype == tensor.dtype:
            return tensor
        # Names of one tensor stay names of one tensor.
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if not tensor.numel() or same not in self._cast:
            self._cast[same] = tensor.to(dtype)
        return self._cast[same]

    def _key(self, key: object) -> object:
        return key if type(key) in _PLAIN or type(key) is tuple else self.of(key)

    def _array(self, value: object) -> object:
        self.changed.add("numpy.ndarray")
        try:
            return self._tensor(torch.from_numpy(value).clone())  # pyright: ignore[reportArgumentType]
        except TypeError:  # texts and times
            return cast("list[object]", value.tolist())  # pyright: ignore[reportAttributeAccessIssue]


def _count(state: object) -> int:
    if isinstance(state, torch.Tensor):
        return 1
    if isinstance(state, dict):
        return sum(_count(item) for item in state.values())
    return sum(_count(item) for item in state) if isinstance(state, (list, tuple)) else 0
