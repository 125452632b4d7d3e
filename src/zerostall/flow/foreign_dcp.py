"""Folders of torch.distributed.checkpoint, read without torch and without running anything of theirs.

`.metadata` is a pickle: only the classes that DCP writes there may be named in it, and they become inert records. Each
tensor's parts, and each value, are archives of torch.save in the `.distcp` files.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, cast

from zerostall.core import pickles
from zerostall.core.dtypes import DTYPES
from zerostall.core.inert import Global, Made
from zerostall.core.mosaic import Tile
from zerostall.core.quoting import clip, quote
from zerostall.core.safetensors import MAX_BYTES, MAX_RANK
from zerostall.errors import FormatError
from zerostall.flow.foreign_safetensors import plain_name
from zerostall.flow.readable import FileOnDemand
from zerostall.flow.torch_archive import Loose, read_archive
from zerostall.tiers.files import read_file

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.core.inert import Name
    from zerostall.flow.readable import Source

METADATA = ".metadata"

_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED: frozenset[Name] = frozenset(
    {
        *((_MODULE, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *((_MODULE, f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
        (_MODULE, "TensorProperties"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        *(("torch", name) for name in (*DTYPES, "Size", "strided")),
        *(("pathlib", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")),
        # As Python 3.13 spells the module.
        *(("pathlib._local", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    }
)
_MAX_LIST = 1_000_000


def read_dcp(folder: Path) -> dict[str, object]:
    """What was given to `dcp.save`, with `Loose` for its tensors.

    Raises:
        FormatError: it is no such folder, is damaged, or would need code to be run; names the file.
    """
    path = folder / METADATA
    if not path.exists():
        raise FormatError(f"{folder} is no folder of DCP: it holds no {METADATA}")
    metadata = pickles.read(read_file(path, pickles.MAX_PICKLE), _ALLOWED, source=str(path))
    if not _is(metadata, "Metadata"):
        raise FormatError(f"{path} is not the metadata of a DCP folder")
    reader = _Folder(folder, path, cast("Made", metadata))
    return nested(reader.items(), path)


class _Folder:
    def __init__(self, folder: Path, path: Path, metadata: Made) -> None:
        self._folder = folder
        self._path = path
        self._states = _dict(metadata.field("state_dict_metadata"), path)
        mapping = metadata.field("planner_data")
        self._paths = mapping if type(mapping) is dict else {}
        self._files: dict[str, FileOnDemand] = {}
        self._places: dict[tuple[str, tuple[int, ...] | None], Made] = {}
        for index, info in _dict(metadata.field("storage_data"), path).items():
            if not _is(index, "MetadataIndex") or not _is(info, "_StorageInfo"):
                raise self._damaged("an unknown kind of place")
            key = cast("Made", index)
            offset = key.field("offset")
            place = None if offset is None else _sizes(offset, path)
            self._places[_text(key.field("fqn"), path), place] = cast("Made", info)

    def items(self) -> list[tuple[tuple[str | int, ...], object]]:
        """Each leaf with the path that leads to it."""
        found: list[tuple[tuple[str | int, ...], object]] = []
        for key, entry in self._states.items():
            name = _text(key, self._path)
            if _is(entry, "TensorStorageMetadata"):
                leaf: object = self._tensor(name, cast("Made", entry))
            elif _is(entry, "BytesStorageMetadata"):
                leaf = self._archive(name, None)
            else:
                raise self._damaged(f"{quote(name)} is neither a tensor nor a value")
            found.append((self._steps(name), leaf))
        return found

    def _tensor(self, name: str, entry: Made) -> Loose:
        shape = _sizes(entry.field("size"), self._path)
        properties, chunks = entry.field("properties"), entry.field("chunks")
        if not _is(properties, "TensorProperties") or type(chunks) is not list:
            raise self._damaged(f"{quote(name)} does not say what it is")
        dtype = _dtype(cast("Made", properties))
        if dtype is None:
            raise self._damaged(f"{quote(name)} is of a type that is unknown here")
        tiles: list[Tile] = []
        sources: list[Source] = []
        for chunk in cast("list[object]", chunks):
            if not _is(chunk, "ChunkStorageMetadata"):
                raise self._damaged(f"a part of {quote(name)} is damaged")
            start = _sizes(cast("Made", chunk).field("offsets"), self._path)
            size = _sizes(cast("Made", chunk).field("sizes"), self._path)
            part = self._archive(name, start)
            if not isinstance(part, Loose) or (part.dtype, part.shape) != (dtype, size):
                raise self._damaged(f"of {quote(name)}, the part at {clip(start)} is not what was announced")
            tile = part.tiles[0]
            tiles.append(Tile(start, size, tile.strides, len(sources), tile.offset))
            sources.append(part.sources[0])
        held = sum(math.prod(box[1]) for box in {(tile.start, tile.shape) for tile in tiles})
        if held < math.prod(shape):
            raise self._damaged(f"of {quote(name)}, only {held} of {math.prod(shape)} elements are stored")
        return Loose(dtype, shape, tuple(tiles), tuple(sources))

    def _archive(self, name: str, start: tuple[int, ...] | None) -> object:
        info = self._places.get((name, start))
        if info is None:
            raise self._damaged(f"of {quote(name)}, it is not said where it lies")
        if info.field("transform_descriptors"):
            raise FormatError(f"{self._path}: {quote(name)} went through an extension (compression, say)")
        offset, length = info.field("offset"), info.field("length")
        if type(offset) is not int or type(length) is not int or not (offset >= 0 and length >= 0):
            raise self._damaged(f"{quote(name)} lies at no place")
        file = plain_name(_text(info.field("relative_path"), self._path), self._path)
        if file not in self._files:
            self._files[file] = FileOnDemand(self._folder / file)
        if offset + length > self._files[file].nbytes:
            raise self._damaged(f"{quote(name)} lies behind the end of {file}")
        return read_archive(self._files[file], offset, length, f"{self._folder / file}, {clip(name)}")

    def _steps(self, name: str) -> tuple[str | int, ...]:
        steps = self._paths.get(name)
        if type(steps) is tuple and steps and all(type(step) in (str, int) for step in steps):
            return cast("tuple[str | int, ...]", steps)
        return (name,)

    def _damaged(self, why: str) -> FormatError:
        return FormatError(f"{self._path} is damaged: {why}")


def nested(items: list[tuple[tuple[str | int, ...], object]], path: Path | str) -> dict[str, object]:
    """The tree whose leaves have these paths: dicts for texts and lists for numbers.

    FormatError, naming `path`, where two of them contradict each other.
    """
    top: dict[object, object] = {}
    lists: list[tuple[dict[object, object], object]] = []
    for steps, leaf in items:
        node = top
        for step, behind in itertools.pairwise(steps):
            below = node.get(step)
            if below is None:
                below = node[step] = {}
                if type(behind) is int:
                    lists.append((node, step))
            if type(below) is not dict:
                raise FormatError(f"{path} is damaged: {clip(steps)} leads through a value")
            node = cast("dict[object, object]", below)
        if steps[-1] in node:
            raise FormatError(f"{path} is damaged: {clip(steps)} is there twice")
        node[steps[-1]] = leaf
    for holder, key in reversed(lists):
        items_now = cast("dict[object, object]", holder[key])
        if not all(type(number) is int and 0 <= number < _MAX_LIST for number in items_now):
            raise FormatError(f"{path} is damaged: a list with other keys than numbers")
        if len(items_now) == max(cast("dict[int, object]", items_now)) + 1:
            holder[key] = [items_now[number] for number in range(len(items_now))]
    if not all(type(name) is str for name in top):
        raise FormatError(f"{path} is damaged: a name that is no text")
    return cast("dict[str, object]", top)


def _is(value: object, name: str) -> bool:
    return type(value) is Made and value.name[1] == name


def _dict(value: object, path: Path) -> dict[object, object]:
    if type(value) is not dict:
        raise FormatError(f"{path} is damaged: no dict where one belongs")
    return cast("dict[object, object]", value)


def _text(value: object, path: Path) -> str:
    if type(value) is not str:
        raise FormatError(f"{path} is damaged: no text where one belongs")
    return value


def _sizes(value: object, path: Path) -> tuple[int, ...]:
    if _is(value, "Size") and cast("Made", value).args:
        value = cast("Made", value).args[0]
    sizes = tuple(cast("tuple[int, ...]", value)) if type(value) in (tuple, list) else (-1,)
    if len(sizes) > MAX_RANK or not all(type(size) is int and 0 <= size <= MAX_BYTES for size in sizes):
        raise FormatError(f"{path} is damaged: no shape where one belongs")
    return sizes


def _dtype(properties: Made) -> str | None:
    first = None
    if type(properties.state) is tuple and properties.state:
        first = cast("tuple[object, ...]", properties.state)[0]
    elif type(properties.state) is dict:
        first = properties.field("dtype")
    if type(first) is Global and first.name[0] == "torch" and first.name[1] in DTYPES:
        return first.name[1]
    return None
