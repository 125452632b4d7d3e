"""Other people's safetensors files, and Hugging Face folders of them, as tensors to be read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import safetensors
from zerostall.core.dtypes import DTYPES
from zerostall.core.mosaic import Tile
from zerostall.core.quoting import clip, quote
from zerostall.errors import FormatError
from zerostall.flow.export import DTYPES_KEY, INDEX
from zerostall.flow.image_reader import read_header
from zerostall.flow.readable import OpenFile
from zerostall.flow.torch_archive import Loose
from zerostall.tiers.files import opened, read_file, real

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

_MAX_INDEX = 1 << 28
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@ -]{0,250}")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_INDEX = msgspec.json.Decoder(_Index)


def plain_name(name: str, where: Path) -> str:
    """A file's name that a file of somebody's gives. FormatError for one that could lead anywhere else."""
    if not _FILE.fullmatch(name) or name.endswith((".", " ")):
        raise FormatError(f"{where} names a file {quote(name)}, which could lie anywhere")
    return name


def read_safetensors(path: Path, stack: ExitStack) -> dict[str, Loose]:
    """The tensors of a file by name, aliases that its metadata notes included; it stays open in `stack`.

    Raises:
        FormatError: it is none, or damaged; names it.
        FileNotFoundError: there is none.
    """
    path = real(path)  # caches of downloads consist of links
    fd = stack.enter_context(opened(path))
    raw, size = read_header(fd, path)
    header = _decoded(raw, size, path)
    types = _true_types(header, path)
    file = (OpenFile(fd, path),)
    found: dict[str, Loose] = {}
    for tensor in header.tensors:
        dtype = DTYPES[types.get(tensor.name, tensor.dtype)]
        shape = tensor.shape
        if dtype.name != tensor.dtype and dtype.trailing:
            shape = shape[: len(shape) - len(dtype.trailing)]
        place = (str(path), tensor.offset, dtype.name, shape)
        found[tensor.name] = Loose(dtype.name, shape, (Tile.whole(shape, 0, tensor.offset),), file, place)
    for alias, base in header.metadata.items():
        if base in found and alias not in found:
            found[alias] = found[base]
    return found


def read_huggingface(index: Path, stack: ExitStack) -> dict[str, Loose]:
    """The tensors that an index says are in the shards beside it.

    Raises:
        FormatError: a file is damaged, is missing, or would lie outside of the folder.
    """
    try:
        shards = _INDEX.decode(read_file(real(index), _MAX_INDEX)).weight_map
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(f"{index} is no index of shards: {clip(error)}") from None
    files: dict[str, dict[str, Loose]] = {}
    found: dict[str, Loose] = {}
    for name, file in shards.items():
        if file not in files:
            try:
                files[file] = read_safetensors(index.parent / plain_name(file, index), stack)
            except FileNotFoundError:
                raise FormatError(f"{index} names {file}, which is missing") from None
        if name not in files[file]:
            raise FormatError(f"{index} says that {quote(name)} is in {file}, and it is not")
        found[name] = files[file][name]
    for held in files.values():  # aliases are noted beside their tensors
        names = {id(tensor): name for name, tensor in held.items() if name in found}
        found |= {alias: one for alias, one in held.items() if alias not in found and id(one) in names}
    return found


def index_in(folder: Path) -> Path | None:
    """The index of a Hugging Face folder, or its one file; None where the folder is none."""
    for name in (INDEX, "model.safetensors"):
        if (folder / name).exists():
            return folder / name
    single = sorted(folder.glob("*.safetensors"))
    return single[0] if len(single) == 1 else None


def _decoded(raw: bytes, size: int, path: Path) -> safetensors.Header:
    try:
        return safetensors.decode(raw, size)
    except FormatError as error:
        raise type(error)(f"{path}: {error.args[0]}", hint=error.hint) from None


def _true_types(header: safetensors.Header, path: Path) -> dict[str, str]:
    """Name → true type, for the tensors that our own export had to write under another type's code."""
    text = header.metadata.get(DTYPES_KEY, "{}")
    try:
        types = msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(f"{path}: the metadata {DTYPES_KEY} cannot be read: {error}") from None
    for tensor in header.tensors:
        true = DTYPES.get(types.get(tensor.name, tensor.dtype))
        if true is None or true.name == tensor.dtype:
            continue
        behind = tensor.shape[len(tensor.shape) - len(true.trailing) :]
        if true.code != DTYPES[tensor.dtype].code or behind != true.trailing:
            raise FormatError(f"{path}: tensor {tensor.name!r} cannot be of type {true.name}")
    return {name: true for name, true in types.items() if true in DTYPES}
