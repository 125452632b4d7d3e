"""A step as safetensors, for people who do not have zerostall: one file, or a Hugging Face folder of shards.

Each tensor is written once and whole, whatever ranks its parts lie with. Another name for the very same tensor (tied
weights) is not written again but noted in the file's `__metadata__` as `{"alias": "name"}`, as
`safetensors.torch.save_model` does and as loaders of tied models expect. Views of another kind (a slice, a transposed
tensor) are written out in full under their own names. Types that have no safetensors code of their own are written
under one of the same size; `zerostall.dtypes` in the metadata then tells the true ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from zerostall.core import safetensors
from zerostall.core.dtypes import CODES, DTYPES
from zerostall.core.exchange import SHARD_BYTES
from zerostall.core.safetensors import Slot
from zerostall.errors import CapabilityError
from zerostall.flow.new_file import new_file
from zerostall.flow.new_folder import new_folder
from zerostall.flow.pour import Place, pour
from zerostall.flow.readable import Cast, Plain
from zerostall.flow.whole_step import once
from zerostall.tiers.files import real

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerostall.core.exchange import ExportOptions
    from zerostall.flow.catalog import Progress
    from zerostall.flow.new_file import NewFile
    from zerostall.flow.readable import Convert, Readable
    from zerostall.flow.whole_step import WholeStep

DTYPES_KEY = "zerostall.dtypes"
"""Metadata key of the true types, a JSON object of name to type, for those that the header cannot tell."""

INDEX = "model.safetensors.index.json"
"""The file of a Hugging Face folder that says which tensor is in which shard."""

_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        path: the file or folder.
        step: of which step.
        tensors: how many tensors it holds.
        aliases: names that are only noted, and what they are noted as aliases of.
        nbytes: size of all files.
        files: how many there are.
    """

    path: str
    step: int
    tensors: int
    aliases: dict[str, str]
    nbytes: int
    files: int = 1


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tensors to write.

    Attributes:
        pieces: by the names they get, in natural order.
        aliases: other names of theirs.
    """

    step: int
    pieces: dict[str, Readable]
    aliases: dict[str, str]


def chosen(step: WholeStep, options: ExportOptions, convert: Convert | None = None) -> Chosen:
    """What the options choose of a step. `convert` changes types, where they ask for that.

    Raises:
        ValueError: nothing is chosen, two would have one name, or the file would lie in the run's own folder.
    """
    named = options.named(step.kinds, step.tensors)
    kept, aliases = once({new: step.tensors[name] for new, name in named.items()})
    pieces: dict[str, Readable] = {}
    for name in named:
        if name in kept:
            piece: Readable = step.readable(kept[name], name)
            dtype = options.cast(piece.dtype)
            if dtype != piece.dtype and convert is not None:
                piece = Cast(piece, dtype, convert)
            pieces[name] = piece
    return Chosen(step.step, pieces, aliases)


def export_safetensors(
    step: WholeStep, out: Path, options: ExportOptions, convert: Convert | None = None, progress: Progress | None = None
) -> Exported:
    """Write a step as one safetensors file.

    Every byte is checked as it is read. Memory: a few chunks (under 100 MB), and for a tensor that is stored in another
    order than its own all that it spans. The file is there whole or not at all.

    Raises:
        CorruptError: the step is damaged.
        StorageError: `out` is there already, or cannot be written.
        ValueError: as `chosen`.
    """
    refuse_inside(step, out)
    found = chosen(step, options, convert)
    file = _File(found.pieces, found.aliases)
    with new_file(out, overwrite=options.overwrite, nbytes=file.nbytes) as opened:
        file.write(opened, meter(file.nbytes, progress))
    return Exported(str(out.absolute()), step.step, len(found.pieces), found.aliases, file.nbytes)


def export_huggingface(
    step: WholeStep, out: Path, options: ExportOptions, convert: Convert | None = None, progress: Progress | None = None
) -> Exported:
    """Write a step as a folder of safetensors files with an index, as transformers and others read it.

    Tensors go into shards in natural order. The index is given its name last: before that, readers see no model. Other
    files of the folder (a config, a tokenizer) stay. Memory and errors as `export_safetensors`.
    """
    refuse_inside(step, out)
    found = chosen(step, options, convert)
    shards = _shards(found, options.shard_size or SHARD_BYTES)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    total = sum(piece.nbytes for piece in found.pieces.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard.pieces},
    }
    text = msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
    nbytes = sum(shard.nbytes for shard in shards)
    told = meter(nbytes, progress)
    with new_folder(out, overwrite=options.overwrite, nbytes=nbytes + len(text), ours=_is_of_a_model) as folder:
        for name, shard in zip(names, shards, strict=True):
            with folder.file(name) as opened:
                shard.write(opened, told)
        with folder.file(INDEX) as opened:
            opened.write(text)
    return Exported(
        str(out.absolute()), step.step, len(found.pieces), found.aliases, nbytes + len(text), files=len(shards) + 1
    )


def refuse_inside(step: WholeStep, out: Path) -> None:
    """ValueError where `out` lies in the run's folder, whose files are not for writing over."""
    there = real(out)
    if isinstance(step.where, Path) and real(step.where) in (there, *there.parents):
        raise ValueError(f"{out} lies in the run's own folder: export to somewhere else")


def meter(total: int, progress: Progress | None) -> Callable[[int], None]:
    """Adds up what is written, and tells whoever wants to know."""
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return add


class _File:
    """One safetensors file to be written."""

    def __init__(self, pieces: dict[str, Readable], aliases: dict[str, str]) -> None:
        self.pieces = pieces
        # The largest elements first, so that each tensor is aligned to its element size.
        self._order = sorted(pieces, key=lambda name: (-DTYPES[pieces[name].dtype].itemsize, name))
        self._header = _header(pieces, self._order, aliases)
        self.nbytes = len(self._header) + sum(piece.nbytes for piece in pieces.values())

    def write(self, file: NewFile, told: Callable[[int], None]) -> None:
        at = len(self._header)
        places = [Place(0, at, Plain(self._header))]
        for name in self._order:
            places.append(Place(at, self.pieces[name].nbytes, self.pieces[name]))
            at += self.pieces[name].nbytes
        pour(file.fd, places, self.nbytes, told)


def _shards(found: Chosen, most: int) -> list[_File]:
    """The files of a folder: as many tensors in each as fit, at least one. An alias is noted beside its tensor."""
    groups: list[dict[str, Readable]] = [{}]
    size = 0
    for name, piece in found.pieces.items():
        if groups[-1] and size + piece.nbytes > most:
            groups.append({})
            size = 0
        groups[-1][name] = piece
        size += piece.nbytes
    return [_File(group, {alias: name for alias, name in found.aliases.items() if name in group}) for group in groups]


def _is_of_a_model(name: str) -> bool:
    """Whether a file of that name is part of a model that this one takes the place of."""
    return name in (INDEX, "model.safetensors") or _SHARD.fullmatch(name) is not None


def _header(pieces: dict[str, Readable], order: Sequence[str], aliases: dict[str, str]) -> bytes:
    slots: dict[str, Slot] = {}
    true_types: dict[str, str] = {}
    begin = 0
    for name in order:
        piece = pieces[name]
        dtype = DTYPES[piece.dtype]
        slots[name] = Slot(dtype.code, (*piece.shape, *dtype.trailing), (begin, begin + piece.nbytes))
        begin += piece.nbytes
        if CODES[dtype.code] != dtype:
            true_types[name] = dtype.name
    metadata = {**aliases, "format": "pt"}
    if true_types:
        metadata[DTYPES_KEY] = msgspec.json.encode(true_types).decode()
    header = safetensors.encode(slots, metadata)
    if len(header) > safetensors.MAX_HEADER:
        raise CapabilityError(
            f"{len(order)} tensors make a header of {len(header)} bytes, more than any reader takes",
            hint="export parts of it with only=, or a folder of shards",
        )
    return header
