"""A step as a torch.save file that `torch.load(weights_only=True)` reads, for people who do not have zerostall."""

from __future__ import annotations

import argparse
import os
import types
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from zerostall.core.dtypes import DTYPES
from zerostall.errors import CapabilityError, StorageError
from zerostall.flow.catalog import opened_run
from zerostall.flow.export import Exported, Selection, elements, once, opened_image, refuse_inside
from zerostall.flow.new_file import NewFile, new_file
from zerostall.telemetry import log
from zerostall.trainer.exchange.loading import whole
from zerostall.trainer.state import tensors
from zerostall.trainer.state.load import tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerostall.core.contents import Content
    from zerostall.flow.catalog import Progress
    from zerostall.flow.image_reader import ImageReader

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size}
)
_DICTS = (dict, Counter)


def export_pt(
    where: str | os.PathLike[str],
    step: int | None,
    out: str | os.PathLike[str],
    *,
    only: str | Sequence[str] | None = None,
    root: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a step (None: the newest clean one) as one torch.save file.

    Without `only`, what was saved, as nested dicts and lists: `{"model": {...}, "optimizer": {...}}`, with `root` the
    one below that name. Values of types that such files may not hold become the nearest that they may: a deque a list,
    a path a text. With `only`, a flat dict of the tensors with such names. Aliases share memory, as they did.
    Memory: twice the size of the step.

    Raises:
        as `flow.export.export_safetensors`.
    """
    with opened_run(where) as disk, opened_image(disk, step) as reader:
        refuse_inside(disk, Path(out))
        record = reader.stored.record
        if only is not None:
            chosen = Selection.of(only, root).names(reader.stored.layout)
            state: object = _flat(reader, chosen)
        else:
            state = _nested(reader, root)
        if progress is not None:
            progress(record.nbytes, record.nbytes)
        with new_file(Path(out), overwrite=overwrite, nbytes=record.nbytes if only is None else 0) as file:
            _save(state, file)
        nbytes = Path(out).stat().st_size
        return Exported(str(Path(out).absolute()), record.step, _count(state), {}, nbytes)


def _save(state: object, file: NewFile) -> None:
    with os.fdopen(os.dup(file.fd), "wb") as stream:
        try:
            torch.save(state, stream)
        except RuntimeError as error:  # its writer hides what the disk said
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            raise StorageError(f"cannot write {file.path}: {str(reason).splitlines()[0]}") from error


def _nested(reader: ImageReader, root: str | None) -> object:
    found = tree(reader.stored, memoryview(whole(reader)))
    if root is not None and root not in found:
        raise ValueError(f"root {root}: names begin with {', '.join(found) or 'nothing'}")
    changed: set[str] = set()
    state = _plain(found if root is None else found[root], changed)
    if changed:
        log.info("in this kind of file, values of these types become plainer ones: %s", ", ".join(sorted(changed)))
    return state


def _flat(reader: ImageReader, chosen: dict[str, Content]) -> dict[str, torch.Tensor]:
    kept, aliases = once(chosen)
    state: dict[str, torch.Tensor] = {}
    for name, content in kept.items():
        data = bytearray()
        for piece in elements(reader, content):
            data += piece
        made = torch.empty(content.shape, dtype=_dtype(content))
        if data:
            made.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
        state[name] = made
    return state | {alias: state[name] for alias, name in aliases.items()}


def _dtype(content: Content) -> torch.dtype:
    try:
        return tensors.torch_dtype(DTYPES[content.dtype].name)
    except AttributeError:
        raise CapabilityError(
            f"{content.name} is of type {content.dtype}, which this torch ({torch.__version__}) does not have"
        ) from None


def _plain(value: object, changed: set[str]) -> object:
    kind = type(value)
    if kind in _PLAIN or kind is torch.Tensor:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if tensors.is_array(value):
        return _array(value, changed)
    if isinstance(value, OrderedDict):
        return OrderedDict((_key(key, changed), _plain(item, changed)) for key, item in value.items())
    if isinstance(value, _DICTS):
        if kind is not dict:
            changed.add(kind.__name__)
        return {_key(key, changed): _plain(item, changed) for key, item in value.items()}
    if kind in (list, deque):
        if kind is deque:
            changed.add("deque")
        return [_plain(item, changed) for item in cast("list[object]", value)]
    if kind is tuple:
        return tuple(_plain(item, changed) for item in cast("tuple[object, ...]", value))
    if kind in (set, frozenset):
        return {_plain(item, changed) for item in cast("set[object]", value)}
    changed.add(kind.__name__)
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
        return _plain(vars(value), changed)
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


def _key(key: object, changed: set[str]) -> object:
    return key if type(key) in _PLAIN or type(key) is tuple else _plain(key, changed)


def _array(value: object, changed: set[str]) -> object:
    changed.add("numpy.ndarray")
    try:
        return torch.from_numpy(value).clone()  # pyright: ignore[reportArgumentType]
    except TypeError:  # texts and times
        return cast("list[object]", value.tolist())  # pyright: ignore[reportAttributeAccessIssue]


def _count(state: object) -> int:
    if isinstance(state, torch.Tensor):
        return 1
    if isinstance(state, dict):
        return sum(_count(item) for item in state.values())
    return sum(_count(item) for item in state) if isinstance(state, (list, tuple)) else 0
